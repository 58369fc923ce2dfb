"""Logical axes of optimizer state, for any optax transformation.

The state's shapes come from ``jax.eval_shape(opt.init, params)``; a leaf belongs to the parameter
whose path its own path ends with (``[0].mu['decoder']['norm']['scale']``), because transformations
keep per-parameter state in trees like the parameters'. Paths and shapes are all that is used:
``optax.tree_utils.tree_map_params`` would re-run ``init`` on a placeholder, which third-party
transformations that look at shapes or paths do not survive, and knows no factored leaves.

A leaf of its parameter's shape takes the parameter's axes. A factored leaf (some dims dropped, or
kept with size 1) takes those of the surviving dims; where equal sizes leave open which dim
survived, that dim is replicated. Everything else is replicated. What ends up without axes is
listed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from axcore.collection import expand_path

__all__ = ["ReplicatedLeaf", "StateAxes", "StateSpec", "optimizer_state_axes"]

Axes = tuple[str | None, ...]
_STACK = re.compile(r"^\d+:\d+:\d+$")


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One leaf of optimizer state before it exists; a leaf of pytrees, not a node.

    Attributes:
        shape: Shape.
        dtype: Dtype name.
        axes: Logical axis name or None for each dim.
        parameter: Path of the parameter that it belongs to, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    parameter: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class ReplicatedLeaf:
    """A state leaf that every device holds in full, in some dims at least.

    Attributes:
        path: Path in the state.
        shape: Shape.
        num_bytes: Bytes of the whole array.
        reason: Why it has no axes.
    """

    path: str
    shape: tuple[int, ...]
    num_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class StateAxes:
    """The answer of :func:`optimizer_state_axes`.

    Attributes:
        specs: Tree like the state, with a :class:`StateSpec` per leaf.
        replicated: Leaves without axes in all or some dims, largest first.
    """

    specs: Any
    replicated: tuple[ReplicatedLeaf, ...]


def optimizer_state_axes(state_shapes: Any, params_specs: Mapping[str, Any]) -> StateAxes:
    """Works out the logical axes of every leaf of an optimizer's state.

    Args:
        state_shapes: ``jax.eval_shape(opt.init, params)``, or a tree that contains it.
        params_specs: Nested dicts of specs with ``shape`` and ``axes``, such as
            :class:`~axcore.module.ParameterSpec`; the state may hold stacked layers under their
            stack key or one by one.

    Returns:
        Specs in the structure of ``state_shapes`` and the list of what is replicated.

    Example:
        >>> found = optimizer_state_axes(jax.eval_shape(opt.init, params), specs)  # doctest: +SKIP
        >>> found.specs[0].mu["decoder"]["norm"]["scale"].axes  # doctest: +SKIP
        ('embed',)
    """
    known = _by_path(params_specs)
    replicated: list[ReplicatedLeaf] = []

    def one(key_path: tuple[Any, ...], leaf: Any) -> StateSpec:
        shape, dtype = tuple(leaf.shape), str(leaf.dtype)
        name = jax.tree_util.keystr(key_path)
        owner = _owner(key_path, known)
        if owner is None:
            axes: Axes = (None,) * len(shape)
            reason = "a scalar" if not shape else "belongs to no parameter"
            open_dims = True
        else:
            axes, open_dims, reason = _axes_of(shape, *known[owner])
        spec = StateSpec(shape, dtype, axes, None if owner is None else "/".join(owner))
        if open_dims:
            replicated.append(ReplicatedLeaf(name, shape, spec.num_bytes, reason))
        return spec

    specs = jax.tree_util.tree_map_with_path(one, state_shapes)
    return StateAxes(specs, tuple(sorted(replicated, key=lambda r: -r.num_bytes)))


def _by_path(specs: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[tuple[int, ...], Axes]]:
    """Shape and axes by parameter path, of stacks and of each of their layers."""
    known: dict[tuple[str, ...], tuple[tuple[int, ...], Axes]] = {}

    def visit(node: Mapping[str, Any], prefix: tuple[str, ...]) -> None:
        for key, value in node.items():
            path = (*prefix, key)
            if isinstance(value, Mapping):
                visit(value, path)
                continue
            shape, axes = tuple(value.shape), tuple(value.axes)
            known[path] = (shape, axes)
            lead = sum(bool(_STACK.match(part)) for part in path)
            if lead:
                for layer, _ in expand_path("/".join(path)):
                    known[tuple(layer.split("/"))] = (shape[lead:], axes[lead:])

    visit(specs, ())
    return known


def _owner(key_path: tuple[Any, ...], known: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Returns the longest parameter path that the state path ends with, or None."""
    keys: list[str] = []
    for key in key_path:
        name = getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
        keys.append(str(name))
    # From the longest tail on, so that `up/scale` wins over a root parameter `scale`.
    for start in range(len(keys)):
        tail = tuple(keys[start:])
        if tail in known:
            return tail
    return None


def _axes_of(shape: tuple[int, ...], of_shape: tuple[int, ...], of: Axes) -> tuple[Axes, bool, str]:
    """Returns the axes of a leaf of a parameter, whether any dim stayed open, and why."""
    if shape == of_shape:
        return of, False, ""
    nothing: Axes = (None,) * len(shape)
    if math.prod(shape) == 1:
        return nothing, True, "a placeholder of one element"
    found: set[Axes] = set()
    if len(shape) == len(of_shape):
        if all(a in (b, 1) for a, b in zip(shape, of_shape, strict=True)):
            kept = zip(shape, of_shape, of, strict=True)
            found.add(tuple(name if a == b else None for a, b, name in kept))
    elif len(shape) < len(of_shape):
        # Placeholders of a stack keep the layers: (layers, 1) beside a (layers, a, b) parameter.
        dims = len(shape) - 1 if len(shape) > 1 and shape[-1] == 1 else len(shape)
        for chosen in itertools.combinations(range(len(of_shape)), dims):
            if tuple(of_shape[d] for d in chosen) == shape[:dims]:
                found.add((*(of[d] for d in chosen), *(None,) * (len(shape) - dims)))
    if not found:
        return nothing, True, f"shape does not derive from the parameter's {of_shape}"
    agreed = tuple(names[0] if len(set(names)) == 1 else None for names in zip(*found, strict=True))
    if len(found) == 1:
        return agreed, False, ""
    return agreed, True, f"equal sizes in {of_shape} leave open which dim survived"
