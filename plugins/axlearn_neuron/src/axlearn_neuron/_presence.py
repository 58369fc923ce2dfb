"""Whether the vendor's JAX bridge and kernel compiler are really there.

Metadata cannot tell: the public package index carries an empty ``jax-neuronx`` 0.0.0, which
installs but holds no module. What counts is the attribute that is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from axcore.errors import PluginError

__all__ = ["HINT", "NEEDS", "nki_attention", "nki_call", "vendor_module"]

#: What there is to install, for reasons and reports.
NEEDS = (
    "needs neuronx-cc and jax-neuronx from the vendor's package index; the section 'Installing' of "
    "the axlearn-neuron README.md says how"
)
HINT = (
    "the public index carries only an empty jax-neuronx 0.0.0; install the extra from the vendor's "
    "index, as the section 'Installing' of the axlearn-neuron README.md says"
)


def nki_call() -> Callable[..., Any]:
    """Returns ``jax_neuronx.nki_call``, through which NKI kernels become part of JAX programs.

    Raises:
        PluginError: ``jax_neuronx`` cannot be imported (AX291), or was imported and has no
            ``nki_call`` (AX292).
    """
    return _function(vendor_module("jax_neuronx", "jax-neuronx"), "nki_call", "jax-neuronx")


def nki_attention() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns the vendor's ``flash_fwd``, ``flash_attn_bwd`` and ``FlashConfig``.

    Raises:
        PluginError: ``neuronxcc`` cannot be imported (AX291), or lacks one of them (AX292).
    """
    library = vendor_module("neuronxcc.nki.kernels.attention", "neuronx-cc")
    forward, backward, config = (
        _function(library, name, "neuronx-cc")
        for name in ("flash_fwd", "flash_attn_bwd", "FlashConfig")
    )
    return forward, backward, config


def vendor_module(name: str, package: str) -> ModuleType:
    """Imports a module of a package that only the vendor's index has.

    Raises:
        PluginError: It cannot be imported (AX291).
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PluginError(
            f"package {package!r}: cannot import {name} ({error}); "
            "expected a build from the vendor's package index",
            code="AX291",
            where="axlearn-neuron",
            hint=HINT,
        ) from error


def _function(module: ModuleType, name: str, package: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        origin = getattr(module, "__file__", None) or "a namespace without a file"
        raise PluginError(
            f"package {package!r}: {module.__name__} from {origin} has no function {name}; "
            "expected a build from the vendor's package index",
            code="AX292",
            where="axlearn-neuron",
            hint=HINT,
        )
    return found
