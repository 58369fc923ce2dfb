"""Reading and writing a model directory: what ``train`` and ``convert`` write."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from axcore.checkpoint import OrbaxCheckpointer, new_directory
from axcore.config import Config, author
from axcore.data import BaseTokenizer, load_tokenizer
from axcore.errors import CheckpointError
from axcore.inference._unrolled import unroll_layers
from axcore.module import Module
from axcore.plugins import host

__all__ = ["LoadedModel", "load_model", "tree_bytes", "write_model"]

_STEP = 0


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        cfg: The run's ``Trainer.Config``.
        trainer: Its module tree.
        model: The model, a child of the trainer.
        state: Parameters and state of the model.
        step: Finished steps of the checkpoint.
        tokenizer_dir: Where the tokenizer is, if there is one.
        trusted: Packages whose tokenizers may be read.
    """

    cfg: Any
    trainer: Any
    model: Module
    state: dict[str, Any]
    step: int
    tokenizer_dir: Path
    trusted: tuple[str, ...] = ()

    @functools.cached_property
    def tokenizer(self) -> BaseTokenizer:
        """What makes tokens of text.

        Raises:
            DataError: The model has none, as one of images, or its file is damaged.
        """
        return load_tokenizer(self.tokenizer_dir, trusted=self.trusted)


def load_model(
    directory: str | Path,
    *,
    step: int | None = None,
    use_ema: bool = False,
    unrolled: bool = False,
    trusted: Iterable[str] = (),
) -> LoadedModel:
    """Reads the newest good checkpoint of a model directory onto the first device.

    Args:
        directory: The ``--out`` directory of ``axcore train``.
        step: Another checkpoint than the newest.
        use_ema: Whether to take the learner's moving average of the parameters.
        unrolled: Whether stacks that scan over their layers run them one by one, which decodes
            faster; see ``axcore.inference.unrolled``.
        trusted: Further packages that ``config.txt`` may name.

    Raises:
        TrainError: It is no model directory, or keeps no moving average.
        CheckpointError: It has no good checkpoint, or not this one.
    """
    from axcore.train import RunDir

    run = RunDir(directory)
    text = run.require_model()
    packages = (*host().trusted_packages(), *trusted)
    with author("file", str(run.config)):
        cfg = Config.from_text(text, trusted=packages, fill_in=True)
    if unrolled:
        unroll_layers(cfg)
    trainer: Any = cfg.instantiate(name="trainer")
    checkpointer = trainer.cfg.checkpointer.instantiate()
    checkpointer.open(run.checkpoints)
    try:
        found = checkpointer.latest_good() if step is None else step
        if found is None:
            raise CheckpointError(
                "there is no good checkpoint",
                code="AX605",
                where=str(run.checkpoints),
                hint="train a few steps first; warnings before this name damaged ones",
            )
        state = trainer.abstract_state()
        wanted = {"model": state.model} | ({"learner": state.learner} if use_ema else {})
        arrays, _ = checkpointer.restore(found, wanted, allow_unexpected=True)
    finally:
        checkpointer.close()
    state = arrays["model"]
    if use_ema:
        specs = trainer.model.parameter_specs()
        state = trainer.learner.ema_params(arrays["learner"], state, specs)
    return LoadedModel(cfg, trainer, trainer.model, state, found, run.tokenizer, tuple(packages))


def write_model(
    out: str | Path,
    cfg: Config,
    state: Any,
    *,
    like: LoadedModel,
    records: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Writes a model directory, whole or not at all; its checkpoint is that of step 0.

    Args:
        out: The directory to make.
        cfg: The ``Trainer.Config`` that ``config.txt`` is to hold.
        state: Parameters and state of its model.
        like: The model that it was made of, whose tokenizer it keeps.
        records: What to say about its making, as JSON files by name.

    Raises:
        CheckpointError: ``out`` exists or cannot be written (AX618), or the disk is full (AX602).
    """
    with new_directory(Path(out), size_bytes=tree_bytes(state)) as partial:
        (partial / "config.txt").write_text(cfg.to_text(), encoding="utf-8")
        for name, record in (records or {}).items():
            (partial / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if like.tokenizer_dir.exists():
            like.tokenizer.save(partial / "tokenizer")
        checkpointer = OrbaxCheckpointer.Config(save_every_n_steps=1, async_=False).instantiate()
        checkpointer.open(partial / "checkpoints")
        try:
            checkpointer.save(_STEP, {"model": state}, {"config": cfg.to_text()})
        finally:
            checkpointer.close()


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays; of int4 as packed."""
    return sum(
        -(-x.size // 2) if x.dtype == jax.numpy.int4 else x.nbytes for x in jax.tree.leaves(tree)
    )
