"""Trainer: the config of a run and the pure programs it compiles.

The host's part (data, saving, logging, signals) is in :mod:`axcore.train.run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from axcore.checkpoint import BaseCheckpointer, OrbaxCheckpointer
from axcore.collection import OutputCollection, apply_state_updates, total_loss
from axcore.config import REQUIRED, Config, Required
from axcore.context import Target, functional
from axcore.data import BaseInput, TextInput
from axcore.errors import TrainError
from axcore.module import Module, no_context
from axcore.ops import OpRule
from axcore.parallel import MeshShape, ShardingRules, named_shardings, replicated
from axcore.train._offload import in_host_memory
from axcore.train.callbacks import BaseCallback
from axcore.train.evaler import BaseEvaler, Evaler
from axcore.train.learner import Learner, LearnerState
from axcore.train.writers import BaseWriter, ConsoleWriter, JsonlWriter, TensorBoardWriter

__all__ = ["TrainState", "Trainer"]


class TrainState(NamedTuple):
    """What a step reads and writes; what a checkpoint holds of arrays.

    Attributes:
        step: int32 scalar, finished steps.
        model: Parameters and state of the model, nested dicts by child name.
        learner: The learner's state.
        key: Root PRNG key data, uint32; step n draws from fold_in(key, n).
    """

    step: jax.Array
    model: dict[str, Any]
    learner: LearnerState
    key: jax.Array


def _default_writers() -> dict[str, BaseWriter.Config]:
    return {
        "jsonl": JsonlWriter.Config(),
        "tensorboard": TensorBoardWriter.Config(),
        "console": ConsoleWriter.Config(),
    }


def _default_ops() -> dict[str, OpRule]:
    names = (
        "add_rms_norm",
        "all_gather_matmul",
        "attention",
        "gated_activation",
        "grouped_matmul",
        "layer_norm",
        "linear_cross_entropy",
        "matmul_reduce_scatter",
        "paged_attention",
        "rms_norm",
        "rotary",
    )
    return {name: OpRule() for name in names}


class Trainer(Module):
    """A training run: model, learner, data, checkpoints, evaluation and logging as children.

    Making one builds no array and touches no file; :func:`axcore.train.train` runs it.
    """

    class Config(Module.Config):
        """One place for each number: children follow ``max_step``, ``batch_size``, ``seq_len``."""

        model: Required[Module.Config] = REQUIRED
        learner: Required[Learner.Config] = REQUIRED
        input: BaseInput.Config = TextInput.Config()
        checkpointer: BaseCheckpointer.Config = OrbaxCheckpointer.Config()
        evalers: Mapping[str, BaseEvaler.Config] = {"heldout": Evaler.Config()}
        writers: Mapping[str, BaseWriter.Config] = _default_writers()
        callbacks: Mapping[str, BaseCallback.Config] = {}

        # Optimizer steps of the whole run.
        max_step: Required[int] = REQUIRED
        # Rows of the global batch, over all devices and processes.
        batch_size: Required[int] = REQUIRED
        # Tokens per row.
        seq_len: Required[int] = REQUIRED
        seed: int = 0
        # Microbatches per step; the result equals that of the whole batch.
        accumulation_steps: int = 1
        log_every_n_steps: int = 10
        # A run stops with an error after so many steps in a row were skipped as not finite.
        max_skipped_in_a_row: int = 10
        # Text to continue when the run ends, for a look; None for none.
        sample_prompt: str | None = None

        mesh_shape: MeshShape = MeshShape(data=-1)
        sharding_rules: ShardingRules = ShardingRules()
        # XLA options of the step's program.
        compiler_options: Mapping[str, bool | int | float | str] = {}
        # What is acceptable for each op, such as ops.attention.fallback=allow.
        ops: Mapping[str, OpRule] = _default_ops()

        # Instance pattern -> modifiers, after the plugins' own rule for the instance.
        mesh_rules: tuple[tuple[str, tuple[Config, ...]], ...] = ()
        # Modifiers applied to the experiment before anything else; empty once they have been.
        modifiers: tuple[Config, ...] = ()
        # Such as "acme-kernels>=0.1,<0.2"; checked before anything compiles.
        required_plugins: tuple[str, ...] = ()
        # Distributions whose rules, options and kernels are active beside the instance's own.
        use: tuple[str, ...] = ()

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: Any) -> Trainer:
                """Returns the trainer."""
                ...

    def __init__(self, cfg: Trainer.Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        for name in (
            "max_step",
            "batch_size",
            "seq_len",
            "accumulation_steps",
            "log_every_n_steps",
        ):
            if getattr(cfg, name) < 1:
                raise TrainError(
                    f"{name} is {getattr(cfg, name)}, expected at least 1", code="AX701", where=name
                )
        # Steps are counted in int32, and a key takes a seed of 64 bits.
        for name, least, most in (
            ("max_step", 1, 2**31 - 1),
            ("seed", -(2**63), 2**63 - 1),
            ("max_skipped_in_a_row", 0, 2**31 - 1),
        ):
            if not least <= getattr(cfg, name) <= most:
                raise TrainError(
                    f"{name} is {getattr(cfg, name)}, expected {least} to {most}",
                    code="AX701",
                    where=name,
                )
        if rest := cfg.batch_size % cfg.accumulation_steps:
            below = cfg.batch_size - rest
            near = [str(size) for size in (below, below + cfg.accumulation_steps) if size]
            raise TrainError(
                f"batch_size {cfg.batch_size} is no multiple of accumulation_steps "
                f"{cfg.accumulation_steps}",
                code="AX701",
                where="accumulation_steps",
                hint=f"set batch_size to {' or '.join(near)}",
            )
        self.model = self._add_child("model", cfg.model)
        self.learner = self._add_child("learner", cfg.learner, Learner)

    # -- pure programs ---------------------------------------------------------------------

    @no_context
    def init_state(self, params: Any = None) -> TrainState:
        """Returns the state before the first step; run it under ``jax.jit`` with shardings.

        Args:
            params: The model's parameters; None initializes them.
        """
        key = jax.random.key(self.cfg.seed)
        if params is None:
            params = self.model.initialize(jax.random.fold_in(key, 0))
        learner = self.learner.init(params, self.model.parameter_specs())
        run_key = jax.random.key_data(jax.random.fold_in(key, 1))
        return TrainState(jnp.zeros((), jnp.int32), params, learner, run_key)

    @no_context
    def train_step(
        self, state: TrainState, batch: Mapping[str, jax.Array], *, target: Target | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """One optimizer step.

        Args:
            state: The state; donate it.
            batch: Arguments of the model's ``forward`` by name, (batch_size, ...) each.
            target: What the program is built for.

        Returns:
            The next state and what is logged: ``loss``, the learner's metrics, ``losses`` and
            ``summaries`` by path.
        """
        specs = self.model.parameter_specs()
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        def losses(params: Any, rows: Any, key: Any) -> OutputCollection:
            _, collection = functional(
                self.model, state=params, inputs=rows, is_training=True, key=key, target=target
            )
            return collection

        grads, collection = self.learner.loss_and_grads(
            losses,
            state.model,
            batch,
            specs,
            accumulation_steps=self.cfg.accumulation_steps,
            key=key,
        )
        loss = total_loss(collection)
        params, learner, metrics = self.learner.update(
            grads, state.learner, state.model, specs, loss=loss
        )
        if collection.state_updates:
            updated = apply_state_updates(params, collection)
            applied = learner.skipped == state.learner.skipped
            params = jax.tree.map(
                lambda new, old: new if new is old else jnp.where(applied, new, old),
                updated,
                params,
            )
        logged = {
            "loss": loss,
            "skipped_in_a_row": learner.skipped_in_a_row,
            **metrics,
            "losses": {p: e.result() for p, e in collection.losses.items()},
            "summaries": {p: e.result() for p, e in collection.summaries.items()},
        }
        return TrainState(state.step + 1, params, learner, state.key), logged

    @no_context
    def eval_step(
        self, params: Any, batch: Mapping[str, jax.Array], *, target: Target | None = None
    ) -> OutputCollection:
        """Returns the losses and summaries of one batch."""
        _, collection = functional(
            self.model, state=params, inputs=batch, is_training=False, target=target
        )
        return OutputCollection(losses=collection.losses, summaries=collection.summaries)

    @no_context
    def abstract_state(self) -> TrainState:
        """Returns shapes and dtypes of the state, nothing computed."""
        return jax.eval_shape(self.init_state)

    @no_context
    def state_shardings(
        self, mesh: jax.sharding.Mesh, rules: ShardingRules, *, host_memory: str | None = None
    ) -> Any:
        """Returns the sharding of every array, in the structure of :class:`TrainState`.

        Args:
            mesh: The mesh.
            rules: The rules.
            host_memory: Memory kind for optimizer state; None keeps it with the parameters.
        """
        specs = self.model.parameter_specs()
        whole = replicated(mesh)
        learner = named_shardings(
            self.learner.state_axes(specs).specs, mesh, rules, table="optimizer"
        )
        if host_memory is not None:
            learner = in_host_memory(learner, self.abstract_state().learner, host_memory)
        shardings: Any = (whole, named_shardings(specs, mesh, rules), learner, whole)
        return TrainState(*shardings)
