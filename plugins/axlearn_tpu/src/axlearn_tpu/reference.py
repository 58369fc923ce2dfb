"""XLA's own code, where the compiler for TPUs does well by itself: the references under conditions.

An accelerator's runs end in an error where no listed implementation serves a call. These names
stand last in the lists, and their ``supports`` say where plain XLA is good enough to need no asking.
"""

from __future__ import annotations

from typing import Any

import jax

from axcore import ops

__all__ = ["attention"]


def attention(*arrays: jax.Array, **rest: Any) -> jax.Array:
    """Computes attention as the reference does; arguments as there."""
    return ops.reference("attention")(*arrays, **rest)
