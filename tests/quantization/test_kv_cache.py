"""A quantized cache holds what was written, to its precision, where it was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.config import apply_modifier
from axcore.errors import ConfigError
from axcore.layers import Attention
from axcore.layers.roles import SequenceInfo
from axcore.quantization import KVCacheRecipe, QuantizedKVCache

AXES = ("kv_heads", "head_dim")


def cache(dtype):
    return QuantizedKVCache.Config(
        tensors={"key": (2, 8), "value": (2, 8)},
        axes={"key": AXES, "value": AXES},
        dtype=dtype,
    ).instantiate(name="cache")


def info(positions):
    return SequenceInfo(positions=jnp.asarray(positions, jnp.int32), purpose="prefill")


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.5 / 127), ("float8_e4m3fn", 2.0**-4)])
def test_tokens_are_where_they_were_written(dtype, error):
    module, (batch, seq) = cache(dtype), (2, 3)
    state = module.init(batch, 6)
    assert {k: v.dtype for k, v in state.items() if not k.endswith(("scale", "lengths"))} == {
        "key": jnp.dtype(dtype),
        "value": jnp.dtype(dtype),
    }
    x = jax.random.normal(jax.random.key(0), (batch, seq, 2, 8))
    values = {"key": x, "value": 100.0 * x}
    positions = [[0, 1, 2], [3, -1, 4]]
    view, collection = functional(
        module, state=state, inputs=(values, info(positions)), is_training=False, method="extend"
    )
    dense = view.dense()
    np.testing.assert_array_equal(view.lengths, [3, 5])
    for name, got in (("key", dense.k), ("value", dense.v)):
        got, want = np.asarray(got), np.asarray(values[name])
        for row, slots in enumerate(positions):
            for token, slot in enumerate(slots):
                if slot < 0:
                    continue
                top = np.abs(want[row, token]).max(-1, keepdims=True)
                assert (np.abs(got[row, slot] - want[row, token]) <= 1.001 * error * top).all()
        assert not got[1, :3].any()  # nobody wrote there
    assert set(collection.state_updates) == {
        "key",
        "key_scale",
        "value",
        "value_scale",
        "lengths",
    }


def test_the_recipe_replaces_every_cache_once():
    cfg = apply_modifier(Attention.Config(input_dim=16), KVCacheRecipe.Config(dtype="int8"))
    assert isinstance(cfg.kv_cache, QuantizedKVCache.Config)
    with pytest.raises(ConfigError, match="quantized already"):
        apply_modifier(cfg, KVCacheRecipe.Config())
