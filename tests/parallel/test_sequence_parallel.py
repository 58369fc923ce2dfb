"""One rule splits norms and residuals along the sequence over tensor parallel devices."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments
from axcore.collection import total_loss
from axcore.context import functional
from axcore.layers import Attention, CausalLM, Decoder, FeedForward, RMSNorm, TransformerLayer
from axcore.layers.roles import SequenceInfo
from axcore.parallel import (
    MeshShape,
    ProgramTarget,
    SequenceParallelModifier,
    ShardingRules,
    batch_sharding,
    build_mesh,
    make_global_array,
    resolve_instance,
)
from axcore.parallel.aot import compiler_for
from axcore.plugins import host

BATCH, SEQ, DIM, MODEL = 4, 64, 24, 4
RULES = ShardingRules(activation_rules={"residual_seq": ("seq", "model")})

pytestmark = pytest.mark.xdist_group("sequence_parallel")


@pytest.fixture(scope="module")
def lower():
    """rules -> the lowered loss and gradients, with arguments; None is for one device."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4),
        attention_norm=RMSNorm.Config(),
        # No dim of a branch has the size of another.
        feed_forward=FeedForward.Config(hidden_dim=80),
    )
    lm = CausalLM.Config(
        vocab_size=32,
        max_seq_len=SEQ,
        model_dim=DIM,
        decoder=Decoder.Config(num_layers=3, layer=layer),
    ).instantiate(name="model")
    tokens = np.random.default_rng(0).integers(1, 32, (BATCH, SEQ + 1), dtype=np.int32)

    def lowered(rules: ShardingRules | None):
        shape = MeshShape(data=2, model=MODEL) if rules else MeshShape()
        mesh = build_mesh(shape, jax.devices()[: 8 if rules else 1])
        target = ProgramTarget("cpu-8", "cpu", mesh, rules or ShardingRules())

        def loss(params, ids, labels):
            _, collection = functional(
                lm, state=params, inputs=(ids, labels), is_training=True, target=target
            )
            return total_loss(collection)

        rows = batch_sharding(mesh, target.rules)
        params = jax.device_put(
            lm.initialize(jax.random.key(0)), target.shardings(lm.parameter_specs())
        )
        ids, labels = (make_global_array(x, rows, x.shape) for x in (tokens[:, :-1], tokens[:, 1:]))
        args = (params, ids, labels)
        return jax.jit(jax.value_and_grad(loss)).lower(*args), args

    return lowered


@pytest.fixture(scope="module")
def compiled(lower):
    """rules -> loss and gradients, and the text of the compiled program, once each."""

    @functools.cache
    def run(rules: ShardingRules | None):
        lowered, args = lower(rules)
        program = lowered.compile()
        return jax.device_get(program(*args)), program.as_text()

    return run


def shapes(text: str) -> set[str]:
    """Shapes of all results in a compiled program."""
    return set(re.findall(r"\bf32\[([\d,]*)\]", text))


def test_equals_one_device(compiled):
    (loss, grads), _ = compiled(RULES)
    (expected_loss, expected), _ = compiled(None)
    # float32 sums of 64 positions in another order.
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6),
        grads,
        expected,
    )


def test_nothing_of_the_whole_sequence_is_kept_between_branches(compiled):
    rows, part = BATCH // 2, SEQ // MODEL
    plain, split = (shapes(compiled(rules)[1]) for rules in (ShardingRules(), RULES))
    # The scan keeps one such array for each of the three layers for the backward pass.
    assert f"3,{rows},{SEQ},{DIM}" in plain
    assert f"3,{rows},{SEQ},{DIM}" not in split
    assert f"3,{rows},{part},{DIM}" in split


def test_norms_run_on_a_part_of_the_sequence(compiled):
    rows, part = BATCH // 2, SEQ // MODEL
    # Only a norm reduces over the model's dim: its statistics have one value per position.
    for rules, positions in ((ShardingRules(), SEQ), (RULES, part)):
        lines = [line for line in compiled(rules)[1].splitlines() if "reduce_sum" in line]
        found = {
            shape
            for line in lines
            if "norm" in line
            for shape in re.findall(r"f32\[([\d,]*)\]", line.split("=", 1)[1].split("(", 1)[0])
        }
        assert f"{rows},{positions}" in found, found


def test_without_the_rule_the_positions_follow_seq(lower):
    stated = ShardingRules(activation_rules={"residual_seq": ("seq",)})
    assert lower(stated)[0].as_text() == lower(ShardingRules())[0].as_text()


@pytest.mark.aot
@pytest.mark.slow
def test_a_gpu_scatters_the_sums_of_branches():
    """Compiled without a device; the CPU has no reduce-scatter of its own."""
    pytest.importorskip("jax_plugins.xla_cuda12", reason="jax-cuda12-plugin is not installed")
    if "gpu" not in host().compilers:
        pytest.skip("no plugin of the platform gpu is installed")
    instance = resolve_instance("gpu-h100-8")
    compiler = compiler_for(instance)
    compiler.prepare()
    mesh = build_mesh(MeshShape(data=2, model=MODEL), list(compiler.devices(instance)))
    target = ProgramTarget("gpu-h100-8", "gpu", mesh, RULES)
    layer = TransformerLayer.Config(input_dim=DIM, attention=Attention.Config(num_heads=4))
    layer = layer.instantiate(name="layer")

    def loss(params, x):
        info = SequenceInfo(positions=jnp.broadcast_to(jnp.arange(SEQ), (BATCH, SEQ)))
        out, _ = functional(layer, state=params, inputs=(x, info), is_training=True, target=target)
        return jnp.sum(jnp.square(out))

    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(layer.initialize, jax.random.key(0)),
        target.shardings(layer.parameter_specs()),
    )
    x = jax.ShapeDtypeStruct(
        (BATCH, SEQ, DIM), "float32", sharding=batch_sharding(mesh, target.rules)
    )
    options = dict(compiler.compile_options(instance))
    text = jax.jit(jax.grad(loss)).lower(params, x).compile(compiler_options=options).as_text()
    part = f"{BATCH // 2},{SEQ // MODEL},{DIM}"
    scattered = re.findall(rf"f32\[{part}\].* reduce-scatter(?:-start)?\(", text)
    gathered = re.findall(rf"f32\[{BATCH // 2},{SEQ},{DIM}\].* all-gather(?:-start)?\(", text)
    assert len(scattered) >= 3 and gathered


def test_a_modifier_makes_it_one_line():
    cfg = experiments.get("tiny-lm")
    modified = SequenceParallelModifier.Config().instantiate()(cfg.copy())
    assert modified.sharding_rules == RULES
    assert modified.set(sharding_rules=cfg.sharding_rules) == cfg
