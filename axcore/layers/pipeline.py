"""A stack of layers as a pipeline: the stages of a mesh axis, microbatches of the batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axcore import transforms
from axcore.errors import ModuleError
from axcore.layers.base import BETWEEN_BRANCHES
from axcore.layers.roles import SequenceInfo
from axcore.layers.stack import BaseStack
from axcore.pipelining import pipeline_layers

__all__ = ["PipelinedTransformer"]

# Fields of SequenceInfo whose leading dim is the batch; they go with their microbatch.
_ROW_FIELDS = (
    "positions",
    "segment_ids",
    "token_values",
    "prefix_lengths",
    "memory",
    "memory_segment_ids",
)


class PipelinedTransformer(BaseStack):
    """The layers of ``RepeatedTransformer``, divided into stages that run at the same time.

    The stages follow from where the rules put the ``layers`` dim of parameters (mesh axis
    ``pipeline``), so the model names no mesh axis. Keys, parameters and their names per layer are
    those of the other stacks: checkpoints are interchangeable. On a mesh without stages the
    microbatches run one after another, with the same results.

    With ``num_repeats`` R each stage holds R groups of layers, stage s the groups s, stages + s,
    2 * stages + s, ..., as ``{"0:4:1": ..., "4:8:1": ...}`` for 8 layers and R = 2. See
    :mod:`axcore.pipelining` for the schedules and :class:`axcore.pipelining.PipelineSchedule` for
    their cost.

    The number of layers must be a multiple of stages x repeats x period: there is no remainder. The
    batch must be a multiple of microbatches x data shards. Calls that use a cache (``prefill``,
    ``decode``) run the layers in order, on all rows.
    """

    class Config(BaseStack.Config):
        """``unroll`` repeats per iteration of the loop inside a stage, as in a scanned stack."""

        # Parts of the batch that go through the pipeline one after another. With more than one,
        # dropout differs from that of the whole batch. Multiples of the stages move least.
        num_microbatches: int = 1
        # Groups of layers in each stage; more make the bubble smaller and messages more frequent.
        num_repeats: int = 1
        unroll: int = 1

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        for name in ("num_microbatches", "num_repeats"):
            if getattr(cfg, name) < 1:
                raise ModuleError(
                    f"{name} is {getattr(cfg, name)}, expected at least 1",
                    code="AX471",
                    where=self._field_path(f"stack.{name}"),
                )
        if cfg.prefix:
            raise ModuleError(
                f"a pipeline has no prefix, got one of {len(cfg.prefix)} layers",
                code="AX470",
                where=self.config_path,
                hint="stages are alike: leave the prefix out, or the pipeline",
            )
        period, repeats = len(self._period), cfg.num_repeats
        self._check_layers(1)
        size = cfg.num_layers // repeats
        self._groups = [
            [
                self._add_layer(f"{start + p}:{start + size}:{period}", start + p)
                for p in range(period)
            ]
            for start in range(0, cfg.num_layers, size)
        ]

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Runs all layers in order."""
        target = self._context.target
        if info.purpose != "train":
            return self._in_order(x, info)
        axes = target.mesh_axes("layers", table="param")
        sizes = {} if target.mesh is None else dict(target.mesh.shape)
        batch_axes = target.mesh_axes("batch")
        self._check_layers(math.prod(sizes[a] for a in axes), axes)
        shards = {a: sizes[a] for a in batch_axes if a not in axes}
        num = self._num_microbatches(x.shape[0], shards)
        if num > 1:
            self._check_shared(x, info)
        rows = {name: _whole_rows(getattr(info, name), x.shape[0]) for name in _ROW_FIELDS}

        def of_microbatch(rows: Mapping[str, Any], shared: Mapping[str, jax.Array]) -> SequenceInfo:
            return dataclasses.replace(info, **rows, shared=shared)

        if not axes:
            return self._one_stage(x, rows, lambda r: of_microbatch(r, info.shared), num)
        period, platform = len(self._period), target.platform

        def repeat(x: jax.Array, rows: Any, shared: Any, values: Any) -> jax.Array:
            for layer, layer_values in zip(self._groups[0], values, strict=True):
                x = self._run_layer(layer, x, of_microbatch(rows, shared), layer_values)
            return x

        return pipeline_layers(
            self._groups,
            repeat,
            x,
            rows,
            dict(info.shared),
            [self._values(slice(p, None, period)) for p in range(period)],
            num_microbatches=num,
            axes=axes,
            rows_by_stage=batch_axes[: len(axes)] == axes,
            constrain=lambda a: target.constrain(
                a, (*(None,) * (a.ndim - len(BETWEEN_BRANCHES)), *BETWEEN_BRANCHES)
            ),
            unroll=self.cfg.unroll,
            wrap=lambda fn: self.cfg.remat.wrap(fn, platform=platform, prevent_cse=False),
        )

    def _one_stage(self, x: jax.Array, rows: Any, info_of: Any, num: int) -> jax.Array:
        """Runs the microbatches one after another, each through all layers."""
        if num == 1 or not self._context.is_training:
            return self._in_order(x, info_of(rows))

        def split(a: jax.Array) -> jax.Array:
            return jnp.swapaxes(a.reshape(-1, num, *a.shape[1:]), 0, 1)

        def step(_: None, micro: Any) -> tuple[None, jax.Array]:
            return None, self._in_order(micro[0], info_of(micro[1]))

        _, ys = transforms.scan(step, None, jax.tree.map(split, (x, rows)))
        return jnp.swapaxes(ys, 0, 1).reshape(x.shape)

    def _in_order(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Scans over the layers of one group after the other."""
        period, platform = len(self._period), self._context.target.platform
        size = self.cfg.num_layers // self.cfg.num_repeats

        for n, group in enumerate(self._groups):

            def repeat(x: jax.Array, values: Any, group: Any = group) -> tuple[jax.Array, None]:
                for layer, layer_values in zip(group, values, strict=True):
                    x = self._run_layer(layer, x, info, layer_values)
                return x, None

            start = n * size
            x, _ = transforms.scan_layers(
                group,
                repeat,
                x,
                [self._values(slice(start + p, start + size, period)) for p in range(period)],
                unroll=self.cfg.unroll,
                wrap=lambda fn: self.cfg.remat.wrap(fn, platform=platform, prevent_cse=False),
            )
        return x

    def _field_path(self, name: str) -> str:
        """Returns the path of a field of the owner, whose fields ``layer`` and ``stack`` are."""
        if not self.config_path:
            return name.removeprefix("stack.")
        owner, _, _ = self.config_path.rpartition(".")
        return f"{owner}.{name}" if owner else name

    def _check_layers(self, stages: int, axes: tuple[str, ...] = ()) -> None:
        """Raises ModuleError unless the layers divide into stages x repeats x period."""
        cfg, period = self.cfg, len(self._period)
        unit = stages * cfg.num_repeats * period
        if cfg.num_layers % unit == 0:
            return
        below = cfg.num_layers // unit * unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        over = f" ({', '.join(axes)})" if axes else ""
        fitting = [n for n in range(1, stages) if cfg.num_layers % (n * unit // stages) == 0]
        fewer = f", or {fitting[-1]} stages" if fitting else ""
        raise ModuleError(
            f"{cfg.num_layers} layers do not divide into {stages} stages{over} x "
            f"{cfg.num_repeats} repeats x {period} layers of the period",
            code="AX470",
            where=self._field_path("num_layers"),
            hint=f"a pipeline has no remainder; nearest that work: {near} layers{fewer}",
        )

    def _num_microbatches(self, batch: int, shards: Mapping[str, int]) -> int:
        """Returns the microbatches of this call.

        Without training nothing depends on their number: as many as the rows allow.

        Raises:
            ModuleError: A microbatch's rows do not divide over the devices.
        """
        num, parts = self.cfg.num_microbatches, math.prod(shards.values())
        if not self._context.is_training and batch % parts == 0:
            return math.gcd(num, batch // parts)
        if batch % (num * parts) == 0:
            return num
        below = batch // (num * parts) * num * parts
        sizes = f"{below} or {below + num * parts}" if below else f"{num * parts}"
        fitting = [n for n in range(1, batch + 1) if batch % (n * parts) == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - num))[:2])
        other = f"num_microbatches {' or '.join(map(str, near))}, or " if near else ""
        over = ", ".join(f"{a}={n}" for a, n in shards.items())
        raise ModuleError(
            f"{batch} rows do not divide into {num} microbatches x {parts} data shards"
            + (f" ({over})" if over else ""),
            code="AX471",
            where=self._field_path("stack.num_microbatches"),
            hint=f"{other}a batch of {sizes} rows in each call (batch_size / accumulation_steps)",
        )

    def _check_shared(self, x: jax.Array, info: SequenceInfo) -> None:
        """Raises ModuleError for shared arrays that look as if they belonged to rows."""
        for name, array in info.shared.items():
            if jnp.shape(array)[:2] == x.shape[:2]:
                raise ModuleError(
                    f"shared array {name!r} of shape {list(jnp.shape(array))} seems to have a "
                    "value for each token, but microbatches all see it whole",
                    code="AX472",
                    where=self.path,
                    hint="put values of tokens into SequenceInfo.token_values",
                )


def _whole_rows(tree: Any, batch: int) -> Any:
    """Writes out arrays that have one row for all."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *jnp.shape(a)[1:])), tree)
