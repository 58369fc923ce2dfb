"""A trainer's programs on the devices of an instance: where arrays go, compiled steps.

The devices may be those of a machine that is not here: the step is then compiled from shapes
(:func:`axcore.train.aot`), by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from axcore.checkpoint import stack_form
from axcore.collection import OutputCollection
from axcore.errors import TrainError
from axcore.module import flatten_specs
from axcore.parallel import (
    CompiledStep,
    LoweredStep,
    MemoryUse,
    MeshShape,
    ProgramTarget,
    abstract_mesh,
    batch_sharding,
    build_mesh,
    compile_step,
    lower_step,
    make_global_array,
    platform_options,
    process_rows,
)
from axcore.parallel.arrays import check_batch_shape
from axcore.plugins import Instance
from axcore.remat import host_memory
from axcore.train.trainer import Trainer, TrainState

__all__ = ["EvalProgram", "Program"]


class Program:
    """A trainer's programs on the devices of an instance.

    Args:
        trainer: The trainer.
        instance: The machine.
        devices: Its devices, of all processes; or topology devices of a compiler; or None for a
            program that is only traced.
        stand_ins: ``OP.IMPLEMENTATION`` -> what is traced in its place.
    """

    def __init__(
        self,
        trainer: Trainer,
        instance: Instance,
        devices: Sequence[Any] | None,
        *,
        stand_ins: Mapping[str, str] | None = None,
    ):
        cfg = trainer.cfg
        self.trainer, self.instance = trainer, instance
        self.mesh = _mesh(cfg.mesh_shape, instance, devices)
        self.target = ProgramTarget.for_instance(
            instance,
            self.mesh,
            cfg.sharding_rules,
            kernels={op: r.implementations for op, r in cfg.ops.items() if r.implementations},
            fallbacks=[op for op, rule in cfg.ops.items() if rule.fallback == "allow"],
            stand_ins=stand_ins,
        )
        # A config may state options of several platforms.
        self.compiler_options = platform_options(cfg.compiler_options, instance.platform)
        self.abstract = trainer.abstract_state()
        self.shardings = trainer.state_shardings(
            self.mesh, cfg.sharding_rules, host_memory=_state_memory(cfg, instance.platform)
        )
        self.batch_sharding = batch_sharding(self.mesh, cfg.sharding_rules)
        _check_rows(self.mesh, self.batch_sharding, cfg.batch_size, cfg.accumulation_steps)
        self.rows = () if devices is None else process_rows(self.batch_sharding, cfg.batch_size)
        self._whole = self.mesh.size == 1
        specs = trainer.model.parameter_specs()
        self.num_parameters = sum(
            math.prod(s.valid_shape) for s in flatten_specs(specs).values() if s.kind == "parameter"
        )
        # What weights from elsewhere may lack.
        self.optional = frozenset(p for p, s in flatten_specs(specs).items() if s.optional)
        # Scalars (counters) are whole everywhere by nature; the rest is worth knowing.
        self.replicated = [
            {"path": leaf.path, "shape": list(leaf.shape), "reason": leaf.reason}
            for leaf in trainer.learner.state_axes(specs).replicated
            if leaf.shape
        ]
        self._eval: CompiledStep | None = None
        self.compile_seconds = 0.0
        # Of the compiled training step.
        self.memory: MemoryUse | None = None

    def initial_state(self, params: Any = None) -> TrainState:
        """Returns the state before the first step, sharded from the start.

        Args:
            params: The model's parameters, which are donated; None initializes them.
        """
        init = self.trainer.init_state
        if params is None:
            return jax.jit(init, out_shardings=self.shardings)()
        return jax.jit(init, out_shardings=self.shardings, donate_argnums=0)(params)

    def initial_parameters(self, paths: Sequence[str]) -> dict[str, jax.Array]:
        """Returns the initial values of the parameters at ``paths``, sharded, and no others."""

        def make() -> dict[str, jax.Array]:
            flat = stack_form.flatten(self.trainer.init_state().model)
            return {path: flat[path] for path in paths}

        shardings = stack_form.flatten(self.shardings.model)
        return jax.jit(make, out_shardings={path: shardings[path] for path in paths})()

    def wanted_state(self) -> TrainState:
        """Returns shapes, dtypes and shardings of the state, to restore into."""
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            self.abstract,
            self.shardings,
        )

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the global arrays of the rows that this process feeds."""
        if self._whole:
            return dict(batch)  # the compiled call moves host arrays faster than device_put
        size = self.trainer.cfg.batch_size
        return {
            name: make_global_array(
                rows, self._sharding_of(rows), (size, *rows.shape[1:]), rows=self.rows
            )
            for name, rows in batch.items()
        }

    def wanted_batch(self, rows: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of a global batch.

        Args:
            rows: Any rows of it, as arrays or their shapes.

        Raises:
            ShardingError: A dim does not divide over the devices that split it.
        """
        wanted: dict[str, jax.ShapeDtypeStruct] = {}
        for name, array in rows.items():
            shape = (self.trainer.cfg.batch_size, *array.shape[1:])
            sharding = self._sharding_of(array)
            check_batch_shape(sharding, shape)
            wanted[name] = jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
        return wanted

    def trace_train(self, batch: Mapping[str, Any]) -> Any:
        """Returns the jaxpr of the training step; needs no devices.

        Args:
            batch: Shapes of a batch, as of :meth:`wanted_batch`.
        """

        def step(state: TrainState, batch: Any) -> Any:
            return self.trainer.train_step(state, batch, target=self.target)

        shapes = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in batch.items()}
        return jax.make_jaxpr(step)(self.abstract, shapes)

    def lower_train(self, state: TrainState, batch: Any) -> LoweredStep:
        """Traces and lowers the training step; the state is donated.

        Args:
            state: The state, or :meth:`wanted_state`.
            batch: The batch, or :meth:`wanted_batch`.
        """

        def step(state: TrainState, batch: Any) -> Any:
            return self.trainer.train_step(state, batch, target=self.target)

        return lower_step(
            step,
            state,
            batch,
            in_shardings=(self.shardings, self._batch_shardings(batch)),
            out_shardings=(self.shardings, None),
            donate=(0,),
        )

    def compile_train(self, state: TrainState, batch: Any) -> CompiledStep:
        """Compiles the training step; the state is donated."""
        compiled = self.lower_train(state, batch).compile(self.compiler_options)
        self.memory = compiled.memory
        self.compile_seconds += compiled.lower_seconds + compiled.compile_seconds
        return compiled

    def evaluate(self, params: Any, batch: Mapping[str, np.ndarray]) -> OutputCollection:
        """Runs the evaluation of one batch, compiled at the first call."""
        arrays = self.put(batch)
        if self._eval is None:

            def step(params: Any, batch: Any) -> Any:
                return self.trainer.eval_step(params, batch, target=self.target)

            self._eval = compile_step(
                step,
                params,
                arrays,
                in_shardings=(self.shardings.model, self._batch_shardings(arrays)),
                compiler_options=self.compiler_options,
            )
            self.compile_seconds += self._eval.lower_seconds + self._eval.compile_seconds
        return self._eval.call(params, arrays)

    def _batch_shardings(self, batch: Any) -> Any:
        return jax.tree.map(self._sharding_of, batch)

    def _sharding_of(self, array: Any) -> jax.sharding.NamedSharding:
        """That of (rows, seq, ...) arrays, or of (rows,) ones such as labels."""
        spec = self.batch_sharding.spec
        if np.ndim(array) >= len(spec):
            return self.batch_sharding
        return jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(*spec[: np.ndim(array)])
        )


def _mesh(shape: MeshShape, instance: Instance, devices: Sequence[Any] | None) -> Any:
    if devices is None:
        return abstract_mesh(shape, instance.num_devices, instance.num_slices)
    return build_mesh(shape, devices, num_slices=instance.num_slices)


def _state_memory(cfg: Trainer.Config, platform: str) -> str | None:
    if cfg.learner.state_memory == "device":
        return None
    return host_memory(platform, "optimizer state there", where="learner.state_memory")


def _check_rows(mesh: Any, sharding: Any, batch_size: int, accumulation_steps: int) -> None:
    """Raises TrainError unless the rows of each microbatch divide among the devices."""
    entry = sharding.spec[0] if sharding.spec else None
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if batch_size % (shards * accumulation_steps):
        unit = shards * accumulation_steps
        near = sorted({max(1, batch_size // unit) * unit, -(-batch_size // unit) * unit})
        over = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes if mesh.shape[axis] > 1)
        micro = f" in {accumulation_steps} microbatches" if accumulation_steps > 1 else ""
        raise TrainError(
            f"{batch_size} rows{micro} do not divide over {shards} devices ({over})",
            code="AX705",
            where="batch_size",
            hint=f"set batch_size to {' or '.join(map(str, near))}, or another mesh_shape",
        )


class EvalProgram:
    """What an evaler sees of a program: implements :class:`axcore.train.evaler.EvalProgram`."""

    def __init__(self, program: Program, params: Any):
        self.rows, self._program, self._params = program.rows, program, params

    def __call__(self, batch: Any) -> OutputCollection:
        return self._program.evaluate(self._params, batch)
