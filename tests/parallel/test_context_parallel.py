"""A model over a split sequence: chosen by configuration, equal to one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from axcore import experiments, ops
from axcore.collection import total_loss
from axcore.context import functional
from axcore.layers import Attention, CausalLM, Decoder, TransformerLayer
from axcore.parallel import (
    MeshShape,
    ProgramTarget,
    ShardingRules,
    batch_sharding,
    build_mesh,
    make_global_array,
)
from axcore.train import JsonlWriter, assemble, read_metrics, train

pytestmark = pytest.mark.xdist_group("context_parallel")
BATCH, SEQ = 4, 16
IN_A_HURRY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Sequence parallel between branches, context parallel inside attention.
RULES = ShardingRules(activation_rules={"residual_seq": ("seq", "model")})


@pytest.fixture(scope="module")
def value():
    """(implementations, rules, mesh sizes) -> loss and gradients, and the choices."""
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=4, num_kv_heads=2))
    lm = CausalLM.Config(
        vocab_size=32,
        max_seq_len=SEQ,
        model_dim=16,
        decoder=Decoder.Config(num_layers=2, layer=layer),
    ).instantiate(name="model")
    ids = np.random.default_rng(0).integers(1, 32, (BATCH, SEQ + 1), dtype=np.int32)
    batch = {
        "input_ids": ids[:, :-1],
        "target_ids": ids[:, 1:],
        "segment_ids": np.repeat([[1, 1, 1, 2, 2, 3, 3, 0]] * BATCH, SEQ // 8, axis=1),
        "positions": np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1)),
    }

    def run(implementations=(), **sizes):
        mesh = build_mesh(MeshShape(**sizes), jax.devices()[: 8 if sizes else 1])
        kernels = {"attention": implementations} if implementations else {}
        target = ProgramTarget("cpu-8", "cpu", mesh, RULES, kernels=kernels)

        def loss(params, batch):
            _, out = functional(lm, state=params, inputs=batch, is_training=True, target=target)
            return total_loss(out)

        rows = batch_sharding(mesh, target.rules)
        params = jax.device_put(
            lm.initialize(jax.random.key(0)), target.shardings(lm.parameter_specs())
        )
        arrays = {k: make_global_array(x, rows, x.shape) for k, x in batch.items()}
        with ops.record_choices() as choices:
            lowered = jax.jit(jax.value_and_grad(loss)).lower(params, arrays)
        result = lowered.compile(compiler_options=IN_A_HURRY)(params, arrays)
        return jax.device_get(result), {c.chosen for c in choices if c.op == "attention"}

    return run


@pytest.fixture(scope="module")
def expected(value):
    return value()[0]


@pytest.mark.parametrize(
    ("implementation", "sizes"),
    [
        ("ring", {"fsdp": 2, "seq": 2, "model": 2}),
        pytest.param("all_to_all", {"data": 4, "seq": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_model_equals_one_device(value, expected, implementation, sizes):
    (loss, grads), chosen = value((implementation,), **sizes)
    assert implementation in chosen
    # float32 sums over 16 positions in another order.
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6),
        grads,
        expected[1],
    )


@pytest.mark.slow
def test_flags_train_with_a_ring(tmp_path):
    losses = {}
    for name, flags in {
        "one": (),
        "ring": (
            "mesh_shape.data=2",
            "mesh_shape.seq=4",
            "ops.attention.implementations=('ring',)",
        ),
    }.items():
        cfg = experiments.get("tiny-lm")
        cfg.model.model_dim = 16
        cfg.model.decoder.num_layers = 1
        cfg.model.decoder.layer.attention.num_heads = 2
        cfg.set(max_step=2, batch_size=4, seq_len=16, sample_prompt=None)
        cfg.set(evalers={}, writers={"jsonl": JsonlWriter.Config()})
        a = assemble(cfg, instance="cpu-8" if flags else "cpu", sets=flags)
        train(a.cfg, out=tmp_path / name, instance=a.instance)
        losses[name] = [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]
    assert len(losses["ring"]) == 2
    np.testing.assert_allclose(losses["ring"], losses["one"], rtol=1e-5)
