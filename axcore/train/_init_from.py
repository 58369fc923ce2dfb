"""Starting from the parameters of another model directory: ``train --init-from DIR``."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from axcore.checkpoint import BaseCheckpointer, stack_form
from axcore.errors import CheckpointError, TrainError
from axcore.quantization import is_recipe_state
from axcore.train._paths import flatten, unflatten
from axcore.train.rundir import RunDir

__all__ = ["InitialWeights", "check_is_run"]

_TOKENIZER = "axcore_tokenizer.json"
_ADAPTED = "/dot/base/"  # where an adapter has the product that it wraps


def check_is_run(checkpointer: Any, run: RunDir) -> None:
    """Checks that an output directory is none whose model was made, not trained, there.

    Args:
        checkpointer: Of that directory, opened. One that cannot describe steps is not asked.
        run: The directory.

    Raises:
        TrainError: Its newest checkpoint has parameters, and nothing of a learner.
    """
    describe = getattr(checkpointer, "describe", None)
    steps = checkpointer.steps()
    if describe is None or not steps:
        return
    try:
        paths = describe(steps[-1])
    except CheckpointError:  # a damaged step; which one is taken instead is decided later
        return
    if all(path.startswith("model/") for path in paths):
        raise TrainError(
            "the output directory holds a model and no run that can go on: its checkpoint has "
            "parameters, and nothing of a learner",
            code="AX981",
            where=str(run.root),
            hint=f"--init-from {run.root} --out OTHER starts a run with its parameters",
        )


class InitialWeights:
    """The parameters in a model directory, whatever their stack form, mesh and dtype.

    Args:
        directory: The ``--out`` directory of ``axcore train`` or ``axcore convert``.
        checkpointer: A fresh one, which reads the directory; closed by :meth:`close`.

    Raises:
        TrainError: It is no model directory.
        CheckpointError: It has no good checkpoint.
    """

    def __init__(self, directory: str | Path, checkpointer: BaseCheckpointer):
        self.run = RunDir(directory)
        self.run.require_model()
        self._checkpointer = checkpointer
        checkpointer.open(self.run.checkpoints)
        found = checkpointer.latest_good()
        if found is None:
            checkpointer.close()
            raise CheckpointError(
                "there is no good checkpoint to take parameters from",
                code="AX605",
                where=str(self.run.checkpoints),
                hint="let that run save a step first, or name another model directory",
            )
        self.step = found
        self.fresh: tuple[str, ...] = ()  # parameters that are not there, and start anew
        self.dropped: tuple[str, ...] = ()  # state of its quantization recipe, of no use here

    def check(self, wanted: Any, optional: Collection[str] = ()) -> None:
        """Compares shapes, before anything is read or written.

        Args:
            wanted: The model's parameters as ``jax.ShapeDtypeStruct``.
            optional: Paths of parameters that may be missing there, such as those of adapters.

        Raises:
            CheckpointError: Parameters are missing, or of another shape or kind (AX606).
        """
        stored = self._stored()
        if stored is None:
            return
        target = stack_form.flatten({"model": wanted})
        found = stack_form.plan(stored, target)
        differences = [
            f"{_name(path)} has shape {list(have)} there, {list(want)} here"
            for path, (have, want) in found.reshaped.items()
        ]
        self.fresh = tuple(_name(p) for p in found.missing if _name(p) in optional)
        lacking = (_name(path) for path in found.missing)
        differences += [f"{name} is not there" for name in lacking if name not in self.fresh]
        for path, recipe in found.recipes.items():
            have, want = stored[recipe.sources[0].path].dtype, target[path].dtype
            if have != want and not (_is_float(have) and _is_float(want)):
                differences.append(f"{_name(path)} is {have} there, {want} here")
        self.dropped = tuple(_name(p) for p in found.unexpected if is_recipe_state(p))
        differences += [
            f"{_name(path)} {list(stored[path].shape)} is there only"
            for path in found.unexpected
            if _name(path) not in self.dropped
        ]
        if differences:
            more = len(differences) - 10
            listed = "; ".join(differences[:10]) + (f"; and {more} more" if more > 0 else "")
            hint = (
                "name an experiment of the same architecture and sizes "
                f"({self.run.config} is the one it was made with)"
            )
            absent = (*found.missing, *found.missing.values())  # of stacks and of layers
            if any(path.replace(_ADAPTED, "/dot/") in stored for path in absent):
                hint = (
                    "it is quantized, and has no adapters yet: train them from the directory that "
                    "it was made of, then run `axcore quantize` on that run"
                )
            raise CheckpointError(
                f"it holds another model than the experiment's: {listed}",
                code="AX606",
                where=str(self.run.root),
                hint=hint,
            )

    def read(
        self, wanted: Any, initialize: Callable[[Sequence[str]], Mapping[str, jax.Array]]
    ) -> Any:
        """Returns the parameters in the dtypes and shardings of ``wanted``.

        Args:
            wanted: The model's parameters as ``jax.ShapeDtypeStruct``.
            initialize: Makes the initial values of those at the given paths.
        """
        if not self.fresh:
            return self._read(wanted)
        flat = flatten(wanted)
        present = {path: want for path, want in flat.items() if "/".join(path) not in self.fresh}
        made = {tuple(path.split("/")): value for path, value in initialize(self.fresh).items()}
        return unflatten({**flatten(self._read(unflatten(present))), **made})

    def _read(self, wanted: Any) -> Any:
        stored = self._stored()
        held = wanted if stored is None else self._as_stored(wanted, stored)
        tree, _ = self._checkpointer.restore(self.step, {"model": held}, allow_unexpected=True)

        def cast(array: Any, want: Any) -> Any:
            if array.dtype == want.dtype:
                return array
            change = jax.jit(lambda x: x.astype(want.dtype), out_shardings=want.sharding)
            return change(array)

        return jax.tree.map(cast, tree["model"], wanted)

    def tokenizer_differs(self, tokenizer: Any) -> bool:
        """Tells whether the directory's tokenizer makes other ids than the experiment's."""
        if tokenizer is None:
            return False
        try:
            text = (self.run.tokenizer / _TOKENIZER).read_text(encoding="utf-8")
            record = json.loads(text)
        except (OSError, ValueError):
            return False
        names = ("vocab_size", "bos_id", "eos_id")
        return any(record.get(name) != getattr(tokenizer, name) for name in names)

    def close(self) -> None:
        """Releases the checkpointer."""
        self._checkpointer.close()

    def _as_stored(self, wanted: Any, stored: dict[str, Any]) -> Any:
        recipes = stack_form.plan(stored, stack_form.flatten({"model": wanted})).recipes
        leaves, structure = jax.tree.flatten({"model": wanted})
        held = [
            jax.ShapeDtypeStruct(
                want.shape, stored[recipes[path].sources[0].path].dtype, sharding=want.sharding
            )
            for path, want in zip(stack_form.flatten({"model": wanted}), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, held)["model"]

    def _stored(self) -> dict[str, Any] | None:
        describe = getattr(self._checkpointer, "describe", None)
        if describe is None:
            return None
        return {p: s for p, s in describe(self.step).items() if p.startswith("model/")}


def _name(path: str) -> str:
    return path.removeprefix("model/")


def _is_float(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(np.dtype(dtype), jax.numpy.floating))
