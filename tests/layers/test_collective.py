"""A layer whose products are collective computes what it computed on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments, functional, ops
from axcore.config import apply_modifier
from axcore.errors import ConfigError
from axcore.layers import CollectiveDot, FeedForward, Linear, SequenceInfo, TransformerLayer
from axcore.parallel import (
    CollectiveMatmulModifier,
    MeshShape,
    ProgramTarget,
    ShardingRules,
    build_mesh,
)

RING = {op: ("ring", "xla") for op in ("all_gather_matmul", "matmul_reduce_scatter")}

IN_A_HURRY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def layer_config():
    cfg = TransformerLayer.Config(input_dim=16)
    cfg.attention.set(num_heads=4, num_kv_heads=2)
    cfg.feed_forward = FeedForward.Config(
        hidden_dim=32, gate=Linear.Config(bias=False), activation="silu"
    )
    return cfg


def run(cfg, target, x, params):
    layer = cfg.instantiate(name="layer")
    info = SequenceInfo(positions=jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))

    def loss(params, x):
        y, _ = functional(layer, state=params, inputs=(x, info), is_training=True, target=target)
        return jnp.sum(jnp.sin(y)), y

    with ops.record_choices() as choices:
        step = jax.jit(jax.grad(loss, (0, 1), has_aux=True), compiler_options=IN_A_HURRY)
        gradients, y = step(params, x)
    return (y, gradients), {(c.site, c.op): c for c in choices}


def test_a_transformer_layer_equals_one_device():
    plain = layer_config()
    params = plain.instantiate(name="layer").initialize(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 16, 16))
    expected, _ = run(plain, None, x, params)
    changed = apply_modifier(layer_config(), CollectiveMatmulModifier.Config())
    mesh = build_mesh(MeshShape(model=4), jax.devices()[:4])
    rules = ShardingRules(activation_rules={"residual_seq": ("seq", "model")})
    target = ProgramTarget("cpu-8", "cpu", mesh, rules, kernels=RING)
    got, choices = run(changed, target, x, params)
    # float32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)
    served = {site: c.chosen for (site, op), c in choices.items() if op in RING}
    by_ring = {site for site, chosen in served.items() if chosen == "ring"}
    assert {"feed_forward/up/dot", "feed_forward/gate/dot", "feed_forward/down/dot"} <= by_ring
    assert any(site.startswith("attention") for site in by_ring)


def test_the_modifier_changes_linear_layers_and_says_what_serves():
    cfg = apply_modifier(experiments.get("tiny-lm"), CollectiveMatmulModifier.Config())
    assert cfg.ops["all_gather_matmul"].implementations == ("ring", "xla")
    assert len(cfg.find(CollectiveDot.Config)) == len(cfg.find(Linear.Config))
    with pytest.raises(ConfigError, match=r"'head/\*' matches no linear layer"):
        apply_modifier(
            experiments.get("tiny-lm"), CollectiveMatmulModifier.Config(include="head/*")
        )
