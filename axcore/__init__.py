"""axcore: a modular, hardware-agnostic framework to train and serve large models on JAX.

Public names are loaded on first use, so ``import axcore`` imports no JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.lazy import lazy_attributes

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
    "experiments": "axcore.experiments",
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

__getattr__, __dir__ = lazy_attributes(globals(), _PUBLIC)
