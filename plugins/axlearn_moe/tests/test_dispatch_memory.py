"""What the compiler sets aside for a layer, forward and backward, as tokens and experts grow."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from models_for_moe_tests import layer, random_params, sequence_info, weighted

from axcore import functional
from axcore.collection import total_loss
from axcore.layers import Linear
from axlearn_moe import EinsumDispatch, GroupedDispatch

pytestmark = pytest.mark.slow

DIM, HIDDEN, TOP_K = 64, 64, 2
TOKENS, EXPERTS = 512, 8
FLOAT32 = 4
DROPLESS, ONE_HOT = GroupedDispatch.Config, EinsumDispatch.Config


@functools.cache
def compiled_bytes(dispatch: type, tokens: int, experts: int) -> int:
    """Temporary memory of one layer's gradients; arguments and results are not in it."""
    plain = Linear.Config(bias=False)
    cfg = layer(input_dim=DIM, hidden_dim=HIDDEN, num_experts=experts, top_k=TOP_K)
    module = cfg.set(up=plain, gate=plain, down=plain, dispatch=dispatch()).instantiate(name="moe")

    def loss(params, x, info):
        y, collection = functional(
            module, state=params, inputs=(x, info), key=jax.random.key(0), is_training=True
        )
        return weighted(y, info) + total_loss(collection)

    params = jax.eval_shape(lambda: random_params(module))
    x = jax.ShapeDtypeStruct((1, tokens, DIM), jnp.float32)
    info = jax.eval_shape(lambda: sequence_info(1, tokens))
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x, info).compile()
    return program.memory_analysis().temp_size_in_bytes


def weight_bytes(experts: int) -> int:
    return experts * 3 * DIM * HIDDEN * FLOAT32


def test_dropless_memory_is_linear_in_tokens():
    once, twice = (compiled_bytes(DROPLESS, n, EXPERTS) for n in (TOKENS, 2 * TOKENS))
    # Blocks of the grouped product are of one size and do not double.
    assert 1.7 * once < twice <= 2.1 * once
    # The one-hot tensors are tokens x experts x places, and each expert has a place for each token.
    once, twice = (compiled_bytes(ONE_HOT, n, EXPERTS) for n in (TOKENS, 2 * TOKENS))
    assert twice > 3.5 * once


@pytest.mark.parametrize("times", [2, 8])
def test_more_experts_of_the_same_active_width_take_no_more_than_their_gradients_do(times):
    """A token meets as many experts of the same width. What grows is the router's few arrays
    (tokens, experts), which are smaller than the weights' gradients here, and less than those."""
    few, many = EXPERTS, times * EXPERTS
    growth = compiled_bytes(DROPLESS, TOKENS, many) - compiled_bytes(DROPLESS, TOKENS, few)
    of_weights = weight_bytes(many) - weight_bytes(few)
    one_hot = TOKENS * (many - few) * TOKENS * FLOAT32
    assert growth <= of_weights < one_hot / 4
    one_hot_growth = compiled_bytes(ONE_HOT, TOKENS, many) - compiled_bytes(ONE_HOT, TOKENS, few)
    assert one_hot_growth >= one_hot
