"""Stacks of layers: one contract, several executions.

A stack is a period (a tuple of layer configs) repeated, plus a remainder; layers of their own may
come first. ``StackedTransformer`` unrolls it; ``RepeatedTransformer`` scans over the repeats with
stacked state; ``PipelinedTransformer`` divides them into stages. Layer ``i`` has the same name
(``layer/i``), keys, parameters and results in all; see :mod:`axcore.module`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axcore import transforms
from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers.base import Layer
from axcore.layers.roles import BaseTransformerLayer, SequenceInfo
from axcore.remat import Remat

__all__ = ["BaseStack", "RepeatedTransformer", "StackedTransformer"]


class BaseStack(Layer):
    """``forward(x: (batch, seq, input_dim), info) -> same shape`` through ``num_layers`` layers."""

    class Config(Layer.Config):
        """The decoder sets all but ``remat`` and ``layer_values``."""

        input_dim: Required[int] = REQUIRED
        num_layers: Required[int] = REQUIRED
        # One layer, or the layers of a period.
        layer: Required[BaseTransformerLayer.Config | tuple[BaseTransformerLayer.Config, ...]] = (
            REQUIRED
        )
        # Layers before the first period, the first ones of num_layers.
        prefix: tuple[BaseTransformerLayer.Config, ...] = ()
        # What each layer recomputes in the backward pass.
        remat: Remat = Remat()
        # Scalars that differ by layer without changing its structure, num_layers of each.
        layer_values: Mapping[str, tuple[float, ...]] = {}

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._period = cfg.layer if isinstance(cfg.layer, tuple) else (cfg.layer,)
        if cfg.num_layers < 1 or not self._period:
            raise ModuleError(
                f"a stack needs layers, got num_layers {cfg.num_layers} and a period of "
                f"{len(self._period)}",
                code="AX343",
                where=self.config_path,
            )
        self._first = len(cfg.prefix)
        if self._first > cfg.num_layers:
            raise ModuleError(
                f"a prefix of {self._first} layers in a stack of num_layers {cfg.num_layers}",
                code="AX343",
                where=self.config_path,
                hint="num_layers counts the prefix too",
            )
        for name, values in cfg.layer_values.items():
            if len(values) != cfg.num_layers:
                raise ModuleError(
                    f"layer_values[{name!r}] has {len(values)} values for {cfg.num_layers} layers",
                    code="AX343",
                    where=self.config_path,
                )

    @abc.abstractmethod
    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Runs all layers in order."""

    def _layer_config(self, index: int) -> tuple[BaseTransformerLayer.Config, str]:
        """Returns the config of layer ``index`` and its path from the root config."""
        path = self.config_path
        if index < self._first:
            # The owner's field beside that of the layers, which this path is of.
            owner, _, _ = path.rpartition(".")
            field = f"prefix.{index}"
            return self.cfg.prefix[index], f"{owner}.{field}" if owner else field
        position = (index - self._first) % len(self._period)
        if isinstance(self.cfg.layer, tuple):
            path = f"{path}.{position}" if path else str(position)
        return self._period[position], path

    def _check_stages(self, info: SequenceInfo) -> None:
        """Raises ModuleError where devices would repeat each other's work.

        A mesh axis on which the layers lie and the batch does not is one of pipeline stages.
        """
        target = self._context.target
        if target.mesh is None or info.purpose != "train":
            return
        batch = target.mesh_axes("batch")
        idle = [a for a in target.mesh_axes("layers", table="param") if a not in batch]
        if idle:
            over = ", ".join(f"{axis}={target.mesh.shape[axis]}" for axis in idle)
            name = type(self).__name__
            raise ModuleError(
                f"the mesh has pipeline stages ({over}), but {name} runs every layer everywhere",
                code="AX473",
                where=self.config_path or self.path,
                hint="--modifier pipeline:num_microbatches=N makes stages of the layers; or set "
                "mesh_shape without that axis; or let it split the batch too (activation_rules "
                f"batch=({', '.join(map(repr, (*idle, *batch)))},)): each device then gathers the "
                "layers one by one",
            )

    def _add_layer(self, name: str, index: int) -> BaseTransformerLayer:
        cfg, path = self._layer_config(index)
        return self._add_child(
            name, cfg, BaseTransformerLayer, input_dim=self.cfg.input_dim, config_path=path
        )

    def _values(self, index: int | slice) -> dict[str, Any]:
        """Returns the per-layer values of a layer, or of a slice of layers as arrays."""
        return {n: jnp.asarray(v[index]) for n, v in self.cfg.layer_values.items()}

    def _run_layer(
        self, layer: BaseTransformerLayer, x: jax.Array, info: SequenceInfo, values: Mapping
    ) -> jax.Array:
        return layer(x, dataclasses.replace(info, layer_values=values))

    def _run_alone(
        self, layer: BaseTransformerLayer, index: int, x: jax.Array, info: SequenceInfo
    ) -> jax.Array:
        """Runs one layer outside of a scan, rematerialized as the config says."""
        values = self._values(index)
        remat = self.cfg.remat

        def run(x: jax.Array) -> jax.Array:
            return self._run_layer(layer, x, info, values)

        if remat.enabled:
            policy = remat.jax_policy(self._context.target.platform)
            run = transforms.remat(run, policy=policy)
        return run(x)


class StackedTransformer(BaseStack):
    """Layers one after the other, each with its own state ``{"0": ..., "1": ...}``."""

    class Config(BaseStack.Config):
        """No further fields."""

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._layers = [self._add_layer(str(i), i) for i in range(cfg.num_layers)]

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Runs all layers in order."""
        self._check_stages(info)
        for i, layer in enumerate(self._layers):
            x = self._run_alone(layer, i, x, info)
        return x


class RepeatedTransformer(BaseStack):
    """A scan over the repeats of the period; the prefix runs before and the remainder after it.

    State: ``{"0:8:2": stacked, "1:8:2": stacked, "8": ...}`` for 9 layers of period 2, and
    ``{"0": ..., "1:9:1": stacked}`` for 9 of period 1 with a prefix of one. Compile time does not
    grow with depth.
    """

    class Config(BaseStack.Config):
        """``unroll`` repeats per loop iteration trade compile time for overlap."""

        unroll: int = 1

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        period = len(self._period)
        first = self._first
        end = first + (cfg.num_layers - first) // period * period
        self._scanned = end
        self._before = [self._add_layer(str(i), i) for i in range(first)]
        starts = range(first, first + period if end > first else first)
        self._templates = [self._add_layer(f"{p}:{end}:{period}", p) for p in starts]
        self._rest = [self._add_layer(str(i), i) for i in range(end, cfg.num_layers)]

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Runs all layers in order."""
        self._check_stages(info)
        period = len(self._period)
        platform = self._context.target.platform

        def repeat(x: jax.Array, values: list[Mapping[str, jax.Array]]) -> tuple[jax.Array, None]:
            for layer, layer_values in zip(self._templates, values, strict=True):
                x = self._run_layer(layer, x, info, layer_values)
            return x, None

        for i, layer in enumerate(self._before):
            x = self._run_alone(layer, i, x, info)
        if self._templates:
            values = [
                self._values(slice(self._first + p, self._scanned, period)) for p in range(period)
            ]
            x, _ = transforms.scan_layers(
                self._templates,
                repeat,
                x,
                values,
                unroll=self.cfg.unroll,
                # Inside a scan the loop itself keeps XLA from merging the two computations.
                wrap=lambda fn: self.cfg.remat.wrap(fn, platform=platform, prevent_cse=False),
            )
        for i, layer in enumerate(self._rest, start=self._scanned):
            x = self._run_alone(layer, i, x, info)
        return x
