"""The one place that launches kernels written in Triton: through jax-triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["inlined", "power_of_two", "triton_call"]


def power_of_two(n: int) -> int:
    """Returns the least power of two that is not below n: sizes of Triton's blocks.

    Example:
        >>> power_of_two(5), power_of_two(8)
        (8, 8)
    """
    return 1 << max(0, n - 1).bit_length()


def inlined(function: Callable[..., Any]) -> Any:
    """``@triton.jit`` of what kernels call.

    To type checkers the result of ``triton.jit`` never returns, outside of kernels as it is
    (triton 3.7).
    """
    import triton  # pyright: ignore[reportMissingImports]

    return triton.jit(function)


def triton_call(
    kernel: Any,
    *arrays: jax.Array,
    out_shape: Any,
    grid: tuple[int] | tuple[int, int],
    capability: int,
    num_warps: int = 4,
    num_stages: int = 1,
    **constants: Any,
) -> Any:
    """Launches a ``@triton.jit`` function; pointers to the results follow those to ``arrays``.

    Args:
        kernel: The function.
        arrays: Operands.
        out_shape: ``jax.ShapeDtypeStruct`` of each result, a tuple.
        grid: Number of programs along one or two axes.
        capability: Compute capability to compile for, 90 for 9.0. jax-triton would ask the device.
        num_warps: Warps of a program.
        num_stages: How far loads of a loop run ahead.
        constants: The function's ``constexpr`` arguments.

    Returns:
        The results, like ``out_shape``.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=out_shape,
        grid=grid,
        compute_capability=capability,
        num_warps=num_warps,
        num_stages=num_stages,
        **constants,
    )
