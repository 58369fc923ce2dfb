"""The references as kernels of a platform: what a backend's list of an op may end with.

On an accelerator nothing below the list serves without permission. A backend that accepts the XLA
reference, everywhere or where it costs little, says so with a spec of its own:

    reference_kernel("rms_norm", "xla_acme", "acme")
    reference_kernel("attention", "xla_acme", "acme", supports=FEW_LOGITS, serves=FEW_LOGITS_TEXT)

Importing this module imports no JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from axcore.plugins import KernelSpec

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["FEW_LOGITS", "FEW_LOGITS_TEXT", "few_logits", "reference_kernel"]

_SHORT = 2048
#: Target of :func:`few_logits`, and what it says in a description.
FEW_LOGITS = "axcore.ops.references:few_logits"
FEW_LOGITS_TEXT = f"for fewer than {_SHORT:,} keys and for caches"


def reference_kernel(
    op: str,
    implementation: str,
    platform: str,
    *,
    supports: str | None = None,
    serves: str = "",
) -> KernelSpec:
    """Returns the spec of an op's reference on a platform, last in preference.

    Args:
        op: The op.
        implementation: The name under which the platform lists it, such as ``"xla_acme"``.
        platform: JAX platform.
        supports: Target of what says for which calls it is not good enough; None takes all.
        serves: What it is for, for listings.
    """
    return KernelSpec(
        op=op,
        implementation=implementation,
        platforms=(platform,),
        target=f"axcore.ops.references:{op}",
        supports=supports,
        compiler_partitioned=True,
        priority=-100,
        description=", ".join(filter(None, ("the XLA reference", serves))),
    )


def few_logits(call: OpCall) -> str | None:
    """Why XLA's own attention is not good enough for a call, or None.

    It is where logits are few: in short calls and where each sequence has one query. Reading a
    cache is accepted at any length, for the reference scans many queries in chunks. Beyond that a
    model would run at a fraction of the machine without anyone having asked for it.
    """
    keys = call.shapes["k"][1]
    if call.purpose == "decode" or call.view is not None or keys < _SHORT:
        return None
    return f"is for fewer than {_SHORT} keys and for caches, got {keys} keys"


def __getattr__(op: str) -> Callable[..., Any]:
    if op.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {op!r}")
    from axcore.ops import reference

    return reference(op)
