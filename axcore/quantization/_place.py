"""Putting quantized products into a config: which products there are, and which are meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from axcore.collection import expand_path, glob_matches
from axcore.config import Config
from axcore.errors import ConfigError, did_you_mean
from axcore.layers import Linear
from axcore.layers.placement import build_model, spread
from axcore.layers.roles import BaseAttention, BaseGroupedLinear, BaseHead
from axcore.module import Module
from axcore.ops import BaseDotGeneral, DotGeneral

__all__ = ["DEFAULT_EXCLUDE", "KINDS", "Kind", "Site", "choose", "find_sites", "matching", "place"]

#: Products that no recipe touches unless it is told to: a router's few logits decide a lot.
DEFAULT_EXCLUDE = ("**/router", "**/router/**")
_SHOWN = 5

Kind = Literal["linear", "grouped", "head", "attention"]
KINDS: tuple[Kind, ...] = ("linear", "grouped", "head", "attention")


@dataclasses.dataclass(frozen=True)
class Site:
    """One product of a model.

    Attributes:
        path: Of the layer that owns it, such as ``decoder/layer/3/feed_forward/up``; products of
            which a layer has several go by their own name, ``.../attention/logits_dot``.
        kind: ``linear``; ``grouped``, of a linear layer with a matrix for each group of rows, such
            as a mixture's experts; ``head``, what scores the vocabulary or embeds; or
            ``attention``, the products of queries with keys and of weights with values.
        config_path: Of the product's config.
        state_path: Of the product's state, in one layer.
        module: The product.
        owner: The layer that owns it, behind any wrapper such as an adapter.
    """

    path: str
    kind: Kind
    config_path: str
    state_path: str
    module: DotGeneral
    owner: Module


def find_sites(model: Module) -> dict[str, Site]:
    """Returns the products of a model by path, one for each layer of a stack."""
    modules = dict(model.walk())
    sites: dict[str, Site] = {}
    for path, module in modules.items():
        if not isinstance(module, DotGeneral) or not path:
            continue
        outer = path
        while isinstance(modules.get(_parent(outer)), BaseDotGeneral):
            outer = _parent(outer)
        owner = modules[_parent(outer)]
        ancestors = [modules[""]]
        parts = _parent(outer).split("/")
        ancestors += [modules["/".join(parts[: n + 1])] for n in range(len(parts)) if parts[n]]
        named = _parent(outer) if outer.rsplit("/", 1)[-1] == "dot" else outer
        if any(isinstance(m, BaseHead) for m in ancestors):
            kind: Kind = "head"
        elif isinstance(owner, Linear):
            kind = "linear"
        elif isinstance(owner, BaseGroupedLinear):
            kind = "grouped"
        elif isinstance(owner, BaseAttention):
            kind = "attention"
        else:
            continue  # a layer's own product: what may take its place is for that layer to say
        for (name, _), (state, _) in zip(expand_path(named), expand_path(path), strict=True):
            sites[name] = Site(name, kind, module.config_path, state, module, owner)
    return sites


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def choose(
    sites: dict[str, Site],
    include: Sequence[str],
    exclude: Sequence[str],
    kinds: Sequence[Kind],
) -> tuple[str, ...]:
    """Returns the paths of the products that are meant.

    Args:
        sites: All products.
        include: Globs over paths.
        exclude: Globs that take back; one that matches nothing is fine.
        kinds: Kinds that ``include`` reaches.

    Raises:
        ConfigError: A pattern of ``include`` matches none, or none is left.
    """
    reached = [p for p, site in sites.items() if site.kind in kinds]
    for pattern in include:
        if any(glob_matches(pattern, path) for path in reached):
            continue
        others = [p for p in sites if p not in reached and glob_matches(pattern, p)]
        shown = ", ".join(reached[:_SHOWN])
        more = len(reached) - _SHOWN
        if others:
            kind = sites[others[0]].kind
            hint = f"it matches {others[0]!r}: set {kind}=True to quantize such products too"
        else:
            hint = did_you_mean(pattern, reached) or (
                f"they are: {shown}{f', and {more} more' if more > 0 else ''}"
            )
        raise ConfigError(
            f"the pattern {pattern!r} matches none of {len(reached)} products",
            code="AX430",
            hint=hint,
        )
    found = matching(reached, include, exclude)
    if not found:
        raise ConfigError(
            f"there is nothing to quantize: include={tuple(include)} without "
            f"exclude={tuple(exclude)} leaves none of {len(reached)} products",
            code="AX430",
        )
    return found


def matching(
    paths: Iterable[str], include: Sequence[str], exclude: Sequence[str]
) -> tuple[str, ...]:
    """Returns the paths that a pattern of ``include`` matches and none of ``exclude`` does."""
    return tuple(
        path
        for path in paths
        if any(glob_matches(p, path) for p in include)
        and not any(glob_matches(p, path) for p in exclude)
    )


def place(
    cfg: Config,
    chosen: Callable[[dict[str, Site]], dict[str, Config | None]],
    *,
    stated: Sequence[Kind] = (),
) -> tuple[str, ...]:
    """Replaces products, in place.

    Args:
        cfg: A trainer's config, or a model's.
        chosen: Given all products, what is to stand at which path; None leaves one as it is.
        stated: Kinds of products that are set, if to what they are, where they stay plain.

    Returns:
        Paths of the replaced products.

    Raises:
        ConfigError: Layers that run as one scan would differ.
    """
    model = build_model(cfg)
    sites = find_sites(model)
    wanted = chosen(sites)
    texts = {p: None if made is None else made.to_text() for p, made in wanted.items()}
    if spread(cfg, model, texts, "quantized products"):
        sites = find_sites(build_model(cfg))
    done: set[str] = set()
    for path, made in wanted.items():
        field = sites[path].config_path
        if made is None or field in done:
            continue
        old: Any = cfg.get_path(field)
        new: Any = made.copy()
        if "precision" in new.fields() and "precision" in old.fields():
            new.precision = old.precision
        cfg.set_path(field, new)
        done.add(field)
    for site in sites.values():
        if site.kind in stated and type(site.module) is DotGeneral and site.config_path not in done:
            cfg.set_path(site.config_path, cfg.get_path(site.config_path))
            done.add(site.config_path)
    return tuple(path for path, made in wanted.items() if made is not None)
