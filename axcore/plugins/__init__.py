"""Plugins: what separately installed distributions add to core. Imports no JAX.

A plugin is a module of hook functions, named by an entry point in the group ``axcore``; its hooks
return frozen specs that name code by strings. ``host()`` finds them, keeps a record of each, and
serves what the active ones provide.

Example:
    >>> from axcore.plugins import host
    >>> "cpu" in host().instance_types
    True
"""

from __future__ import annotations

from ._calls import Instance, OpCall, Purpose
from ._select import ActiveSet
from ._values import FrozenMap
from .discovery import Candidate, find_candidates
from .hookspecs import HOOKS, Hook, hookimpl, hookspec
from .host import CORE, PluginHost, filters_from_environment, host, reset_host, switch_off_plugins
from .records import PluginRecord, Status
from .registry import Registry, load_target
from .specs import (
    CallbackSpec,
    CompilerOptionSpec,
    CompilerSpec,
    InstanceTypeSpec,
    KernelSpec,
    LayerSpec,
    MeshRuleSpec,
    NamedSpec,
    QuantizationSpec,
    Spec,
    pattern_matches,
    specificity,
)

__all__ = [
    "CORE",
    "HOOKS",
    "ActiveSet",
    "CallbackSpec",
    "Candidate",
    "CompilerOptionSpec",
    "CompilerSpec",
    "FrozenMap",
    "Hook",
    "Instance",
    "InstanceTypeSpec",
    "KernelSpec",
    "LayerSpec",
    "MeshRuleSpec",
    "NamedSpec",
    "OpCall",
    "PluginHost",
    "PluginRecord",
    "Purpose",
    "QuantizationSpec",
    "Registry",
    "Spec",
    "Status",
    "filters_from_environment",
    "find_candidates",
    "hookimpl",
    "hookspec",
    "host",
    "load_target",
    "pattern_matches",
    "reset_host",
    "specificity",
    "switch_off_plugins",
]
