"""Our side of a conversion: the parameters of a config, per layer, and their values."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from axcore.checkpoint import stack_form
from axcore.checkpoint.base import BaseCheckpointer
from axcore.errors import CheckpointError
from axcore.module import ParameterSpec, flatten_specs

__all__ = ["Parameter", "SavedModel", "check_count", "initial_value", "parameters"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of one layer.

    Attributes:
        shape: Its shape.
        dtype: Its dtype's name.
        spec: Its description, of this layer alone.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: ParameterSpec


def parameters(trainer: Any) -> dict[str, Parameter]:
    """Returns every parameter and state of a trainer's model by path, per layer."""
    out: dict[str, Parameter] = {}
    for path, spec in flatten_specs(trainer.model.parameter_specs()).items():
        for name, struct in stack_form.canonical({path: spec.struct()}).items():
            lead = len(spec.shape) - len(struct.shape)
            single = dataclasses.replace(
                spec,
                shape=tuple(struct.shape),
                axes=spec.axes[lead:],
                fan_in_dims=tuple(d - lead for d in spec.fan_in_dims),
                fan_out_dims=tuple(d - lead for d in spec.fan_out_dims),
                num_stacked=0,
            )
            out[name] = Parameter(tuple(struct.shape), np.dtype(struct.dtype).name, single)
    return out


def check_count(trainer: Any, num_tensors: int, where: str) -> None:
    """Refuses settings that describe far more parameters than a source has tensors.

    Args:
        trainer: The trainer of the settings' experiment.
        num_tensors: Tensors of the source.
        where: The source, for the message.

    Raises:
        CheckpointError: A hundred times as many, before they are listed one by one (AX616).
    """
    specs = flatten_specs(trainer.model.parameter_specs()).values()
    count = sum(math.prod(spec.shape[: spec.num_stacked]) for spec in specs)
    if count > 100 * (num_tensors + 10):
        raise CheckpointError(
            f"the settings describe {count:,} parameters, the source holds {num_tensors} tensors",
            code="AX616",
            where=where,
            hint="the settings are of another model, or damaged",
        )


def initial_value(path: str, parameter: Parameter) -> np.ndarray:
    """Returns the value of a parameter that nothing provides; the same one each time."""
    key = jax.random.fold_in(jax.random.key(0), zlib.crc32(path.encode()))
    return np.asarray(parameter.spec.initializer(key, parameter.spec))


class SavedModel:
    """The parameters in a model directory's checkpoint, read as they are needed.

    Args:
        checkpointer: Opened on the directory's checkpoints.
        step: The step.
        params: The model's parameters by path.
    """

    def __init__(
        self, checkpointer: BaseCheckpointer, step: int, params: Mapping[str, Parameter], root: Path
    ):
        self._checkpointer, self._step, self._params, self._root = checkpointer, step, params, root
        # Where a layer is part of a stacked array, the array is read once for all its layers.
        stored = self._stored()
        self._home = {
            name: path
            for path, struct in stored.items()
            for name in stack_form.canonical({path: struct})
        }
        self._stored_structs = stored
        self._cache: dict[str, dict[str, Any]] = {}

    def read(self, paths: tuple[str, ...]) -> list[np.ndarray]:
        """Returns parameters; what was read for other stored arrays is forgotten."""
        homes = [self._home[f"model/{path}"] for path in paths]
        self._cache = {home: self._cache[home] for home in homes if home in self._cache}
        for home in homes:
            if home not in self._cache:
                struct = self._stored_structs[home]
                hollow = np.broadcast_to(np.zeros((), struct.dtype), struct.shape)
                tree, _ = self._checkpointer.restore(
                    self._step, _nested(home, hollow), allow_unexpected=True
                )
                (value,) = jax.tree.leaves(tree)
                self._cache[home] = stack_form.canonical({home: value})
        pairs = zip(homes, paths, strict=True)
        return [self._cache[home][f"model/{path}"] for home, path in pairs]

    def _stored(self) -> dict[str, jax.ShapeDtypeStruct]:
        describe = getattr(self._checkpointer, "describe", None)
        if describe is None:
            raise CheckpointError(
                f"{type(self._checkpointer).__name__} cannot say what it has stored",
                code="AX622",
                where=str(self._root),
            )
        structs = describe(self._step)
        found = {p: s for p, s in structs.items() if p.startswith("model/")}
        held = stack_form.canonical(found)
        missing = [p for p in self._params if f"model/{p}" not in held]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} parameters of its config: {missing[0]}, ...",
                code="AX603",
                where=str(self._root),
            )
        return found


def _nested(path: str, leaf: Any) -> Any:
    """A tree with one leaf at ``path``."""
    for key in reversed(path.split("/")):
        leaf = {key: leaf}
    return leaf
