"""Which parameters train: splitting a parameter tree in two and putting it together again.

Frozen leaves are absent from the trainable tree, so they get no gradient and no optimizer state.
When only some layers of a scanned stack are frozen, the stacked leaf is cut into runs of layers
(``0:8:1`` into the frozen ``0:4:1`` and the trainable ``4:8:1``): state exists for trainable layers
only. The cost is a concatenation per such leaf and step, and that the scan's backward pass computes
the frozen layers' gradients before they are dropped; unrolled stacks have neither.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from axcore.errors import TrainError
from axcore.train._paths import Path, flatten, leaf_masks, stack_range, unflatten

__all__ = ["Layout", "make_layout"]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A run of layers of one leaf (or a whole leaf: ``rows`` is None)."""

    source: Path
    target: Path
    rows: slice | None
    trainable: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a parameter tree divides into a trainable and a frozen one."""

    pieces: tuple[_Piece, ...]

    def split(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns ``(trainable, frozen)``: nested dicts without empty branches.

        Raises:
            TrainError: The tree is not that of the specs.
        """
        flat = flatten(params)
        missing = [p.source for p in self.pieces if p.source not in flat]
        extra = set(flat) - {p.source for p in self.pieces}
        if missing or extra:
            which = (
                ("/".join(missing[0]), "is missing")
                if missing
                else (
                    "/".join(sorted(extra)[0]),
                    "has no spec",
                )
            )
            raise TrainError(
                f"the parameters are not those of the specs: {which[0]!r} {which[1]}", code="AX713"
            )
        sides: tuple[dict[Path, Any], dict[Path, Any]] = ({}, {})
        for piece in self.pieces:
            leaf = flat[piece.source]
            sides[not piece.trainable][piece.target] = (
                leaf if piece.rows is None else leaf[piece.rows]
            )
        return unflatten(sides[0]), unflatten(sides[1])

    def merge(self, trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole tree; the inverse of :meth:`split`."""
        sides = (flatten(trainable), flatten(frozen))
        merged: dict[Path, Any] = {}
        for source, group in itertools.groupby(self.pieces, key=lambda p: p.source):
            parts = [sides[not p.trainable][p.target] for p in group]
            merged[source] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return unflatten(merged)

    def trainable_specs(self, specs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the specs of the trainable tree."""
        flat = flatten(specs)
        chosen: dict[Path, Any] = {}
        for piece in self.pieces:
            if not piece.trainable:
                continue
            spec = flat[piece.source]
            if piece.rows is not None:
                rows = piece.rows.stop - piece.rows.start
                spec = dataclasses.replace(spec, shape=(rows, *spec.shape[1:]))
            chosen[piece.target] = spec
        return unflatten(chosen)

    def trainable_masks(self, masks: Mapping[Path, np.ndarray]) -> dict[str, Any]:
        """Cuts per-leaf masks of layers to the trainable tree.

        Args:
            masks: For each leaf a bool array of its leading layer axes.

        Returns:
            A tree of bools; of bool arrays where the layers of a leaf differ.
        """
        chosen: dict[Path, Any] = {}
        for piece in self.pieces:
            if piece.trainable:
                mask = masks[piece.source]
                mask = mask if piece.rows is None else mask[piece.rows]
                same = mask.all() or not mask.any()
                chosen[piece.target] = bool(mask.any()) if same else mask
        return unflatten(chosen)


def make_layout(specs: Mapping[str, Any], freeze: Sequence[str], *, where: str) -> Layout:
    """Divides parameters by freeze patterns; leaves of kind ``state`` never train.

    Args:
        specs: Nested :class:`~axcore.module.ParameterSpec`.
        freeze: Globs over per-layer parameter paths.
        where: Config path of the patterns.

    Raises:
        TrainError: A pattern matches nothing, nothing is left to train, a trainable parameter is
            not of a float dtype, or single layers of a stack within a stack are frozen.
    """
    flat = flatten(specs)
    parameters = {p: s for p, s in flat.items() if s.kind == "parameter"}
    frozen = leaf_masks(parameters, freeze, where=where)
    pieces: list[_Piece] = []
    for path in flat:
        if path not in parameters or frozen[path].every:
            pieces.append(_Piece(path, path, None, trainable=False))
        elif not frozen[path].some:
            pieces.append(_Piece(path, path, None, trainable=True))
        else:
            pieces.extend(_runs(path, frozen[path].mask, where))
    for piece in pieces:
        dtype = flat[piece.source].dtype
        if piece.trainable and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            raise TrainError(
                f"{'/'.join(piece.source)!r} is {dtype}, which has no gradient",
                code="AX712",
                hint="freeze it, or describe it with kind='state'",
            )
    if not any(piece.trainable for piece in pieces):
        raise TrainError(
            "every parameter is frozen: nothing is left to train",
            where=where,
            hint="narrow the patterns of learner.frozen_params",
        )
    return Layout(tuple(pieces))


def _runs(path: Path, mask: np.ndarray, where: str) -> list[_Piece]:
    """Cuts a stacked leaf into runs of layers that are frozen or not."""
    positions = [n for n, key in enumerate(path) if stack_range(key) is not None]
    if len(positions) > 1:
        raise TrainError(
            f"{'/'.join(path)!r} is a stack within a stack; single layers of it cannot be frozen",
            code="AX714",
            where=where,
            hint="freeze all of its layers, or use an unrolled stack",
        )
    layers = stack_range(path[positions[0]])
    assert layers is not None
    pieces: list[_Piece] = []
    start = 0
    for is_frozen, run in itertools.groupby(mask.tolist()):
        count = len(list(run))
        first, step = layers[start], layers.step
        key = f"{first}:{first + count * step}:{step}"
        target = (*path[: positions[0]], key, *path[positions[0] + 1 :])
        pieces.append(_Piece(path, target, slice(start, start + count), trainable=not is_frozen))
        start += count
    return pieces
