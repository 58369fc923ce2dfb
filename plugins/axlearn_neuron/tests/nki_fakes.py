"""Stand-ins for the vendor's packages: what the kernels of this package call, computed by numpy.

The fake of ``flash_fwd`` and ``flash_attn_bwd`` checks the layouts and constraints that the
vendor's source states, then computes attention by its definition. The fake of the NKI language runs
this package's own kernel statement by statement.
"""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PARTITIONS = 128
MODULES = ("nki_flash_attention", "nki_rms_norm", "_nki_rms_norm_kernel")


# -- attention ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FlashConfig:
    seq_tile_size: int = 2048
    training: bool = True


class Gridded:
    """``kernel[grid](...)``; remembers its calls."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __getitem__(self, grid):
        def run(*args, **static):
            self.calls.append((grid, static))
            return self.function(grid, *args, **static)

        return run


def logits_of(q, k, causal, scale, bias):
    logits = jnp.einsum("bnht,bnhs->bnts", *(x.astype(jnp.float32) for x in (q, k))) * scale
    if bias is not None:
        assert bias.shape == (1, 1, *logits.shape[2:]) and q.shape[0] == 1
        logits = logits + bias
    return jnp.where(jnp.tril(jnp.ones(logits.shape[2:], bool)), logits, -1e35) if causal else (
        logits
    )  # fmt: skip


def probabilities(q, k, causal, scale, bias):
    """(B, N, T, S) and the logarithms of the sums (B, N, T); q, k in columns."""
    logits = logits_of(q, k, causal, scale, bias)
    return jax.nn.softmax(logits), jax.nn.logsumexp(logits, axis=-1)


def flash_fwd(
    grid, q, k, v, seed, *, softmax_scale, use_causal_mask, mixed_precision, dropout_p, config,
    logit_bias=None,
):  # fmt: skip
    batch, heads, dim, queries = q.shape
    kv_heads, keys = k.shape[1], k.shape[3]
    assert k.shape == (batch, kv_heads, dim, keys)
    assert v.shape == (batch, kv_heads, keys, dim)
    assert q.dtype == k.dtype == v.dtype
    assert grid == (batch, kv_heads)
    assert dim <= PARTITIONS
    assert keys % config.seq_tile_size == 0 and config.seq_tile_size >= 512
    assert mixed_precision == (q.dtype == jnp.bfloat16)
    assert dropout_p == 0.0
    assert (seed is None) == (not config.training)
    times = heads // kv_heads
    p, log_sums = probabilities(
        q, jnp.repeat(k, times, 1), use_causal_mask, softmax_scale, logit_bias
    )
    wide = jnp.repeat(v, times, 1).astype(jnp.float32)
    out = jnp.einsum("bnts,bnsh->bnth", p, wide).astype(q.dtype)
    # Position t is in partition t % 128 of tile t // 128.
    tiled = log_sums.reshape(batch, heads, queries // PARTITIONS, PARTITIONS)
    return (out, tiled.swapaxes(2, 3)) if config.training else out


def flash_attn_bwd(
    grid, q, k, v, o, dy, lse, seed, *, use_causal_mask, mixed_precision, dropout_p, softmax_scale,
    logit_bias=None,
):  # fmt: skip
    batch, heads, _, queries = q.shape
    assert k.shape == v.shape == o.shape == dy.shape == q.shape
    assert q.dtype == k.dtype == v.dtype == o.dtype == dy.dtype
    assert lse.shape == (batch, heads, PARTITIONS, queries // PARTITIONS)
    assert lse.dtype == jnp.float32
    assert seed.shape == (1,) and dropout_p == 0.0
    assert grid == (batch, heads)
    assert mixed_precision == (q.dtype == jnp.bfloat16)
    qf, kf, vf, of, df = (x.astype(jnp.float32) for x in (q, k, v, o, dy))
    logits = logits_of(q, k, use_causal_mask, softmax_scale, logit_bias)
    p = jnp.exp(logits - lse.swapaxes(2, 3).reshape(batch, heads, queries)[..., None])
    dp = jnp.einsum("bnht,bnhs->bnts", df, vf)
    ds = p * (dp - jnp.sum(df * of, axis=2)[..., None]) * softmax_scale
    return tuple(
        x.astype(q.dtype)
        for x in (
            jnp.einsum("bnts,bnhs->bnht", ds, kf),
            jnp.einsum("bnts,bnht->bnhs", ds, qf),
            jnp.einsum("bnts,bnht->bnhs", p, df),
        )
    )


# -- the language ---------------------------------------------------------------------------------


class Memory:
    """An array in device memory: indexed only in load and store."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, index):
        return self.values, np.broadcast_arrays(*index)


class Tile(np.ndarray):
    def broadcast_to(self, shape):
        return np.broadcast_to(np.asarray(self), shape)


def _load(view, mask=True, dtype=None):
    values, index = view
    mask = np.broadcast_to(mask, index[0].shape)
    inside = [np.where(mask, i, 0) for i in index]
    # What is masked out is whatever the memory held.
    loaded = np.where(mask, np.asarray(values[tuple(inside)], dtype), np.float32(7.0))
    return loaded.view(Tile)


def _store(view, value, mask=True):
    values, index = view
    mask = np.broadcast_to(mask, index[0].shape)
    values[tuple(i[mask] for i in index)] = np.broadcast_to(value, mask.shape)[mask]


class Language(types.ModuleType):
    """``neuronxcc.nki.language`` of one program after another."""

    program = programs = 0
    float32 = np.float32
    shared_hbm = "hbm"

    def __init__(self):
        super().__init__("neuronxcc.nki.language")
        self.arange, self.affine_range = np.arange, range
        self.load, self.store = _load, _store
        self.square, self.multiply = np.square, np.multiply
        self.sum = lambda x, axis, keepdims: np.sum(x, axis=tuple(axis), keepdims=keepdims)
        self.rsqrt = lambda x: 1.0 / np.sqrt(x)
        self.nc = lambda cores: cores
        self.made = []

    def ndarray(self, shape, dtype, buffer):
        # One result for all programs: each asks for it in the same order.
        number = self.asked
        self.asked += 1
        if number == len(self.made):
            self.made.append(np.full(shape, np.nan, dtype))
        return Memory(self.made[number])

    def program_id(self, axis):
        return self.program

    def num_programs(self, axis):
        return self.programs

    def run(self, function, programs, arrays, static):
        self.made, self.programs = [], programs
        out = ()
        for self.program in range(programs):
            self.asked = 0
            out = function(*(Memory(np.asarray(a)) for a in arrays), *static)
        return tuple(memory.values for memory in out)


def _jit(language):
    def decorate(function):
        def launch(grid, *args):
            arrays = [a for a in args if isinstance(a, jax.Array)]
            static = args[len(arrays) :]
            (programs,) = grid
            zeros = [np.zeros(a.shape, a.dtype) for a in arrays]
            shapes = language.run(function, programs, zeros, static)
            return jax.pure_callback(
                lambda *values: language.run(function, programs, values, static),
                tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in shapes),
                *arrays,
            )

        return Gridded(launch)

    return decorate


def install(patch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Puts the fakes in place; undone with the patch."""
    language = Language()
    attention = types.ModuleType("neuronxcc.nki.kernels.attention")
    found = types.SimpleNamespace(forward=Gridded(flash_fwd), backward=Gridded(flash_attn_bwd))

    class Callable(Gridded):
        def __call__(self):
            raise AssertionError("launched without a grid")

    attention.__dict__.update(
        flash_fwd=Callable(flash_fwd), flash_attn_bwd=Callable(flash_attn_bwd),
        FlashConfig=FlashConfig,
    )  # fmt: skip
    found.forward, found.backward = attention.flash_fwd, attention.flash_attn_bwd
    nki = types.ModuleType("neuronxcc.nki")
    nki.__dict__.update(jit=_jit(language), language=language)
    bridge = types.ModuleType("jax_neuronx")
    bridge.__dict__["nki_call"] = lambda *args, **kwargs: None
    modules = {
        "jax_neuronx": bridge,
        "neuronxcc": types.ModuleType("neuronxcc"),
        "neuronxcc.nki": nki,
        "neuronxcc.nki.language": language,
        "neuronxcc.nki.kernels": types.ModuleType("neuronxcc.nki.kernels"),
        "neuronxcc.nki.kernels.attention": attention,
    }
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    for name in MODULES:
        patch.delitem(sys.modules, f"axlearn_neuron.{name}", raising=False)
    return found


def remove() -> None:
    """Forgets what was imported with the fakes."""
    for name in MODULES:
        sys.modules.pop(f"axlearn_neuron.{name}", None)
