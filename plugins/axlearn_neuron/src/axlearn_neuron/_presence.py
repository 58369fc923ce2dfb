"""Whether the vendor's JAX bridge is really there.

Metadata cannot tell: the public package index carries an empty ``jax-neuronx`` 0.0.0, which
installs but holds no module. What counts is the attribute that kernels call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from axcore.errors import PluginError

__all__ = ["nki_call"]

_HINT = (
    "the public index carries only an empty jax-neuronx 0.0.0; install the extra from the vendor's "
    "index, as the section 'Installing' of the axlearn-neuron README.md says"
)


def nki_call() -> Callable[..., Any]:
    """Returns ``jax_neuronx.nki_call``, the function through which NKI kernels run.

    Raises:
        PluginError: ``jax_neuronx`` cannot be imported (AX291), or was imported and has no
            ``nki_call`` (AX292).
    """
    try:
        module = importlib.import_module("jax_neuronx")
    except ImportError as error:
        raise PluginError(
            f"package 'jax-neuronx': cannot import jax_neuronx ({error}); "
            "expected a build from the vendor's package index",
            code="AX291",
            where="axlearn-neuron",
            hint=_HINT,
        ) from error
    found = getattr(module, "nki_call", None)
    if not callable(found):
        origin = getattr(module, "__file__", None) or "a namespace without a file"
        raise PluginError(
            f"package 'jax-neuronx': jax_neuronx from {origin} has no function nki_call; "
            "expected a build from the vendor's package index",
            code="AX292",
            where="axlearn-neuron",
            hint=_HINT,
        )
    return found
