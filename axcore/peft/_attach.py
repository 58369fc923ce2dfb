"""Putting adapters into a config: which layers, and a stack whose layers then differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from axcore.collection import expand_path
from axcore.config import Config
from axcore.errors import ConfigError
from axcore.layers import Linear
from axcore.layers.lora import LowRankAdapter
from axcore.module import Module

__all__ = ["Chosen", "attach", "build_model", "detach", "linear_paths", "model_field"]

#: The adapter of the layer at a path such as ``decoder/layer/3/feed_forward/up``, or None.
Chosen = Callable[[str], LowRankAdapter.Config | None]
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


def linear_paths(model: Module) -> dict[str, Module]:
    """Returns ``{path: module}`` of all linear layers, one path per layer of a stack."""
    return {
        name: module
        for path, module in model.walk()
        if isinstance(module, Linear)
        for name, _ in expand_path(path)
    }


def attach(cfg: Config, chosen: Chosen) -> tuple[str, ...]:
    """Puts adapters into a config, in place.

    A config that several layers share gets one adapter when all of them want the same. Otherwise
    the stack's period grows to the shortest one that tells the layers apart.

    Args:
        cfg: A trainer's config, or a model's.
        chosen: The adapter that each linear layer gets.

    Returns:
        Paths of the adapted layers.

    Raises:
        ConfigError: A layer has an adapter already, or layers that one config describes cannot
            differ since they run as a scan.
    """
    model = build_model(cfg)
    linears = linear_paths(model)
    wanted = {path: chosen(path) for path in linears}
    if _spread(cfg, model, {p: _text(a) for p, a in wanted.items()}):
        linears = linear_paths(build_model(cfg))
    for path, module in linears.items():
        adapter = wanted[path]
        if adapter is None:
            continue
        node: Any = cfg.get_path(module.config_path)
        placed = adapter.copy()
        if isinstance(node.dot, LowRankAdapter.Config):
            if _text(node.dot.copy().set(base=placed.base)) == _text(placed):
                continue  # another layer of the same config has put it there
            raise ConfigError(
                f"{path} has an adapter already",
                code="AX363",
                where=module.config_path,
                hint="merge it first (`axcore peft merge`), or apply one adapter modifier only",
            )
        node.dot = placed.set(base=node.dot)
    return tuple(path for path, adapter in wanted.items() if adapter is not None)


def detach(cfg: Config) -> None:
    """Takes all adapters out of a config, in place; what they wrapped is back."""
    for _, node in list(cfg.walk()):
        dot = getattr(node, "dot", None) if "dot" in node.fields() else None
        if isinstance(dot, LowRankAdapter.Config):
            node.set(dot=dot.base)
    for path, node in list(cfg.walk()):
        for name in node.fields():
            value = getattr(node, name)
            if _is_layers(value) and len({_text(layer) for layer in value}) == 1:
                cfg.set_path(f"{path}.{name}" if path else name, value[0])


def _is_layers(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 1 and all(isinstance(v, Config) for v in value)


def _text(cfg: Config | None) -> str | None:
    return None if cfg is None else cfg.to_text()


def _spread(cfg: Config, model: Module, wanted: Mapping[str, str | None]) -> bool:
    """Gives layers that want different things configs of their own; whether there were any."""
    modules = dict(model.walk())
    changed = False
    for prefix in _stacks(modules):
        layers: dict[int, dict[str, str | None]] = {}
        for path, adapter in wanted.items():
            if path.startswith(f"{prefix}/"):
                number, _, rest = path[len(prefix) + 1 :].partition("/")
                layers.setdefault(int(number), {})[rest] = adapter
        children = modules[prefix].children.values()
        if not layers:
            continue
        first = next(iter(children)).config_path
        field, _, index = first.rpartition(".")
        field = field if index.isdigit() else first
        value = cfg.get_path(field)
        period: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        longer = _period(layers, len(period))
        if longer == len(period):
            continue
        if longer > len(layers) // 2 and any(isinstance(m.layers, range) for m in children):
            raise ConfigError(_scanned(prefix, layers), code="AX364", where=field, hint=_UNROLL)
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


def _scanned(prefix: str, layers: Mapping[int, Mapping[str, Any]]) -> str:
    adapted = [i for i in sorted(layers) if any(v is not None for v in layers[i].values())]
    return (
        f"the layers of {prefix} run as one scan and so share one structure; adapters for layers "
        f"{_ranges(adapted)} of {len(layers)} only, or different ones, would make it differ"
    )


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
