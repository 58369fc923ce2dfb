"""Which tensors a checkpoint and a state tree have in common, and how to say what they have not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.checkpoint import stack_form
from axcore.checkpoint._manifest import ArrayRecord
from axcore.errors import CheckpointError

__all__ = ["Wanted", "match", "store_form", "wanted"]

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One leaf of a target tree, in the form in which it is stored.

    Attributes:
        shape: Shape of the stored data.
        dtype: Dtype of the stored data.
        sharding: Where it goes; None means a numpy array.
        key_dtype: The typed PRNG key dtype to wrap it in, or None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding | None
    key_dtype: Any = None


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array (or the shape) of typed PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def store_form(leaf: Any) -> tuple[Any, str | None]:
    """Returns the array to store for a leaf, and the PRNG implementation of typed keys."""
    if is_key(leaf):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
    # A host array may be changed in place while it is being written.
    return (leaf if isinstance(leaf, jax.Array) else np.array(leaf, copy=True)), None


def wanted(leaf: Any) -> Wanted:
    """Describes a leaf of a target tree: an array or a ``jax.ShapeDtypeStruct``."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return Wanted(leaf.shape, leaf.dtype, None)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return Wanted(data.shape, data.dtype, sharding, leaf.dtype)
    return Wanted(tuple(leaf.shape), np.dtype(leaf.dtype), sharding)


def match(
    stored: Mapping[str, ArrayRecord],
    target: Mapping[str, Wanted],
    *,
    where: str,
    allow_unexpected: bool,
) -> Mapping[str, stack_form.Recipe]:
    """Returns how to make each target leaf.

    Args:
        stored: Arrays of the checkpoint by path.
        target: Leaves wanted by path.
        where: The checkpoint, for the message.
        allow_unexpected: Whether stored arrays may stay unused.

    Raises:
        CheckpointError: Tensors are missing, unexpected, or of another shape or dtype (AX603).
    """
    shapes = {
        path: jax.ShapeDtypeStruct(record.shape, np.dtype(record.dtype))
        for path, record in stored.items()
    }
    found = stack_form.plan(shapes, target)
    differences = [
        f"{path} {_spec(target[path])} is missing"
        if path == name
        else f"{path} {_spec(target[path])} is missing ({name})"
        for path, name in found.missing.items()
    ]
    for path, (have, want) in found.reshaped.items():
        differences.append(f"{path} has shape {list(have)}, expected {list(want)}")
    for path, recipe in found.recipes.items():
        for name in dict.fromkeys(source.path for source in recipe.sources):
            if (text := _dtype_difference(path, stored[name], target[path])) is not None:
                differences.append(text)
                break
    if not allow_unexpected:
        differences += [f"{path} {_spec(shapes[path])} is unexpected" for path in found.unexpected]
    if differences:
        more = len(differences) - _SHOWN
        listed = "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        count = f"{len(differences)} tensor{'s differ' if len(differences) > 1 else ' differs'}"
        raise CheckpointError(
            f"the checkpoint is of another model, {count}: {listed}",
            code="AX603",
            where=where,
            hint="use the config the checkpoint was made with, or another output directory",
        )
    return found.recipes


def _dtype_difference(path: str, record: ArrayRecord, target: Wanted) -> str | None:
    have, want = record.dtype, target.dtype.name
    if record.key_impl is not None or target.key_dtype is not None:
        have = _key_dtype_name(record)
        want = want if target.key_dtype is None else str(target.key_dtype)
    return None if have == want else f"{path} has dtype {have}, expected {want}"


def _key_dtype_name(record: ArrayRecord) -> str:
    if record.key_impl is None:
        return record.dtype
    data = jax.ShapeDtypeStruct(record.shape, np.dtype(record.dtype))
    keys = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=record.key_impl), data)
    return str(keys.dtype)


def _spec(leaf: stack_form.ShapeLike) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
