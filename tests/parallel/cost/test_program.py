"""FLOPs and bytes of traced programs, against closed forms and XLA's own count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from axcore import experiments
from axcore.errors import ShardingError
from axcore.layers import RepeatedTransformer, StackedTransformer
from axcore.parallel.cost import ProgramCost, count_flops, count_function
from axcore.remat import Remat

Stack = StackedTransformer.Config | RepeatedTransformer.Config


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def xla_flops(fn, *args) -> float:
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


def train_step(stack: Stack, **fields: int):
    """The whole step of a two-layer model of dim 32 on 4 rows of 16 tokens, and its arguments."""
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 32
    cfg.model.decoder.stack = stack
    cfg.set(batch_size=4, seq_len=16, **fields)
    trainer = cfg.instantiate(name="trainer")
    batch = {name: array(4, 16, dtype="int32") for name in ("input_ids", "target_ids")}

    def step(state, batch):
        return trainer.train_step(state, batch)

    return step, (trainer.abstract_state(), batch)


@pytest.fixture(scope="module")
def unrolled() -> tuple[ProgramCost, dict[str, float]]:
    step, args = train_step(StackedTransformer.Config())
    # XLA counts the lowered program too, before it is compiled.
    return count_function(step, *args), jax.jit(step).lower(*args).cost_analysis()


@pytest.fixture(scope="module")
def scanned() -> ProgramCost:
    step, args = train_step(RepeatedTransformer.Config())
    return count_function(step, *args)


# Weights of two layers (12 d^2 each) and the tied head, and attention over all keys, 64 tokens.
MODEL_MATMUL_FLOPS = 64 * (6 * (2 * 12 * 32**2 + 264 * 32) + 12 * 2 * 32 * 16)


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (lambda x, y: x @ y, (array(64, 32), array(32, 48)), 2 * 64 * 32 * 48),
        (
            lambda x, y: jnp.einsum("bti,bsi->bts", x, y),
            (array(4, 8, 16), array(4, 24, 16)),
            2 * 4 * 8 * 24 * 16,
        ),
        # 16 positions of 3 taps, two of which are padding.
        (
            lambda x, k: lax.conv_general_dilated(
                x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            (array(2, 16, 16, 3), array(3, 3, 3, 8)),
            2 * 2 * (16 * 3 - 2) ** 2 * 3 * 8,
        ),
        (
            lambda x, k: lax.conv_general_dilated(
                x, k, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            (array(2, 16, 16, 4), array(4, 4, 4, 8)),
            2 * 2 * 7 * 7 * 16 * 4 * 8,
        ),
    ],
    ids=["matmul", "batched", "conv-same", "conv-strided"],
)
def test_products_equal_the_closed_form_and_xla(fn, args, expected):
    cost = count_function(fn, *args)
    assert cost.matmul_flops == cost.flops == expected
    assert xla_flops(fn, *args) == expected


def test_an_unrolled_training_step_counts_as_xla_counts_it(unrolled):
    cost, by_xla = unrolled
    assert cost.matmul_flops == MODEL_MATMUL_FLOPS
    # XLA writes some operations out (a select here, a conversion there): 0.1 % of a tiny model.
    assert cost.flops == pytest.approx(by_xla["flops"], rel=0.005)
    assert cost.transcendentals == pytest.approx(by_xla["transcendentals"], rel=0.005)


def test_a_scan_counts_as_often_as_it_runs(unrolled, scanned):
    assert scanned.matmul_flops == unrolled[0].matmul_flops
    assert scanned.flops == pytest.approx(unrolled[0].flops, rel=0.005)
    assert not scanned.unknown_loops and not scanned.uncounted


def test_work_is_split_by_module_and_by_pass(scanned):
    projection = 2 * 64 * 32 * 32  # one of query's products, two layers
    by_path = scanned.flops_by_path()
    query = by_path["decoder/layer/0:2:1/attention/qkv/query/dot"]
    assert query == pytest.approx(2 * 3 * projection, rel=0.01)
    assert scanned.flops_by_path(1)["decoder"] > 0.7 * scanned.flops
    phases = scanned.flops_by_phase
    assert phases["backward"] == pytest.approx(2 * phases["forward"], rel=0.05)
    assert set(phases) == {"forward", "backward", "other"}


def test_remat_counts_what_it_repeats_as_hardware_flops(scanned):
    step, args = train_step(RepeatedTransformer.Config(remat=Remat(policy="full")))
    cost = count_function(step, *args)
    # All but the last product of a layer, whose result nobody needs again.
    again = 64 * 2 * (2 * (12 - 4) * 32**2 + 2 * 2 * 32 * 16)
    assert cost.matmul_flops == scanned.matmul_flops + again
    products = [e for e in cost.entries if e.kind == "matmul" and e.phase == "recompute"]
    assert sum(e.flops for e in products) == again < cost.recompute_flops


def test_what_the_program_does_not_use_is_not_counted(scanned):
    step, args = train_step(RepeatedTransformer.Config(), accumulation_steps=2)
    # Accumulation first runs the model to count tokens only, which needs none of its products.
    assert count_function(step, *args).matmul_flops == scanned.matmul_flops


def test_a_loop_without_a_trip_count_is_reported_and_counted_once():
    def fn(x):
        with jax.named_scope("solver"):
            return lax.while_loop(lambda y: jnp.sum(y) > 0, lambda y: y @ y, x)

    cost = count_function(fn, array(8, 8))
    assert cost.matmul_flops == 2 * 8**3
    (loop,) = cost.unknown_loops
    assert loop.path == "solver" and loop.flops >= 2 * 8**3


def test_a_loop_with_a_trip_count_is_not():
    cost = count_function(lambda x: lax.fori_loop(0, 5, lambda _, y: y @ y, x), array(8, 8))
    assert cost.matmul_flops == 5 * 2 * 8**3 and not cost.unknown_loops


def test_of_the_branches_of_a_cond_the_dearest_counts():
    def fn(x):
        return lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x)

    assert count_function(fn, array(8, 8)).matmul_flops == 2 * 2 * 8**3


def test_a_body_on_each_device_counts_for_each():
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])

    def fn(x, y):
        return lax.psum(x @ y, "model")

    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(P(None, "model"), P("model", None)), out_specs=P()
    )
    cost = count_function(mapped, array(16, 32), array(32, 8))
    assert cost.matmul_flops == 2 * 16 * 32 * 8
    (moved,) = cost.collective_bytes.values()
    assert moved == 4 * 16 * 8 * 4  # each of 4 devices hands in (16, 8) of float32


def test_rows_of_a_grouped_product_meet_one_matrix_each():
    def loss(x, w, sizes):
        return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

    args = (array(32, 8), array(4, 8, 16), array(4, dtype="int32"))
    one = 2 * 32 * 8 * 16
    assert count_function(loss, *args).matmul_flops == one
    assert count_function(jax.grad(loss, argnums=(0, 1)), *args).matmul_flops == 3 * one


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "float32"])
def test_products_are_split_by_the_dtype_of_their_operands(dtype):
    def fn(x, y):
        return lax.dot(x, y, preferred_element_type=jnp.float32) + 1.0

    cost = count_function(fn, array(8, 8, dtype=dtype), array(8, 8, dtype=dtype))
    assert cost.matmul_flops_by_dtype == {dtype: 2 * 8**3}


def test_a_mixed_product_runs_in_the_wider_dtype():
    def fn(x, y):
        return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    cost = count_function(fn, array(8, 8, dtype="bfloat16"), array(8, 8, dtype="float32"))
    assert list(cost.matmul_flops_by_dtype) == ["float32"]


def test_a_kernel_has_the_cost_it_states_or_that_of_its_body():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    block = pl.BlockSpec((4, 8), lambda i: (i, 0))

    def kernel(estimate: pl.CostEstimate | None):
        return pl.pallas_call(
            double,
            out_shape=array(8, 8),
            grid=(2,),
            in_specs=[block],
            out_specs=block,
            cost_estimate=estimate,
        )

    stated = pl.CostEstimate(flops=1000, transcendentals=7, bytes_accessed=512)
    cost = count_function(kernel(stated), array(8, 8))
    assert (cost.matmul_flops, cost.transcendentals, cost.bytes_fused) == (1000, 7, 512)
    assert count_function(kernel(None), array(8, 8)).flops == 64


def test_what_is_not_known_is_named():
    cost = count_function(jnp.linalg.cholesky, array(8, 8))
    assert cost.uncounted == {"cholesky": 1}


def test_an_elementwise_chain_reads_and_writes_memory_once():
    cost = count_function(lambda x: jnp.exp(x) * 2 + 1, array(64, 64))
    size = 64 * 64 * 4
    assert cost.bytes_fused == 2 * size
    assert cost.bytes_unfused > 4 * size
    assert (cost.flops, cost.transcendentals) == (2 * 64 * 64, 64 * 64)
    assert (cost.argument_bytes, cost.output_bytes) == (size, size)


def test_a_product_reads_what_a_chain_wrote():
    def fn(x, y):
        return jnp.tanh(x) @ y

    # x in, tanh(x) out and in again, y in, result out; all (16, 16).
    assert count_function(fn, array(16, 16), array(16, 16)).bytes_fused == 5 * 16 * 16 * 4


def test_a_look_up_moves_its_rows_and_not_its_table():
    def fn(table, ids):
        return table.at[ids].get(mode="promise_in_bounds")

    cost = count_function(fn, array(1000, 64), array(8, dtype="int32"))
    assert 2 * 8 * 64 * 4 <= cost.bytes_fused < 1000 * 64


def test_what_is_no_jaxpr_is_refused():
    with pytest.raises(ShardingError, match=r"expected a jaxpr, got function") as error:
        count_flops(lambda x: x)
    assert "make_jaxpr" in str(error.value)
