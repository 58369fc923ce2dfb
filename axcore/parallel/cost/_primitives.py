"""What one equation of a jaxpr costs: FLOPs and bytes by primitive.

Conventions (``docs/flops.md``): a multiplication and an addition are two FLOPs; elementwise
arithmetic is one an element of the result; a reduction is one an element that disappears;
exponentials, roots and the like are counted apart. Padding that a convolution reads costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from axcore.parallel.cost._records import Kind

__all__ = ["FREE", "FUSIBLE", "Work", "equation_work", "num_bytes", "operand_dtype"]

_ARITHMETIC = frozenset(
    "add add_any sub mul div rem neg abs sign max min floor ceil round is_finite and or xor not eq "
    "ne lt le gt ge eq_to le_to lt_to select_n clamp nextafter square reduce_precision shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz real imag complex conj".split()
)
_TRANSCENDENTAL = frozenset(
    "exp exp2 log log1p expm1 tanh tan sin cos asin acos atan sinh cosh asinh acosh atanh atan2 "
    "sqrt rsqrt cbrt pow logistic erf erfc erf_inv lgamma digamma".split()
)
_REDUCE = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin "
    "reduce".split()
)
_SCAN_LIKE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())
_WINDOW = frozenset(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add "
    "select_and_gather_add".split()
)
_COLLECTIVE = frozenset(
    "psum psum_invariant psum2 pmax pmin all_gather all_gather_invariant reduce_scatter "
    "psum_scatter all_to_all ragged_all_to_all ppermute pbroadcast collective_permute".split()
)
_RANDOM = {"threefry2x32": 55, "random_bits": 55, "rng_bit_generator": 55}
"""Integer operations for a 32-bit word: of two, 20 rounds of 5 and the key's additions."""
# Moves data, with traffic of its own.
_MOVES = frozenset(
    "gather dynamic_slice dynamic_update_slice scatter scatter-add scatter-mul scatter-min "
    "scatter-max scatter_add concatenate pad sort top_k copy".split()
)
FREE = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose convert_element_type "
    "bitcast_convert_type iota slice rev stop_gradient name sharding_constraint copy_p "
    "device_put optimization_barrier pvary pcast reshard mesh_cast random_wrap random_unwrap "
    "random_seed random_fold_in random_split random_clone axis_index empty empty2 "
    "split create_token after_all layout_constraint".split()
)
"""Costs no FLOPs, and no traffic of its own when fused."""
FUSIBLE = (
    _ARITHMETIC | _TRANSCENDENTAL | _REDUCE | _SCAN_LIKE | FREE | {"integer_pow"} | set(_RANDOM)
)
"""What a compiler runs together with its neighbours."""

_BITS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}


class Work(NamedTuple):
    """What one equation does, once.

    Attributes:
        kind: What it is.
        flops: Multiplications and additions.
        transcendentals: Elements of exponentials and the like.
        num_bytes: Traffic of its own, or None for that of its operands and results.
        is_known: False when the FLOPs are not.
    """

    kind: Kind
    flops: int = 0
    transcendentals: int = 0
    num_bytes: int | None = None
    is_known: bool = True


def num_bytes(aval: Any) -> int:
    """Returns the bytes of an abstract array, 4-bit types packed; 0 for what is no array."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    bits = _BITS.get(str(dtype), 8 * getattr(dtype, "itemsize", 0))
    return -(-math.prod(aval.shape) * bits // 8)


def operand_dtype(avals: Sequence[Any]) -> str:
    """Returns the dtype of the first two operands, the wider one where they differ."""
    dtypes = [a.dtype for a in avals[:2] if getattr(a, "dtype", None) is not None]
    if not dtypes:
        return "none"
    return str(max(dtypes, key=lambda d: _BITS.get(str(d), 8 * getattr(d, "itemsize", 0))))


def equation_work(name: str, params: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Work:
    """Returns the work of an equation without inner programs.

    Args:
        name: Name of the primitive.
        params: Its parameters.
        ins: Abstract values of its operands.
        outs: Abstract values of its results.
    """
    if name in FREE:
        return Work("memory")
    size = _size(outs[0]) if outs else 0
    if name in _ARITHMETIC:
        return Work("vector", size)
    if name in _TRANSCENDENTAL:
        return Work("vector", 0, size)
    if name == "integer_pow":
        return Work("vector", size * _multiplications(abs(params["y"])) + size * (params["y"] < 0))
    if name in _REDUCE:
        return Work("vector", max(_size(ins[0]) - size, 0))
    if name in _SCAN_LIKE:
        return Work("vector", size)
    if name in _RANDOM:
        return Work("vector", _RANDOM[name] * sum(num_bytes(o) for o in outs) // 4)
    if name == "dot_general":
        return Work("matmul", _dot_flops(params["dimension_numbers"], ins))
    if name in ("ragged_dot_general", "ragged_dot"):
        return Work("matmul", _ragged_flops(params, ins))
    if name == "conv_general_dilated":
        return Work("matmul", _conv_flops(params, ins, outs))
    if name in _WINDOW:
        window = math.prod(params.get("window_dimensions", (1,)))
        return Work("vector", size * (window - 1))
    if name in _COLLECTIVE:
        return Work("collective", num_bytes=2 * sum(num_bytes(a) for a in ins))
    if name in _MOVES:
        return _moved(name, ins, outs)
    return Work("memory", is_known=False)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _multiplications(power: int) -> int:
    """Multiplications of a power by squaring."""
    return max(power.bit_length() - 1, 0) + max(power.bit_count() - 1, 0)


def _dot_flops(dimension_numbers: Any, ins: Sequence[Any]) -> int:
    (lhs_contract, rhs_contract), (_, rhs_batch) = dimension_numbers
    del lhs_contract
    rhs = ins[1].shape
    free = [n for d, n in enumerate(rhs) if d not in rhs_contract and d not in rhs_batch]
    return 2 * _size(ins[0]) * math.prod(free)


def _ragged_flops(params: Any, ins: Sequence[Any]) -> int:
    """Each row meets one group's matrix, so groups multiply nothing."""
    numbers = params.get("ragged_dot_dimension_numbers")
    if numbers is None:  # (M, K) with (groups, K, N)
        return 2 * _size(ins[0]) * ins[1].shape[-1]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    skip = {*contract, *batch, *numbers.rhs_group_dimensions}
    return 2 * _size(ins[0]) * math.prod(n for d, n in enumerate(ins[1].shape) if d not in skip)


def _conv_flops(params: Any, ins: Sequence[Any], outs: Sequence[Any]) -> int:
    """Counts only pairs of kernel and input positions where there is input."""
    numbers = params["dimension_numbers"]
    lhs, rhs, out = ins[0].shape, ins[1].shape, outs[0].shape
    pairs = 1
    for i, (low, _) in enumerate(params["padding"]):
        pairs *= _valid_pairs(
            lhs[numbers.lhs_spec[2 + i]],
            rhs[numbers.rhs_spec[2 + i]],
            out[numbers.out_spec[2 + i]],
            params["window_strides"][i],
            low,
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
    batch = lhs[numbers.lhs_spec[0]] // params["batch_group_count"]
    # The kernel's input features are those of one group already.
    return 2 * batch * pairs * rhs[numbers.rhs_spec[0]] * rhs[numbers.rhs_spec[1]]


def _valid_pairs(
    size: int, kernel: int, out: int, stride: int, low: int, in_dilation: int, dilation: int
) -> int:
    at = np.arange(out)[:, None] * stride - low + np.arange(kernel)[None, :] * dilation
    inside = (at >= 0) & (at <= (size - 1) * in_dilation) & (at % in_dilation == 0)
    return int(inside.sum())


def _moved(name: str, ins: Sequence[Any], outs: Sequence[Any]) -> Work:
    """Only what is touched moves: a look-up reads its rows, an update in place writes its own."""
    made = sum(num_bytes(o) for o in outs)
    if name in ("gather", "dynamic_slice"):
        return Work("memory", num_bytes=2 * made + sum(num_bytes(a) for a in ins[1:]))
    if name == "dynamic_update_slice":
        return Work("memory", num_bytes=2 * num_bytes(ins[1]))
    if name.startswith("scatter"):
        adds = _size(ins[2]) if name != "scatter" else 0
        touched = (3 if adds else 2) * num_bytes(ins[2]) + num_bytes(ins[1])
        return Work("memory", adds, num_bytes=touched)
    if name in ("sort", "top_k"):
        size = _size(ins[0])
        return Work("vector", size * max(1, math.ceil(math.log2(max(size, 2)))))
    return Work("memory", num_bytes=sum(num_bytes(a) for a in ins) + made)
