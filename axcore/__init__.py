"""axcore: a modular, hardware-agnostic framework to train and serve large models on JAX.

Public names are loaded on first use, so ``import axcore`` imports no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "Config": "axcore.config",
    "Configurable": "axcore.config",
    "Required": "axcore.config",
    "REQUIRED": "axcore.config",
    "Dim": "axcore.config",
    "scaled": "axcore.config",
    "config_for": "axcore.config",
    "partial_for": "axcore.config",
    "Modifier": "axcore.config",
    "Module": "axcore.module",
    "ParameterSpec": "axcore.module",
    "Layer": "axcore.layers",
    "InvocationContext": "axcore.context",
    "current_context": "axcore.context",
    "functional": "axcore.context",
}

__all__ = [
    "REQUIRED",
    "Config",
    "Configurable",
    "Dim",
    "InvocationContext",
    "Layer",
    "Modifier",
    "Module",
    "ParameterSpec",
    "Required",
    "__version__",
    "config_for",
    "current_context",
    "experiments",
    "functional",
    "partial_for",
    "scaled",
]

if TYPE_CHECKING:
    from axcore import experiments as experiments
    from axcore.config import REQUIRED as REQUIRED
    from axcore.config import Config as Config
    from axcore.config import Configurable as Configurable
    from axcore.config import Dim as Dim
    from axcore.config import Modifier as Modifier
    from axcore.config import Required as Required
    from axcore.config import config_for as config_for
    from axcore.config import partial_for as partial_for
    from axcore.config import scaled as scaled
    from axcore.context import InvocationContext as InvocationContext
    from axcore.context import current_context as current_context
    from axcore.context import functional as functional
    from axcore.layers import Layer as Layer
    from axcore.module import Module as Module
    from axcore.module import ParameterSpec as ParameterSpec


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name == "experiments":
        value = importlib.import_module("axcore.experiments")
    else:
        raise AttributeError(f"module 'axcore' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "experiments"})
