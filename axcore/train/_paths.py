"""Parameter paths: per-layer names of stacked leaves, and glob patterns over them.

A parameter tree is nested dicts by child name. Scanned layers are stacked on the leading axis under
a key such as ``0:8:1`` (layers ``range(0, 8, 1)``). Patterns always speak of single layers
(``decoder/layer/3/up/weight``), so one pattern means the same in both stack forms.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from axcore.collection import expand_path, glob_matches
from axcore.errors import TrainError, did_you_mean

__all__ = [
    "Leaf",
    "Path",
    "flatten",
    "glob_matches",
    "lead_shape",
    "leaf_masks",
    "unflatten",
]

Path = tuple[str, ...]
_STACK = re.compile(r"^(\d+):(\d+):(\d+)$")


def stack_range(key: str) -> range | None:
    """Returns the layers that a stack key stands for, or None for an ordinary key."""
    found = _STACK.match(key)
    return range(*map(int, found.groups())) if found else None


def lead_shape(path: Path) -> tuple[int, ...]:
    """Returns the sizes of the leading layer axes of the leaf at ``path`` (() when unstacked)."""
    return tuple(len(r) for key in path if (r := stack_range(key)) is not None)


def flatten(tree: Mapping[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    """Flattens nested dicts, in sorted key order as JAX does, to ``{path: leaf}``."""
    flat: dict[Path, Any] = {}
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, Mapping):
            flat.update(flatten(value, (*prefix, key)))
        else:
            flat[(*prefix, key)] = value
    return flat


def unflatten(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Builds nested dicts from ``{path: leaf}``; empty dicts never appear."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Which layers of one parameter leaf something applies to.

    Attributes:
        mask: Bool array of the leaf's leading layer axes; of shape () for an unstacked leaf.
    """

    mask: np.ndarray

    @property
    def every(self) -> bool:
        """Whether it applies to all layers."""
        return bool(self.mask.all())

    @property
    def some(self) -> bool:
        """Whether it applies to at least one layer."""
        return bool(self.mask.any())


def leaf_masks(paths: Iterable[Path], patterns: Sequence[str], *, where: str) -> dict[Path, Leaf]:
    """Evaluates patterns on parameter paths, layer by layer.

    Args:
        paths: Paths of the leaves, in either stack form.
        patterns: Globs over per-layer paths, in order; one that starts with ``!`` takes back what
            those before it matched.
        where: Config path of the patterns, for errors.

    Returns:
        For every path the layers that match.

    Raises:
        TrainError: A pattern matches no parameter.
    """
    unused = set(patterns)
    masks: dict[Path, Leaf] = {}
    names: list[str] = []
    for path in paths:
        mask = np.zeros(lead_shape(path), bool)
        for name, index in expand_path("/".join(path)):
            names.append(name)
            hits = [p for p in patterns if glob_matches(p.removeprefix("!"), name)]
            unused.difference_update(hits)
            mask[index] = bool(hits) and not hits[-1].startswith("!")
        masks[path] = Leaf(mask)
    if unused:
        pattern = sorted(unused)[0]
        raise TrainError(
            f"the pattern {pattern!r} matches none of the {len(names)} parameters",
            code="AX710",
            where=where,
            hint=did_you_mean(pattern, names)
            or "patterns are globs over paths such as "
            + repr(names[math.ceil(len(names) / 2) - 1] if names else "decoder/layer/0/up/weight")
            + "; ** spans components",
        )
    return masks
