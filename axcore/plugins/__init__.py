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

from ._active import ActiveSet as ActiveSet
from ._calls import Instance as Instance
from ._calls import OpCall as OpCall
from ._calls import Purpose as Purpose
from .discovery import Candidate as Candidate
from .discovery import find_candidates as find_candidates
from .hookspecs import HOOKS as HOOKS
from .hookspecs import Hook as Hook
from .hookspecs import hookimpl as hookimpl
from .hookspecs import hookspec as hookspec
from .host import CORE as CORE
from .host import PluginHost as PluginHost
from .host import host as host
from .host import reset_host as reset_host
from .host import switch_off_plugins as switch_off_plugins
from .records import PluginRecord as PluginRecord
from .records import Status as Status
from .registry import Registry as Registry
from .registry import load_target as load_target
from .specs import CallbackSpec as CallbackSpec
from .specs import CompilerOptionSpec as CompilerOptionSpec
from .specs import CompilerSpec as CompilerSpec
from .specs import InstanceTypeSpec as InstanceTypeSpec
from .specs import KernelSpec as KernelSpec
from .specs import LayerSpec as LayerSpec
from .specs import MeshRuleSpec as MeshRuleSpec
from .specs import NamedSpec as NamedSpec
from .specs import QuantizationSpec as QuantizationSpec
from .specs import Spec as Spec
from .specs import pattern_matches as pattern_matches
from .specs import specificity as specificity
