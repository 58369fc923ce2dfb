"""The role of a checkpointer: what training asks of one, whatever stores the arrays."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axcore.config import Configurable, Dim, scaled
from axcore.errors import CheckpointError

__all__ = ["BaseCheckpointer"]


class BaseCheckpointer(Configurable, abc.ABC):
    """Saves and restores the state of a run, one directory per step.

    Use: ``ckpt = cfg.instantiate(); ckpt.open(directory)``, then ``save`` whenever ``should_save``
    says so, and ``close`` at the end, on the way out of an error too. All processes of a run make
    the same calls in the same order.
    """

    class Config(Configurable.Config):
        """When to save and what to keep.

        Attributes:
            save_every_n_steps: Steps between saves; the last step is saved too.
            keep_last_n: How many of the newest steps stay.
            keep_every_n_steps: Steps divisible by this stay for good; None keeps none of them.
        """

        save_every_n_steps: Dim = scaled(0.1, of="max_step", multiple_of=1)
        keep_last_n: int = 2
        keep_every_n_steps: int | None = None

    def __init__(self, cfg: Config):
        self.cfg = cfg
        for name in ("save_every_n_steps", "keep_last_n", "keep_every_n_steps"):
            value = getattr(cfg, name)
            if value is not None and value < 1:
                raise CheckpointError(
                    f"{name} is {value}, expected at least 1", code="AX604", where="checkpointer"
                )

    def should_save(self, step: int, last_step: int) -> bool:
        """Whether to save after ``step`` steps of ``last_step``.

        It is called after every step, so an asynchronous save that failed is reported here.

        Raises:
            CheckpointError: An earlier save failed.
        """
        self.check()
        return step % self.cfg.save_every_n_steps == 0 or step == last_step

    def kept(self, steps: list[int]) -> list[int]:
        """The steps out of ``steps`` that stay, in ascending order."""
        ordered = sorted(steps)
        every = self.cfg.keep_every_n_steps
        keep = set(ordered[-self.cfg.keep_last_n :])
        return [s for s in ordered if s in keep or (every is not None and s % every == 0)]

    @abc.abstractmethod
    def open(self, directory: str | Path) -> None:
        """Binds to the directory that holds the steps; it is created by the first save."""

    @abc.abstractmethod
    def save(self, step: int, arrays: Any, extra: Mapping[str, Any] | None = None) -> None:
        """Begins to save; the arrays may be donated or changed as soon as this returns.

        Once it is whole, steps that are not to be kept are removed. Those after the step that was
        restored are among them: a run that went back has left them behind.

        Args:
            step: Number of finished steps.
            arrays: Pytree of JAX or numpy arrays; typed PRNG keys are fine.
            extra: What else belongs to the step, in JSON's types (data position, best metrics,
                config text, plugin versions, mesh); the first process's value is stored.

        Raises:
            CheckpointError: This save cannot begin, or an earlier one failed.
        """

    @abc.abstractmethod
    def steps(self) -> list[int]:
        """The finished steps in the directory, ascending, whether damaged or not."""

    @abc.abstractmethod
    def latest_good(self) -> int | None:
        """The newest step that is whole, or None. Damaged ones are skipped with a warning."""

    @abc.abstractmethod
    def restore(
        self, step: int, abstract: Any, *, allow_unexpected: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a step.

        Args:
            step: A step that is whole.
            abstract: Pytree of ``jax.ShapeDtypeStruct`` with the shardings wanted now (a leaf
                without one goes to the first device), or of arrays to take the place of.
            allow_unexpected: Whether the step may hold tensors that ``abstract`` does not ask
                for, as when only the parameters are wanted.

        Returns:
            ``(arrays, extra)``; the arrays have the structure of ``abstract``, whichever stack
            form, mesh or number of processes they were saved from.

        Raises:
            CheckpointError: The step is absent or damaged, or holds other tensors.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Raises the error of a save that failed in the background, without waiting."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until the save under way is on the disk; raises its error."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits, then releases threads. Raises the error of a save that failed."""
