"""Routers compute in float32, whatever the model's dtypes and recipes are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import (
    compiled_layer,
    inputs,
    layer,
    random_params,
    sequence_info,
    small,
)

from axcore import functional
from axcore.config import apply_modifier
from axcore.errors import ConfigError
from axcore.layers import FeedForward, Linear
from axcore.layers.placement import build_model
from axcore.quantization import QuantizeModifier, find_sites
from axcore.testing import equations
from axlearn_moe import ExpertChoiceRouter, HashRouter, MoE, Top2RandomRouter, TopKRouter

ROUTERS = {
    "softmax": TopKRouter.Config(bias=True),
    "switch": TopKRouter.Config(normalize=False),
    "sigmoid in groups": TopKRouter.Config(
        score="sigmoid", num_groups=4, num_chosen_groups=2, group_score="top2_sum", choice_bias=True
    ),
    "random second": Top2RandomRouter.Config(),
    "experts choose": ExpertChoiceRouter.Config(),
    "hash": HashRouter.Config(),
}
BFLOAT16 = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), "bfloat16")


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_of_a_bfloat16_model_routes_as_in_float32(name):
    """On the same inputs and weights, which have 8 bits each: every bit of the result is equal."""
    x, info = inputs(2, 6).astype(jnp.bfloat16), sequence_info(2, 6, 1)
    real = info.segment_ids > 0

    def route(dtypes, params=None):
        cfg = ROUTERS[name].copy().set(input_dim=8, num_experts=8, top_k=2, **dtypes)
        router = cfg.instantiate(name="router")
        params = random_params(router) if params is None else params
        routing, _ = functional(
            router,
            state=params,
            inputs=(x.astype(dtypes.get("compute_dtype", "float32")), real, info),
            key=jax.random.key(0),
            is_training=True,
        )
        return params, routing

    params, narrow = route(BFLOAT16)
    wide = route({}, {n: p.astype(jnp.float32) for n, p in params.items()})[1]
    for field in ("logits", "probs", "gates"):
        assert getattr(narrow, field).dtype == jnp.float32, field
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


def test_recipes_reach_experts_and_leave_routers():
    cfg = small("fuji-test-v3")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4))
    cfg = apply_modifier(cfg, QuantizeModifier.Config(recipe="int8"))
    sites = find_sites(build_model(cfg))
    kinds = {path: type(site.module).__name__ for path, site in sites.items()}
    assert kinds["decoder/layer/0/feed_forward/experts/up"] == "Int8Dot"
    assert not [path for path in kinds if "router" in path]


def test_a_router_beside_quantized_experts_multiplies_in_plain_float32():
    cfg = layer(gate=Linear.Config(bias=False), compute_dtype="bfloat16", top_k=2, num_experts=8)
    quantized = apply_modifier(cfg.copy(), QuantizeModifier.Config(recipe="int8"))
    products = dots(quantized)
    of_router = [(out, operands) for out, operands in products if out == (2, 6, 8)]
    assert of_router == [((2, 6, 8), ("float32", "float32", "HIGHEST"))]
    assert any("int8" in operands for _, operands in products)

    x, info = inputs(2, 6), sequence_info(2, 6, 1)
    made = []
    for each in (cfg, quantized):
        params, run = compiled_layer(each.to_text(), x.shape, True)
        (_, (y, collection)), _ = run(params, x, info)
        made.append((y, collection))
    (plain, first), (coarse, second) = made
    assert not np.allclose(plain, coarse, atol=1e-3)
    # Losses and loads, which follow from the routing alone, are the same to the bit.
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_recipe_for_routers_is_refused():
    cfg = small("fuji-test-v3")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4))
    recipe = QuantizeModifier.Config(recipe="int8", include="**/router", exclude=())
    with pytest.raises(ConfigError, match="AX430"):
        apply_modifier(cfg, recipe)


def dots(cfg):
    """Shape and operands of each product of a layer's forward pass, inner programs included."""
    module = cfg.instantiate(name="layer")
    x, info = inputs(2, 6), sequence_info(2, 6, 1)
    program = jax.make_jaxpr(
        lambda params: functional(module, state=params, inputs=(x, info), is_training=False)[0]
    )(random_params(module))
    found = []
    for equation in equations(program):
        if equation.primitive.name == "dot_general":
            dtypes = [v.aval.dtype.name for v in equation.invars]
            precision = equation.params["precision"]
            precision = precision[0] if isinstance(precision, tuple) else precision
            operands = (*dtypes, getattr(precision, "name", None))
            found.append((equation.outvars[0].aval.shape, operands))
    return found
