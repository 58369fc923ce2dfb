"""Runs the hooks of one plugin and checks what they return."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

import pluggy

from axcore.errors import PluginError, did_you_mean

from . import hookspecs
from .discovery import Fault, describe
from .hookspecs import HOOKS, PREFIX, PROJECT, Hook
from .specs import Spec

# What one plugin provides: kind -> specs, in the order in which it gave them.
Collected = dict[str, tuple[Spec, ...]]


def collect(name: str, plugin: object) -> Collected:
    """Validates ``plugin``, calls its hooks, and checks what they return.

    Each plugin has a pluggy manager of its own, so that nothing of a bad one stays registered,
    and one that raises does not end the calls of the others.

    Args:
        name: The entry point's name.
        plugin: The plugin object.

    Raises:
        Fault: ``invalid`` if it breaks a rule, ``failed`` if a hook raises.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    _check_markers(manager, plugin)
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise Fault("invalid", _reason(error), error) from error
    except Exception as error:
        raise Fault("invalid", describe(error), error) from error
    collected: Collected = {}
    for hook in HOOKS:
        for impl in getattr(manager.hook, hook.name).get_hookimpls():
            if impl.wrapper or impl.hookwrapper or impl.tryfirst or impl.trylast:
                raise Fault(
                    "invalid",
                    f"{hook.name} is a wrapper or asks for a place in the order of calls; "
                    "no result may depend on order: use a plain @hookimpl",
                )
            collected[hook.kind] = _call(hook, impl.function)
    return collected


def _check_markers(manager: pluggy.PluginManager, plugin: object) -> None:
    """Finds functions that look like hooks but lack the marker: pluggy ignores those silently."""
    for name in dir(plugin):
        value = getattr(plugin, name, None)
        if name.startswith(PREFIX) and callable(value):
            if manager.parse_hookimpl_opts(plugin, name) is None:
                raise Fault("invalid", f"{name} lacks @hookimpl, so it would never be called")


def _reason(error: pluggy.PluginValidationError) -> str:
    text = " ".join(str(error).split())
    known = [hook.name for hook in HOOKS]
    for word in re.findall(rf"\b{PREFIX}\w+", text):
        if word not in known:
            return f"unknown hook {word!r}; {did_you_mean(word, known) or 'see docs/hooks.md'}"
    for hook in known:
        if hook in text:
            return f"wrong signature of {hook}: {text}"
    return text


def _call(hook: Hook, function: Any) -> tuple[Spec, ...]:
    try:
        result = function()
        if result is None or isinstance(result, str) or not isinstance(result, Iterable):
            raise Fault(
                "invalid",
                f"{hook.name} returned {result!r}, expected an iterable of {hook.spec.__name__}",
            )
        specs = list(cast("Iterable[object]", result))
    except Fault:
        raise
    except KeyboardInterrupt:  # the user's, not the plugin's
        raise
    except PluginError as error:  # from the checks of a spec
        raise Fault("invalid", f"{hook.name}: {error.where}: {error.message}", error) from error
    except BaseException as error:
        raise Fault("failed", f"{hook.name} raised {describe(error)}", error) from error
    seen: set[str] = set()
    for spec in specs:
        if type(spec) is not hook.spec:
            raise Fault(
                "invalid",
                f"{hook.name} returned {spec!r} ({type(spec).__name__}), "
                f"expected {hook.spec.__name__}",
            )
        if spec.name in seen:
            raise Fault("invalid", f"{hook.name} gives the name {spec.name!r} twice")
        seen.add(spec.name)
    return tuple(cast("list[Spec]", specs))
