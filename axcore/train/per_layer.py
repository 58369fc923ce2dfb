"""Optax on scanned stacks: every layer is updated as if it had its own arrays.

Scanned layers are stacked on a leading axis. Optimizers that look at whole arrays (Muon, Adafactor,
block-wise clipping) would mix the layers of a stack; :func:`per_layer` makes the update of a
stacked tree equal that of the unrolled one, for any optax transformation:

* A transformation that treats parameters separately (checked on its jaxpr, see
  ``_separable.py``) is mapped over the leading axis. Its state has the structure of
  ``transformation.init(params)``, each leaf being the stack of the layers' leaves; what all
  parameters share, such as a step count, is kept once.
* One that mixes parameters (a global norm inside a chain, random noise) sees the layers one by one
  under their canonical names; its state is that of the unrolled tree. Exact, but it traces every
  layer: prefer ``Learner.Config.clip_global_norm`` to a clip inside the optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axcore.collection import expand_path
from axcore.train._paths import Path, flatten, lead_shape, unflatten
from axcore.train._separable import is_separable

__all__ = ["per_layer", "stack_layers", "unroll_layers"]

Params = Mapping[str, Any]
_MASK = "weight_decay_mask"


def unroll_layers(params: Params) -> dict[str, Any]:
    """Returns the tree with each stacked layer under its own number (``0:2:1`` -> ``0``, ``1``)."""
    flat: dict[Path, Any] = {}
    for path, leaf in flatten(params).items():
        for name, index in expand_path("/".join(path)):
            flat[tuple(name.split("/"))] = leaf[index] if index else leaf
    return unflatten(flat)


def stack_layers(unrolled: Any, like: Params) -> dict[str, Any]:
    """Stacks an unrolled tree to the form of ``like``; the inverse of :func:`unroll_layers`."""
    source = flatten(unrolled)
    flat: dict[Path, Any] = {}
    for path in flatten(like):
        layers = [source[tuple(name.split("/"))] for name, _ in expand_path("/".join(path))]
        lead = lead_shape(path)
        flat[path] = jnp.stack(layers).reshape(*lead, *layers[0].shape) if lead else layers[0]
    return unflatten(flat)


def per_layer(
    transformation: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optax transformation treat the layers of scanned stacks one by one.

    Args:
        transformation: Any optax transformation. Parameter trees must be nested dicts.

    Returns:
        A transformation for trees with and without stacks. The extra argument
        ``weight_decay_mask`` (tree of bools, or of bool arrays of the leading layer axes) is handed
        on layer by layer; other extra arguments are handed on as they are.
    """
    inner = optax.with_extra_args_support(transformation)
    plans: dict[Any, _Plan | None] = {}  # by tree and shapes; a program has one

    def plan_of(params: Params) -> _Plan | None:
        flat = flatten(params)
        key = tuple((path, jnp.shape(x), jnp.result_type(x)) for path, x in flat.items())
        if key not in plans:
            plans[key] = _make_plan(inner, flat)
        return plans[key]

    def init(params: Params) -> Any:
        if not _has_stacks(params):
            return inner.init(params)
        plan = plan_of(params)
        return inner.init(unroll_layers(params)) if plan is None else plan.init(inner, params)

    def update(grads: Params, state: Any, params: Params | None = None, **extra: Any) -> Any:
        if not _has_stacks(grads):
            return inner.update(grads, state, params, **extra)
        plan = plan_of(grads if params is None else params)
        if plan is not None:
            return plan.update(inner, grads, state, params, extra)
        if extra.get(_MASK) is not None:
            extra[_MASK] = _unroll_mask(extra[_MASK])
        unrolled = None if params is None else unroll_layers(params)
        updates, state = inner.update(unroll_layers(grads), state, unrolled, **extra)
        return stack_layers(updates, grads), state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _has_stacks(params: Params) -> bool:
    return any(lead_shape(path) for path in flatten(params))


def _unroll_mask(mask: Params) -> dict[str, Any]:
    """Unrolls a mask; one static bool is right for all the layers of a stack."""
    flat: dict[Path, Any] = {}
    for path, leaf in flatten(mask).items():
        for name, index in expand_path("/".join(path)):
            flat[tuple(name.split("/"))] = leaf if isinstance(leaf, bool) else leaf[index]
    return unflatten(flat)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Leaves with equal leading layer sizes, mapped together.

    Attributes:
        lead: The sizes; () for the unstacked leaves.
        indices: Positions of its leaves among all the parameter leaves.
        treedef: Structure of the state of a tree in which all other leaves are masked.
        state_paths: That state's leaves.
        owned: For each of them whether it belongs to this group's parameters (else it is shared).
    """

    lead: tuple[int, ...]
    indices: tuple[int, ...]
    treedef: Any
    state_paths: tuple[Any, ...]
    owned: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a separable transformation is mapped: all paths, the state's structure, the groups."""

    paths: tuple[Path, ...]
    treedef: Any
    state_paths: tuple[Any, ...]
    groups: tuple[_Group, ...]

    def init(self, inner: optax.GradientTransformation, params: Params) -> Any:
        leaves = list(flatten(params).values())
        found: dict[Any, Any] = {}
        for group in self.groups:

            def run(mine: list[Any], group: _Group = group) -> Any:
                return _split(jax.tree.leaves(inner.init(self._view(group, mine))), group.owned)

            for _ in group.lead:
                run = jax.vmap(run, out_axes=(0, None))
            found.update(_joined(group, *run([leaves[i] for i in group.indices])))
        return jax.tree.unflatten(self.treedef, [found[p] for p in self.state_paths])

    def update(
        self,
        inner: optax.GradientTransformationExtraArgs,
        grads: Params,
        state: Any,
        params: Params | None,
        extra: Mapping[str, Any],
    ) -> Any:
        grad_leaves = list(flatten(grads).values())
        param_leaves = None if params is None else list(flatten(params).values())
        extra = dict(extra)
        mask_tree = extra.pop(_MASK, None)
        mask_leaves = None if mask_tree is None else list(flatten(mask_tree).values())
        state_leaves = dict(zip(self.state_paths, jax.tree.leaves(state), strict=True))
        updates: dict[int, Any] = {}
        found: dict[Any, Any] = {}
        for group in self.groups:
            # Masks that are equal for all layers stay Python bools, so nothing is traced for them.
            mask = None if mask_leaves is None else [mask_leaves[i] for i in group.indices]
            moving = [jnp.asarray(m) for m in mask or () if not isinstance(m, bool)]

            def run(
                g: list[Any],
                owned: list[Any],
                p: list[Any] | None,
                moving: list[Any],
                shared: list[Any],
                group: _Group = group,
                mask: list[Any] | None = mask,
            ) -> Any:
                kwargs = dict(extra)
                if mask is not None:
                    rest = iter(moving)
                    joined = [m if isinstance(m, bool) else next(rest) for m in mask]
                    kwargs[_MASK] = self._view(group, joined)
                group_state = _joined(group, owned, shared)
                new, new_state = inner.update(
                    self._view(group, g),
                    jax.tree.unflatten(group.treedef, [group_state[x] for x in group.state_paths]),
                    None if p is None else self._view(group, p),
                    **kwargs,
                )
                return jax.tree.leaves(new), *_split(jax.tree.leaves(new_state), group.owned)

            for _ in group.lead:
                run = jax.vmap(run, in_axes=(0, 0, 0, 0, None), out_axes=(0, 0, None))
            owned, shared = _split([state_leaves[p] for p in group.state_paths], group.owned)
            mine = [grad_leaves[i] for i in group.indices]
            theirs = None if param_leaves is None else [param_leaves[i] for i in group.indices]
            new, *new_state = run(mine, owned, theirs, moving, shared)
            updates.update(zip(group.indices, new, strict=True))
            found.update(_joined(group, *new_state))
        new_state = jax.tree.unflatten(self.treedef, [found[p] for p in self.state_paths])
        return unflatten({p: updates[i] for i, p in enumerate(self.paths)}), new_state

    def _view(self, group: _Group, leaves: Sequence[Any]) -> dict[str, Any]:
        return _view(self.paths, group.indices, leaves)


def _view(paths: Sequence[Path], indices: Sequence[int], leaves: Sequence[Any]) -> dict[str, Any]:
    """The parameter tree in which every leaf but ``indices`` is masked."""
    flat: dict[Path, Any] = dict.fromkeys(paths, optax.MaskedNode())
    flat.update((paths[i], leaf) for i, leaf in zip(indices, leaves, strict=True))
    return unflatten(flat)


def _split(leaves: Sequence[Any], owned: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(leaves, owned, strict=True))
    return [x for x, mine in pairs if mine], [x for x, mine in pairs if not mine]


def _joined(group: _Group, owned: list[Any], shared: list[Any]) -> dict[Any, Any]:
    """The inverse of :func:`_split`, by state path."""
    sources = {True: iter(owned), False: iter(shared)}
    pairs = zip(group.state_paths, group.owned, strict=True)
    return {path: next(sources[mine]) for path, mine in pairs}


def _make_plan(
    inner: optax.GradientTransformationExtraArgs, flat: Mapping[Path, Any]
) -> _Plan | None:
    """Works out how to map over layers, or None if the transformation mixes parameters."""
    paths = tuple(flat)
    leads = [lead_shape(p) for p in paths]
    shapes = [
        jax.ShapeDtypeStruct(jnp.shape(x)[len(lead) :], jnp.result_type(x))
        for x, lead in zip(flat.values(), leads, strict=True)
    ]

    def state_of(indices: Sequence[int]) -> tuple[dict[Any, Any], Any]:
        view = _view(paths, indices, [shapes[i] for i in indices])
        state = jax.eval_shape(inner.init, view)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        return dict(leaves), treedef

    def update(grads: Any, state: Any, params: Any) -> Any:
        return inner.update(
            grads, state, params, weight_decay_mask=jax.tree.map(lambda _: True, params)
        )

    try:
        full, treedef = state_of(range(len(paths)))
        shared, _ = state_of(())
        groups: list[_Group] = []
        for lead in sorted(set(leads)):
            indices = tuple(i for i, one in enumerate(leads) if one == lead)
            mine, mine_treedef = state_of(indices)
            if any(mine.get(p) != s for p, s in shared.items()):
                return None
            owned = tuple(p not in shared for p in mine)
            groups.append(_Group(lead, indices, mine_treedef, tuple(mine), owned))
        everything = _view(paths, range(len(paths)), shapes)
        state_shapes = jax.tree.unflatten(treedef, list(full.values()))
        separable = is_separable(update, everything, state_shapes, [p in shared for p in full])
    except Exception:
        # Third-party code on a tree that is partly masked or lacks extra arguments: any error means
        # only that it has to see the whole tree, as the unrolled path shows it.
        return None
    owned_paths = [
        p for g in groups for p, mine in zip(g.state_paths, g.owned, strict=True) if mine
    ]
    exact = sorted(map(str, [*owned_paths, *shared])) == sorted(map(str, full))
    return _Plan(paths, treedef, tuple(full), tuple(groups)) if separable and exact else None
