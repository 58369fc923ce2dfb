"""Runs the hooks of one plugin and checks what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pluggy

from axcore.errors import PluginError, did_you_mean

from .discovery import Fault, describe
from .hookspecs import HOOKS, PREFIX, PROJECT, Hook
from .specs import Spec

# What one plugin provides: kind -> specs, in the order in which it gave them.
Collected = dict[str, tuple[Spec, ...]]


def collect(plugin: object) -> Collected:
    """Validates ``plugin``, calls its hooks, and checks what they return.

    Each plugin has a pluggy manager of its own, so that nothing of a bad one stays registered,
    and one that raises does not end the calls of the others.

    Args:
        plugin: The plugin object.

    Raises:
        Fault: ``invalid`` if it breaks a rule, ``failed`` if a hook raises.
    """
    manager = pluggy.PluginManager(PROJECT)
    for name in dir(plugin):  # pluggy ignores these silently
        if name.startswith(PREFIX) and callable(getattr(plugin, name, None)):
            if manager.parse_hookimpl_opts(plugin, name) is None:
                raise Fault("invalid", f"{name} lacks @hookimpl, so it would never be called")
    try:
        manager.register(plugin)
    except Exception as error:
        raise Fault("invalid", describe(error)) from error
    functions: dict[str, Callable[..., Any]] = {}
    for caller in manager.get_hookcallers(plugin) or ():
        for implementation in caller.get_hookimpls():
            _check(caller.name, implementation)
            functions[caller.name] = implementation.function
    return {h.kind: _call(h, functions[h.name]) for h in HOOKS if h.name in functions}


def _check(name: str, implementation: pluggy.HookImpl) -> None:
    """Checks one implementation of the hook ``name``; all hooks of today take no arguments."""
    known = [hook.name for hook in HOOKS]
    reason = None
    if name not in known and not implementation.optionalhook:
        reason = f"unknown hook {name!r}; {did_you_mean(name, known) or 'see docs/hooks.md'}"
    elif implementation.argnames:
        arguments = ", ".join(implementation.argnames)
        reason = f"wrong signature of {name}: it has no arguments, and this wants {arguments}"
    elif any(implementation.opts[o] for o in ("wrapper", "hookwrapper", "tryfirst", "trylast")):
        reason = (
            f"{name} is a wrapper or asks for a place in the order of calls; "
            "no result may depend on order: use a plain @hookimpl"
        )
    if reason:
        raise Fault("invalid", reason)


def _call(hook: Hook, function: Callable[..., Any]) -> tuple[Spec, ...]:
    wanted = hook.spec.__name__
    try:
        result: Any = function()
        iterable = isinstance(result, Iterable) and not isinstance(result, str)
        specs = list(cast("Iterable[Any]", result)) if iterable else []
    except KeyboardInterrupt:  # the user's, not the plugin's
        raise
    except PluginError as error:  # from the checks of a spec
        raise Fault("invalid", f"{hook.name}: {error.where}: {error.message}") from error
    except BaseException as error:
        raise Fault("failed", f"{hook.name} raised {describe(error)}") from error
    if not iterable:
        raise Fault("invalid", f"{hook.name} returned {result!r}, expected an iterable of {wanted}")
    seen: set[str] = set()
    for spec in specs:
        if type(spec) is not hook.spec:
            got = f"{spec!r} ({type(spec).__name__})"
            raise Fault("invalid", f"{hook.name} returned {got}, expected {wanted}")
        if spec.name in seen:
            raise Fault("invalid", f"{hook.name} gives the name {spec.name!r} twice")
        seen.add(spec.name)
    return tuple(specs)
