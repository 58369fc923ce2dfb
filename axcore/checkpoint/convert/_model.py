"""Our side of a conversion: the parameters of a config, per layer, and their values."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from axcore.checkpoint import stack_form
from axcore.checkpoint.base import BaseCheckpointer
from axcore.checkpoint.convert._source import dtype_named
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

    def padded(self, array: np.ndarray) -> np.ndarray:
        """Returns a value as it is stored: with zeros where the model pads it."""
        padding = self.spec.padding
        return np.pad(array, [(0, pad) for pad in padding]) if any(padding) else array

    def stripped(self, array: np.ndarray) -> np.ndarray:
        """Returns a stored value without what the model pads it with."""
        return array[tuple(slice(size) for size in self.spec.valid_shape)]


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
                padding=spec.padding[lead:],
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
    return np.asarray(parameter.spec.initial(key))


class SavedModel:
    """The parameters in a model directory's checkpoint, read as they are needed, layer by layer.

    Args:
        checkpointer: Opened on the directory's checkpoints.
        step: The step.
        params: The model's parameters by path.
        where: The directory, for messages.

    Raises:
        CheckpointError: The checkpoint is of another model (AX603), or its checkpointer reads whole
            trees only (AX622).
    """

    def __init__(
        self,
        checkpointer: BaseCheckpointer,
        step: int,
        params: Mapping[str, Parameter],
        where: str,
    ):
        self.step = step
        self._reader: Any = checkpointer
        if not (hasattr(checkpointer, "describe") and hasattr(checkpointer, "read")):
            raise CheckpointError(
                f"{type(checkpointer).__name__} cannot read one array at a time",
                code="AX622",
                where=where,
            )
        stored = self._reader.describe(step)
        wanted = {
            f"model/{path}": jax.ShapeDtypeStruct(p.shape, dtype_named(p.dtype))
            for path, p in params.items()
        }
        found = stack_form.plan(stored, wanted)
        wrong = [*found.missing, *found.reshaped]
        if wrong:
            raise CheckpointError(
                f"the checkpoint lacks {len(wrong)} parameters of its config: {wrong[0]}, ...",
                code="AX603",
                where=where,
            )
        self._recipes = found.recipes

    def read(self, path: str) -> np.ndarray:
        """Returns a parameter as it is stored."""
        (source,) = self._recipes[f"model/{path}"].sources
        return self._reader.read(self.step, source.path, source.index or ())
