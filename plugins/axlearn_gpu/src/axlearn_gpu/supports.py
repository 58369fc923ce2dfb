"""What the kernels of this package serve: each function gives the reason why not, without JAX."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from axcore.ops.masks import Causal, Full, Mask, SegmentIds, SlidingWindow
from axcore.ops.refusals import blockwise_attention, own_products
from axlearn_gpu._capability import capability_of

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = [
    "Structure",
    "cudnn",
    "pallas_grouped",
    "pallas_triton",
    "structure",
    "tokamax_mosaic",
    "triton_gated_activation",
    "triton_linear_cross_entropy",
    "triton_norm",
    "triton_rotary",
]


_ADA, _HOPPER = (8, 9), (9, 0)
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32")
# A row of a normalization has to fit into one thread block's registers.
_MAX_NORM_DIM = 32768
#: Activations that the kernel knows.
GATES = ("silu", "gelu_tanh", "relu")


class Structure(NamedTuple):
    """A mask as one band of positions and segments.

    Attributes:
        left: Earlier positions seen, or None for all.
        right: Later positions seen, or None for all.
        segments: Whether segment ids restrict it.
        other: A part that does not fit this form, or None.
    """

    left: int | None
    right: int | None
    segments: bool
    other: Mask | None


def structure(mask: Mask | None) -> Structure:
    """Returns what a mask allows.

    Example:
        >>> structure(Causal() & SlidingWindow(left=1023))
        Structure(left=1023, right=0, segments=False, other=None)
    """
    left: int | None = None
    right: int | None = None
    segments = False
    for part in (mask or Full()).parts():
        if isinstance(part, Causal):
            right = 0
        elif isinstance(part, SlidingWindow):
            left = _least(left, part.left)
            right = _least(right, part.right)
        elif isinstance(part, SegmentIds):
            segments = True
        elif not isinstance(part, Full):
            return Structure(left, right, segments, part)
    return Structure(left, right, segments, None)


def _least(a: int | None, b: int | None) -> int | None:
    known = [n for n in (a, b) if n is not None]
    return min(known) if known else None


def cudnn(call: OpCall) -> str | None:
    """Why cuDNN's attention cannot serve the call, or None."""
    without = ("bias", "sinks", "kv_valid", "logit_scale")
    if (reason := blockwise_attention(call, dtypes=_HALVES, without=without)) is not None:
        return reason
    if call.options.get("logit_cap") is not None:
        return f"has no soft cap of logits, got {call.options['logit_cap']:g}"
    head_dim, value_dim = call.shapes["q"][-1], call.shapes["v"][-1]
    capability = capability_of(call.instance)
    most = 256 if capability is None or capability >= _HOPPER else 128
    if head_dim != value_dim:
        return f"has one head_dim, got {head_dim} for queries and {value_dim} for values"
    if head_dim % 8 or head_dim > most:
        return f"needs a head_dim that is a multiple of 8 up to {most}, got {head_dim}"
    seen = structure(call.mask)
    if seen.other is not None:
        return f"does not know the mask {seen.other}"
    if seen.segments:
        return "takes segment ids only as a dense (T, S) mask, which long sequences cannot afford"
    if seen.right not in (None, 0) or (seen.left is not None and seen.right is None):
        return f"has windows to the left only, under a causal mask, got {call.mask}"
    return None


def pallas_triton(call: OpCall) -> str | None:
    """Why the Pallas attention of this package cannot serve the call, or None."""
    without = ("bias", "sinks", "logit_scale")
    if (reason := blockwise_attention(call, dtypes=_FLOATS, without=without)) is not None:
        return reason
    head_dim, value_dim = call.shapes["q"][-1], call.shapes["v"][-1]
    if max(head_dim, value_dim) > 256:
        return f"keeps whole heads in registers, up to 256 dims, got {max(head_dim, value_dim)}"
    seen = structure(call.mask)
    if seen.other is not None:
        return f"does not know the mask {seen.other}"
    return None


def pallas_grouped(call: OpCall) -> str | None:
    """Why the grouped product of this package cannot serve the call, or None."""
    rows, weights = call.dtypes["rows"], call.dtypes["weights"]
    float8 = {name for name in (rows, weights) if name in _FLOAT8}
    if rows not in (*_FLOATS, *_FLOAT8, "int8"):
        return f"is for rows in {', '.join((*_FLOATS, *_FLOAT8))} or int8, got {rows}"
    narrower = ("int8", *_FLOAT8) if rows in _FLOATS else _FLOAT8 if rows in _FLOAT8 else ()
    if weights != rows and weights not in narrower:
        return f"multiplies {rows} by {rows} or fewer bits, got {weights}"
    capability = capability_of(call.instance)
    if float8 and capability is not None and capability < _ADA:
        return f"needs compute capability 8.9 for {' and '.join(sorted(float8))}"
    return None


def tokamax_mosaic(call: OpCall) -> str | None:
    """Why tokamax's Mosaic-GPU attention cannot serve the call, or None."""
    if importlib.util.find_spec("tokamax") is None:
        return "needs tokamax, which is not installed"
    if call.needs_gradient:
        return "its gradient would hold all logits, (queries x keys) of each head"
    capability = capability_of(call.instance)
    if capability is not None and capability < _HOPPER:
        return f"needs compute capability 9.0, {call.instance} has {capability[0]}.{capability[1]}"
    without = ("bias", "sinks", "kv_valid", "logit_scale")
    if (reason := blockwise_attention(call, dtypes=_HALVES, without=without)) is not None:
        return reason
    seen = structure(call.mask)
    if seen.other is not None:
        return f"does not know the mask {seen.other}"
    return "takes segment ids only as a dense (T, S) mask" if seen.segments else None


def triton_norm(call: OpCall) -> str | None:
    """Why the Triton RMSNorm cannot serve the call, or None."""
    dim = call.shapes["x"][-1]
    if dim > _MAX_NORM_DIM:
        return f"keeps a row in registers, up to {_MAX_NORM_DIM} values, got {dim}"
    return _triton(call, ("x",))


def triton_gated_activation(call: OpCall) -> str | None:
    """Why the Triton gated activation cannot serve the call, or None."""
    wanted = call.options.get("activation")
    if wanted not in GATES:
        return f"knows {', '.join(GATES)}, got {wanted}"
    return _triton(call, ("gate", "up"))


def triton_rotary(call: OpCall) -> str | None:
    """Why the Triton rotary kernel cannot serve the call, or None."""
    return _triton(call, ("q", "k"))


def triton_linear_cross_entropy(call: OpCall) -> str | None:
    """Why the Triton linear cross-entropy cannot serve the call, or None."""
    return own_products(call) or _triton(call, ("hidden", "weight"))


def _triton(call: OpCall, arguments: Iterable[str]) -> str | None:
    """Reasons that the kernels written in Triton share."""
    missing = _missing_triton()
    if missing is not None:
        return missing
    for name in arguments:
        if call.dtypes[name] not in _FLOATS:
            return f"is for {', '.join(_FLOATS)}, got {call.dtypes[name]} for {name}"
    return None


@functools.cache
def _missing_triton() -> str | None:
    for module, install in (("jax_triton", "jax-triton"), ("triton", "triton")):
        if importlib.util.find_spec(module) is None:
            return f"needs {install}, which is not installed"
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return "jax-triton needs JAX's CUDA plugin, which is not installed"
    return None
