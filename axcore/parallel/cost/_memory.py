"""Bytes on one device by kind, from parameter specs, sharding rules and a mesh shape.

A model of memory, for planning: nothing is traced or compiled, and the mesh may be of any size.
The compiler's own account (:func:`axcore.parallel.compile_step`) is the one to trust where there is
one; ``docs/flops.md`` says how far apart they are.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from axcore.config import FrozenMapping
from axcore.errors import ShardingError
from axcore.layers.kv_cache import init_cache
from axcore.layers.roles import BaseHead, BaseKVCache
from axcore.module import Module, flatten_specs
from axcore.parallel.cost._activations import StackValues, Value, kept, stack_values
from axcore.parallel.cost._model import built
from axcore.parallel.mesh import MeshShape, abstract_mesh
from axcore.parallel.rules import RuleTable, ShardingRules
from axcore.parallel.sharding import partition_spec
from axcore.pipelining import PipelineSchedule

__all__ = [
    "DeviceBytes",
    "MemoryEstimate",
    "Microbatch",
    "kv_cache_bytes",
    "memory_estimate",
]

# Elements of a chunk of logits, and its tokens at least; see ops.linear_cross_entropy.
_CHUNK_LOGITS = 2**24
_CHUNK_TOKENS = 512
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, the largest where devices differ.

    Attributes:
        mesh: Mesh axis -> size.
        parameters: Weights and other state of the model.
        optimizer: State of the learner.
        gradients: Of a step; with accumulation, the sum in float32 and those of a microbatch.
        activations: What the forward pass keeps for the backward pass in device memory.
        workspace: The most that is alive beside it: one layer while it is recomputed and
            differentiated with its gathered weights, or the loss with a chunk of logits.
        host: What is kept in host memory: activations, and the learner's state if it is there.
        activations_by_name: Remat site or value -> its part of ``activations``.
        notes: What had to be assumed.
    """

    mesh: Mapping[str, int]
    parameters: int
    optimizer: int
    gradients: int
    activations: int
    workspace: int
    host: int = 0
    activations_by_name: Mapping[str, int] = field(default_factory=FrozenMapping[int])
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Device memory in all; host memory is not in it."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.workspace

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {
            "mesh": dict(self.mesh),
            "activations_by_name": dict(self.activations_by_name),
            "notes": list(self.notes),
            "total": self.total,
        }
        return fields


def memory_estimate(
    cfg: Any,
    mesh_shape: MeshShape | Mapping[str, int] | None = None,
    *,
    num_devices: int,
    num_slices: int = 1,
    attention: Literal["kernel", "reference"] = "kernel",
    target_len: int | None = None,
) -> MemoryEstimate:
    """Estimates what a training step needs on one device.

    Args:
        cfg: A trainer's config; its rules, remat policies, batch and precision are read.
        mesh_shape: Sizes of the mesh axes; None takes the config's.
        num_devices: Devices in all, of any number.
        num_slices: Slices they are in.
        attention: Whether attention runs in a kernel that stores no weights between queries and
            keys, or in the reference, which stores them for rows below 2,048 tokens.
        target_len: Tokens per row of an encoder-decoder's targets; default ``seq_len``.

    Raises:
        ShardingError: The mesh does not fit the devices, or rules do not fit an array or the batch.
        ConfigError: The config cannot be built.

    Example:
        >>> from axcore import experiments
        >>> small = memory_estimate(experiments.get("tiny-lm"), {"fsdp": 8}, num_devices=8)
        >>> small.parameters
        63680
    """
    model, learner = built(cfg)
    if learner is None:
        raise ShardingError(
            f"expected a trainer's config, got {type(cfg).__qualname__}",
            code="AX467",
            where="memory_estimate",
        )
    shape = cfg.mesh_shape if mesh_shape is None else mesh_shape
    mesh = abstract_mesh(shape, num_devices, num_slices)
    whole = DeviceBytes(mesh, cfg.sharding_rules)
    specs = model.parameter_specs()
    flat = flatten_specs(specs)
    optimizer = _optimizer_specs(learner, specs)
    state = sum(whole.spec("optimizer", s, "optimizer state") for s in optimizer)
    in_host = learner.cfg.state_memory == "host"
    trained = flatten_specs(learner.trainable_specs(specs))
    gradients = sum(whole.spec("param", s, p) for p, s in trained.items())
    if cfg.accumulation_steps > 1:
        gradients += sum(whole.spec("param", s, p, dtype="float32") for p, s in trained.items())
    rows = cfg.batch_size // cfg.accumulation_steps
    step = Microbatch(whole, model, rows, cfg.seq_len, target_len or cfg.seq_len)
    stacks = stack_values(model, attention)
    keeps_weights = attention == "reference" and cfg.seq_len < 2048
    for stack in stacks:
        step.keep(stack, keeps_weights=keeps_weights)
    layer = max((step.layer_workspace(s, flat, keeps_weights) for s in stacks), default=0)
    return MemoryEstimate(
        mesh=FrozenMapping(dict(mesh.shape)),
        parameters=sum(whole.spec("param", s, p) for p, s in flat.items()),
        optimizer=0 if in_host else state,
        gradients=gradients,
        activations=sum(step.by_name.values()),
        workspace=max(layer, step.loss_workspace(flat)),
        host=step.host + (state if in_host else 0),
        activations_by_name=FrozenMapping(step.by_name),
        notes=() if stacks else ("the model has no stack of layers: activations are not known",),
    )


_OPTIMIZER_SPECS: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _optimizer_specs(learner: Any, specs: Any) -> list[Any]:
    """Returns the described arrays of a learner's state; traced once for each learner."""
    if learner not in _OPTIMIZER_SPECS:
        state = learner.state_axes(specs).specs
        _OPTIMIZER_SPECS[learner] = jax.tree_util.tree_leaves(
            state, is_leaf=lambda x: hasattr(x, "axes")
        )
    return _OPTIMIZER_SPECS[learner]


class DeviceBytes:
    """Bytes of arrays on one device of a mesh."""

    def __init__(self, mesh: AbstractMesh, rules: ShardingRules):
        self.mesh = mesh
        self.tables: dict[str, RuleTable] = {
            name: rules.table(name) for name in ("param", "optimizer", "activation", "cache")
        }

    def array(
        self,
        table: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        dtype: str,
        name: str,
        *,
        gathered: tuple[str, ...] = (),
    ) -> int:
        """Returns the bytes of a part; of all parts along the mesh axes ``gathered``."""
        # Only the sizes of its axes are looked at, which an abstract mesh has.
        mesh = cast("Mesh", self.mesh)
        spec = partition_spec(shape, axes, mesh, self.tables[table], name=name)
        size = 1
        for dim, entry in zip(shape, spec, strict=True):
            names = (entry,) if isinstance(entry, str) else tuple(entry or ())
            parts = math.prod(self.mesh.shape[a] for a in names if a not in gathered)
            size *= -(-dim // parts)
        return size * jnp.dtype(dtype).itemsize

    def spec(self, table: str, spec: Any, name: str, *, dtype: str | None = None) -> int:
        """Returns the bytes of a described array, 0 if it lives in host memory."""
        if getattr(spec, "memory", None):
            return 0
        return self.array(table, spec.shape, spec.axes, dtype or spec.dtype, name)


class Microbatch:
    """The activations of one (micro)batch."""

    def __init__(self, whole: DeviceBytes, model: Module, rows: int, seq_len: int, target_len: int):
        self.whole, self.model, self.rows = whole, model, rows
        self.seq_len, self.target_len = seq_len, target_len
        self.has_source = "encoder" in model.children and "decoder" in model.children
        self.by_name: dict[str, int] = {}
        self.host = 0

    def keep(self, stack: StackValues, *, keeps_weights: bool) -> None:
        """Adds what a stack keeps between its forward and its backward pass."""
        for value in stack.values:
            where = kept(value, stack.remat)
            if where == "recomputed" or (value.dims[-1] == -1 and not keeps_weights):
                continue
            size = round(stack.num_layers * self.value(stack, value) * self._staged(stack)[0])
            if where == "host":
                self.host += size
            else:
                self.by_name[value.name] = self.by_name.get(value.name, 0) + size

    def _staged(self, stack: StackValues) -> tuple[float, float]:
        """What a pipeline makes of one device's rows in all layers.

        Returns:
            The share of their values that is kept, idle ticks included, and the share of the rows
            that a stage works on at a time.
        """
        if stack.pipeline is None:
            return 1.0, 1.0
        microbatches, repeats = stack.pipeline
        axes = self.whole.tables["param"].alternatives("layers")[0]
        stages = math.prod(self.whole.mesh.shape.get(axis, 1) for axis in axes)
        batch = self.whole.tables["activation"].alternatives("batch")[0]
        # Rows may be split over the stages' devices outside of the layers; inside they are not.
        inside = stages if set(axes) <= set(batch) else 1
        ticks = PipelineSchedule(stages, microbatches, repeats).num_ticks
        busy = microbatches * repeats
        return inside / stages * ticks / busy, inside / microbatches

    def value(self, stack: StackValues, value: Value) -> int:
        """Returns the bytes of a value of one layer."""
        of_source = value.of_source or stack.path.startswith("encoder/")
        tokens = self.seq_len if of_source or not self.has_source else self.target_len
        dims = tuple(self.seq_len if n == -1 else n for n in value.dims)
        # What has the width between branches may be split there over more mesh axes.
        between = value.axes == ("embed",)
        return round(
            value.copies
            * self.whole.array(
                "activation",
                (self.rows, tokens, *dims),
                ("batch", "residual_seq" if between else "seq", *value.axes),
                value.dtype,
                f"{stack.path} {value.name}",
            )
        )

    def layer_workspace(
        self, stack: StackValues, flat: Mapping[str, Any], keeps_weights: bool
    ) -> int:
        """One layer in its backward pass: its values, their gradients, its gathered weights.

        Two of its values have their gradients at a time, and the gradient of the largest weight is
        whole before it is scattered. What elementwise work keeps for itself is fused in here.
        """
        sizes: list[int] = []
        remade = 0
        for value in stack.values:
            if value.dims[-1] == -1 and not keeps_weights:
                continue
            once = value.product == "none"
            size = self.value(stack, dataclasses.replace(value, copies=1.0) if once else value)
            size = round(size * self._staged(stack)[1])
            sizes.append(size)
            remade += size if kept(value, stack.remat) != "device" else 0
        gradients = sum(sorted(sizes)[-2:])
        gathered = largest = copied = 0
        repeats = stack.pipeline[1] if stack.pipeline else 1
        for path, spec in flat.items():
            if path.startswith(stack.path + "/"):
                # A stage of several groups of layers picks them from a copy of its parameters.
                copied += repeats * self.whole.spec("param", spec, path) if repeats > 1 else 0
                full = self._gathered(path, spec, self._compute_dtype(path))
                mine = self.whole.spec("param", spec, path, dtype=self._compute_dtype(path))
                if full > mine // stack.num_layers:
                    gathered += full
                largest = max(largest, full)
        return remade + gradients + gathered + largest + copied

    def loss_workspace(self, flat: Mapping[str, Any]) -> int:
        """Float32 logits of a chunk and their gradient, the gathered head and its gradient."""
        head = vocab = 0
        for path, module in self.model.walk():
            if not isinstance(module, BaseHead):
                continue
            for name, spec in flat.items():
                if name.rsplit("/", 1)[0] == path and "vocab" in spec.axes and len(spec.shape) > 1:
                    head = max(head, self._gathered(name, spec, "float32"))
                    vocab = max(vocab, spec.shape[spec.axes.index("vocab")])
        if not vocab:
            return 0
        tokens = self.target_len if self.has_source else self.seq_len
        axes = ("batch", "seq", "vocab")
        shape = (self.rows, tokens, vocab)
        logits = self.whole.array("activation", shape, axes, "float32", "logits")
        row = self.whole.array("activation", (vocab,), ("vocab",), "float32", "logits")
        logits = min(logits, max(_CHUNK_LOGITS * _FLOAT32_BYTES, _CHUNK_TOKENS * row))
        dim = self.model.cfg.model_dim
        hidden = self.whole.array(
            "activation",
            (self.rows, tokens, dim),
            ("batch", "seq", "embed"),
            "float32",
            "hidden states",
        )
        return 2 * (logits + head + hidden)

    def _gathered(self, path: str, spec: Any, dtype: str) -> int:
        """Bytes of one layer of a parameter when the axes that shard weights only are gathered."""
        dims = spec.num_stacked
        return self.whole.array(
            "param",
            spec.shape[dims:],
            spec.axes[dims:],
            dtype,
            path,
            gathered=("data", "fsdp", "pipeline"),
        )

    def _compute_dtype(self, path: str) -> str:
        parts = path.split("/")
        module: Module = self.model
        for part in parts[:-1]:
            module = module.children.get(part, module)
        return getattr(module, "compute_dtype", "float32")


def kv_cache_bytes(
    model: Any,
    mesh_shape: MeshShape | Mapping[str, int],
    *,
    num_devices: int,
    batch: int,
    max_len: int,
    rules: ShardingRules | None = None,
) -> int:
    """Returns the bytes of the decoding caches on one device.

    Args:
        model: A trainer's or model's config, or a module.
        mesh_shape: Sizes of the mesh axes.
        num_devices: Devices in all.
        batch: Rows that are decoded together.
        max_len: Most tokens a row can hold.
        rules: Sharding rules; None takes the trainer's, or the defaults.

    Raises:
        ShardingError: The mesh does not fit the devices, or the caches do not divide.
    """
    module, _ = built(model, max_len)
    chosen: ShardingRules = rules or getattr(model, "sharding_rules", ShardingRules())
    whole = DeviceBytes(abstract_mesh(mesh_shape, num_devices), chosen)
    axes_of = {
        path: child.cfg.axes for path, child in module.walk() if isinstance(child, BaseKVCache)
    }
    shapes = jax.eval_shape(lambda: init_cache(module, batch, max_len))
    total = 0
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        owner, _, name = path.rpartition("/")
        dims = len(leaf.shape)
        named = axes_of.get(owner, {}).get(name, ())
        # (layers..., batch, *axes but the last, slots, last), as the contiguous cache has them.
        lead = dims - (len(named) + 2 if named else 1)
        axes = (*(None,) * lead, "batch", *named[:-1], "seq", named[-1]) if named else ()
        if not named:
            lead = next((n for n, size in enumerate(leaf.shape) if size == batch), 0)
            axes = (*(None,) * lead, "batch", *(None,) * (dims - lead - 1))
        total += whole.array("cache", leaf.shape, axes, str(leaf.dtype), path)
    return total
