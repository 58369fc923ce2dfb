"""Editing a config by the paths of the modules that it makes.

A config may stand for many modules: all layers of a stack share one, or a few in turn. To give some
of them something of their own, the stack's period grows to the shortest one that tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from axcore.config import Config
from axcore.errors import ConfigError
from axcore.module import Module

__all__ = ["build_model", "model_field", "spread"]

_LAYER = re.compile(r"\d+(:\d+:\d+)?")


def model_field(cfg: Config) -> str:
    """Returns the path of the model in a config: ``model`` in a trainer's, else the root."""
    return "model" if "model" in cfg.fields() and "learner" in cfg.fields() else ""


def build_model(cfg: Config) -> Module:
    """Returns the modules of a config's model: no device, array or file."""
    field = model_field(cfg)
    node: Any = cfg.get_path(field) if field else cfg.copy()
    ancestors = (cfg.copy(),) if field else ()
    prepared = node.prepared(ancestors, {}, "")
    return prepared.instantiate(name=field or "model", config_path=field)


def spread(cfg: Config, model: Module, wanted: Mapping[str, str | None], what: str) -> bool:
    """Gives layers that want different things configs of their own, in place.

    Args:
        cfg: A trainer's config, or a model's.
        model: Its modules; see :func:`build_model`.
        wanted: What the module at a path such as ``decoder/layer/3/feed_forward/up`` gets, as text;
            None for nothing.
        what: What is placed, in the plural, for the message.

    Returns:
        Whether anything was changed; modules built before are then out of date.

    Raises:
        ConfigError: The layers run as a scan and so cannot differ.
    """
    modules = dict(model.walk())
    changed = False
    for prefix in _stacks(modules):
        layers: dict[int, dict[str, str | None]] = {}
        for path, adapter in wanted.items():
            if path.startswith(f"{prefix}/"):
                number, _, rest = path[len(prefix) + 1 :].partition("/")
                layers.setdefault(int(number), {})[rest] = adapter
        children = list(modules[prefix].children.values())
        # Layers before the first period have configs of their own.
        ahead = len(getattr(modules[prefix].cfg, "prefix", ()))
        layers = {n - ahead: wish for n, wish in layers.items() if n >= ahead}
        if not layers:
            continue
        first = children[ahead].config_path
        field, _, index = first.rpartition(".")
        field = field if index.isdigit() else first
        value = cfg.get_path(field)
        period: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        longer = _period(layers, len(period))
        if longer == len(period):
            continue
        if longer > len(layers) // 2 and any(isinstance(m.layers, range) for m in children):
            raise ConfigError(
                _scanned(prefix, layers, what), code="AX364", where=field, hint=_UNROLL
            )
        cfg.set_path(field, tuple(period[i % len(period)].copy() for i in range(longer)))
        changed = True
    return changed


def _stacks(modules: Mapping[str, Module]) -> Iterable[str]:
    """Yields the paths of the outermost modules whose children are layers."""
    for path, module in modules.items():
        inside = any(_LAYER.fullmatch(part) for part in path.split("/"))
        if not inside and any(child.layers is not None for child in module.children.values()):
            yield path


def _period(layers: Mapping[int, Any], least: int) -> int:
    """Returns the shortest multiple of ``least`` after which the layers' wishes repeat."""
    count = len(layers)
    return next(
        (
            p
            for p in range(least, count, least)
            if all(layers[i] == layers[i % p] for i in range(count))
        ),
        max(count, least),
    )


_UNROLL = (
    "set the decoder's stack to StackedTransformer, which runs layer by layer and takes the same "
    "checkpoints, or choose the same modules in every layer"
)


def _scanned(prefix: str, layers: Mapping[int, Mapping[str, Any]], what: str) -> str:
    having = [i for i in sorted(layers) if any(v is not None for v in layers[i].values())]
    return (
        f"the layers of {prefix} run as one scan and so share one structure; {what} for layers "
        f"{_ranges(having)} of {len(layers)} only, or different ones, would make it differ"
    )


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
