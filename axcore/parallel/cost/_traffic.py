"""The collectives of a training step, from parameter specs, activation sizes and rules.

A mesh axis that splits tokens (rows or positions) and a parameter makes the parameter be gathered
before use and its gradient scattered; one that splits tokens alone makes the gradient be reduced;
one that splits a parameter alone keeps it split, and its product is reduced (tensor parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from axcore.layers import BaseAttention, CrossAttention
from axcore.layers.roles import BaseEmbedding, BaseHead
from axcore.layers.stack import BaseStack
from axcore.module import Module, ParameterSpec, flatten_specs
from axcore.parallel.axes import LOGICAL_AXES, axis_line
from axcore.parallel.cost._model import attention_dims, experts_per_token
from axcore.parallel.cost._network import CollectiveKind
from axcore.parallel.cost._recompute import projection_recompute
from axcore.parallel.rules import RuleTable, ShardingRules
from axcore.parallel.sharding import partition_spec
from axcore.parallel.traits import expert_dim
from axcore.pipelining import PipelineSchedule
from axcore.remat import Remat

__all__ = ["Pass", "Split", "Traffic", "Transfer"]

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind in one microbatch.

    Attributes:
        kind: Which collective.
        axes: Mesh axes it runs over.
        num_bytes: Of each, as :meth:`Network.seconds` takes them.
        count: How many run, one after another.
        phase: Pass that it belongs to.
        hides_behind: ``compute`` may run beside everything else of its pass, ``attention`` beside
            attention's products; ``nothing`` has to be waited for.
        reason: What it is for.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    num_bytes: float
    count: float
    phase: Pass
    hides_behind: Literal["compute", "attention", "nothing"]
    reason: str


@dataclass(frozen=True)
class Split:
    """How an array is split.

    Attributes:
        gathered: Mesh axes that are gathered before use: they split tokens too.
        kept: Mesh axes that stay split.
        dispatched: Mesh axes over which tokens travel to the weights, as to experts.
        parts: Parts in all.
    """

    gathered: tuple[str, ...]
    kept: tuple[str, ...]
    dispatched: tuple[str, ...]
    parts: int


class Traffic:
    """Everything that travels in one microbatch.

    Args:
        model: The model.
        mesh: Mesh of any size.
        rules: Sharding rules.
        rows: Rows of a microbatch.
        seq_len: Tokens per row.
        trained: Paths of trained parameters.
        kernels: Attention implementations that the config accepts, best first.
    """

    def __init__(
        self,
        model: Module,
        mesh: AbstractMesh,
        rules: ShardingRules,
        rows: int,
        seq_len: int,
        trained: Iterable[str],
        kernels: tuple[str, ...] = (),
    ):
        self.model, self.mesh = model, mesh
        self.rows, self.seq_len, self.kernels = rows, seq_len, kernels
        self.params, self.activations = rules.table("param"), rules.table("activation")
        self.modules: dict[str, Module] = dict(model.walk())
        self.specs: dict[str, ParameterSpec] = {
            p: s for p, s in flatten_specs(model.parameter_specs()).items() if s.kind == "parameter"
        }
        self.trained = frozenset(trained)
        tokens = self._parts((rows, seq_len), ("batch", "seq"), self.activations)
        self.batch_axes, self.seq_axes = tokens
        self.token_axes = self.batch_axes + self.seq_axes
        self.tokens = rows * seq_len / self.size(self.token_axes)
        self.pipeline = self._pipeline()
        # Inside stages each device sees the rows of all stages, wherever they are outside.
        self.stage_axes = tuple(a for a in self.token_axes if a != "pipeline")
        if self.pipeline is None:
            self.stage_axes = self.token_axes
        self.stage_tokens = rows * seq_len / self.size(self.stage_axes)
        self.notes: dict[str, None] = {}

    def size(self, axes: Iterable[str]) -> int:
        """Returns the devices along some mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def transfers(self) -> list[Transfer]:
        """Returns all collectives of a microbatch."""
        found: list[Transfer] = []
        for path, spec in self.specs.items():
            found += self._weight(path, spec)
        for path, module in self.modules.items():
            if isinstance(module, BaseAttention) and not isinstance(module, CrossAttention):
                found += self._context(path, module)
        found += self._permutes()
        return [t for t in found if self.size(t.axes) > 1 and t.count]

    # -- how arrays are split --------------------------------------------------------------

    def _parts(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], table: RuleTable
    ) -> list[tuple[str, ...]]:
        """Returns the mesh axes of each dim."""
        # Only the sizes of its axes are looked at, which an abstract mesh has.
        spec = partition_spec(shape, axes, cast("Mesh", self.mesh), table, name="cost")
        return [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]

    def parts_of(self, size: int, axis: str) -> tuple[str, ...]:
        """Returns the mesh axes that a dim of activations is split over."""
        return self._parts((size,), (axis,), self.activations)[0]

    def split(self, spec: ParameterSpec) -> Split:
        """Returns how a parameter of one layer is split."""
        dims = self._parts(spec.shape, spec.axes, self.params)
        experts: tuple[str, ...] = ()
        if expert_dim(spec) is not None:
            experts = next(
                (d for d, a in zip(dims, spec.axes, strict=True) if _is_like(a, "experts")), ()
            )
        stages = self.is_staged(spec)
        used = [a for n, d in enumerate(dims) if not (stages and n < spec.num_stacked) for a in d]
        gathered = tuple(a for a in used if a not in experts and self._is_gathered(a))
        kept = tuple(a for a in used if a not in experts and a not in gathered)
        return Split(gathered, kept, experts, self.size(a for d in dims for a in d))

    def _is_gathered(self, axis: str) -> bool:
        # Layers over an axis without a pipeline are only stored there.
        return axis in self.token_axes or axis == "pipeline"

    def is_staged(self, spec: ParameterSpec) -> bool:
        """Tells whether a parameter is one of a pipeline's stages."""
        return self.pipeline is not None and spec.num_stacked > 0

    def _pipeline(self) -> PipelineSchedule | None:
        stages = self.mesh.shape.get("pipeline", 1)
        for module in self.modules.values():
            microbatches = getattr(module.cfg, "num_microbatches", None)
            if isinstance(module, BaseStack) and isinstance(microbatches, int) and stages > 1:
                return PipelineSchedule(stages, microbatches, getattr(module.cfg, "num_repeats", 1))
        return None

    # -- parameters ------------------------------------------------------------------------

    def _line(self, path: str) -> list[tuple[str, Module]]:
        parts = path.split("/")
        paths = ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]
        return [(p, self.modules[p]) for p in paths if p in self.modules]

    def _weight(self, path: str, spec: ParameterSpec) -> Iterator[Transfer]:
        line = self._line(path)
        owner = line[0][1]
        split = self.split(spec)
        # A stage holds and gathers its own layers only.
        layers = math.prod(spec.shape[: spec.num_stacked])
        runs = layers
        if self.pipeline is not None and self.is_staged(spec):
            layers = max(layers // self.pipeline.num_stages, 1)
            # A stage uses its weights anew for each part of the batch.
            runs = layers * self.pipeline.num_microbatches
        each = spec.shape[spec.num_stacked :]
        item = jnp.dtype(getattr(owner, "compute_dtype", spec.dtype)).itemsize
        whole = math.prod(each) * item / self.size((*split.kept, *split.dispatched))
        name = path.rsplit("/", 1)[0]
        if split.gathered:
            for phase, count in _passes(runs, runs):
                yield Transfer(
                    "all_gather", split.gathered, whole, count, phase, "compute", f"{name} weights"
                )
        if path in self.trained:
            if split.gathered:
                yield Transfer(
                    *("reduce_scatter", split.gathered, whole, runs, "backward", "compute"),
                    f"{name} gradients",
                )
            tokens = self.stage_axes if self.is_staged(spec) else self.token_axes
            rest = tuple(a for a in tokens if a not in (*split.gathered, *split.dispatched))
            if rest:
                part = whole / self.size(split.gathered)
                yield Transfer(
                    *("all_reduce", rest, part, runs, "backward", "compute"), f"{name} gradients"
                )
        if split.dispatched and any(_is_like(spec.axes[d], "mlp") for d in spec.fan_in_dims):
            yield from self._experts(name, spec, split, line, layers)
        yield from self._tensor(name, spec, split, line, layers)

    def _tensor(
        self, name: str, spec: ParameterSpec, split: Split, line: Any, layers: int
    ) -> Iterator[Transfer]:
        """Sums over parts of a product: of the output forward, of the input's gradient backward.

        One weight of each branch sums forward (its inputs are split), and the branch's input gets
        one sum backward; both have the width between layers.
        """
        owner = line[0][1]
        dims = self._parts(spec.shape, spec.axes, self.params)
        summed = tuple(a for d in spec.fan_in_dims for a in dims[d] if a in split.kept)
        item = jnp.dtype(getattr(owner, "compute_dtype", spec.dtype)).itemsize
        is_lookup = isinstance(owner, BaseEmbedding)
        is_head = not is_lookup and isinstance(owner, BaseHead)
        width = 0
        if summed:
            width = math.prod(spec.shape[d] for d in spec.fan_out_dims)
        elif is_lookup or is_head:
            wide = [d for d, a in enumerate(spec.axes) if _is_like(a, "vocab")]
            summed = tuple(a for d in wide for a in dims[d] if a in split.kept)
            if wide and len(spec.shape) - spec.num_stacked >= 2:
                width = math.prod(spec.shape) // spec.shape[wide[0]]
        if not summed or not width:
            return
        copies = 1.0
        if expert_dim(spec) is not None:
            copies = experts_per_token(m for _, m in line) or 1.0
        tokens = self.stage_tokens if self.is_staged(spec) else self.tokens
        size = tokens * width * item * copies
        kinds: tuple[CollectiveKind, ...] = ("all_reduce",)
        if "residual_seq" in LOGICAL_AXES:
            splits = self.activations.alternatives("residual_seq")[0]
            if set(summed) <= set(splits):
                kinds = ("reduce_scatter", "all_gather")
        forward = 0.0 if is_head else 1.0
        # A table that is the head too gets the head's sum; the rows of its parts are nobody else's.
        backward = float(not is_lookup or not self._has_own_head())
        if not (is_lookup or is_head):
            backward += projection_recompute(line, _remat(line))
        for kind in kinds:
            for phase, count in _passes(forward, backward):
                yield Transfer(
                    *(kind, summed, size, count * layers, phase, "nothing"),
                    f"{name} {'output' if phase == 'forward' else 'input gradients'}",
                )

    def _has_own_head(self) -> bool:
        return any(
            isinstance(m, BaseHead) and not isinstance(m, BaseEmbedding)
            for m in self.modules.values()
        )

    def assigned(self) -> Iterator[tuple[float, bool]]:
        """Yields what experts get on one device in all layers, bytes, and whether it is remade."""
        for path, spec in self.specs.items():
            is_down = any(_is_like(spec.axes[d], "mlp") for d in spec.fan_in_dims)
            if expert_dim(spec) is None or not is_down:
                continue
            line = self._line(path)
            layers = math.prod(spec.shape[: spec.num_stacked])
            if self.pipeline is not None and self.is_staged(spec):
                layers = max(layers // self.pipeline.num_stages, 1)
            width = math.prod(spec.shape[d] for d in spec.fan_out_dims)
            item = jnp.dtype(getattr(line[0][1], "compute_dtype", spec.dtype)).itemsize
            copies = experts_per_token(m for _, m in line) or 1.0
            remat = _remat(line)
            size = layers * self.stage_tokens * copies * width * item
            yield size, remat is not None and remat.enabled

    def _experts(
        self, name: str, spec: ParameterSpec, split: Split, line: Any, layers: int
    ) -> Iterator[Transfer]:
        """Tokens go to their experts and come back, in both passes.

        Both ways once more where they are recomputed: the gradient of a gate needs the result that
        came back. Every part of an expert gets the tokens whole.
        """
        chosen = experts_per_token(m for _, m in line) or 1.0
        width = math.prod(spec.shape[d] for d in spec.fan_out_dims)
        item = jnp.dtype(getattr(line[0][1], "compute_dtype", spec.dtype)).itemsize
        dims = self._parts(spec.shape, spec.axes, self.params)
        wide = [a for d in spec.fan_out_dims for a in dims[d] if a in split.kept]
        size = self.stage_tokens * chosen * width * item / self.size(wide)
        remat = _remat(line)
        again = 2.0 if remat is not None and remat.enabled else 0.0
        for phase, count in _passes(2.0, 2.0 + again):
            yield Transfer(
                *("all_to_all", split.dispatched, size, count * layers, phase, "nothing"),
                f"{name} tokens",
            )

    # -- activations -----------------------------------------------------------------------

    def _context(self, path: str, module: Module) -> Iterator[Transfer]:
        """Keys and values of the other parts of a row."""
        dims = attention_dims(module)
        if dims is None or self.size(self.seq_axes) == 1:
            return
        num_heads, key_dim, value_dim = dims
        kv_heads = getattr(module.cfg, "num_kv_heads", None) or num_heads
        layers = self._layers(path)
        item = jnp.dtype(getattr(module, "compute_dtype", "float32")).itemsize
        heads = self._parts((num_heads,), ("heads",), self.activations)[0]
        shared = self._parts((kv_heads,), ("kv_heads",), self.activations)[0]
        queries = self.stage_tokens * num_heads * (key_dim + value_dim) * item / self.size(heads)
        keys = self.stage_tokens * kv_heads * (key_dim + value_dim) * item / self.size(shared)
        n, axes = self.size(self.seq_axes), self.seq_axes
        how = next((k for k in self.kernels if k in ("ring", "all_to_all")), "gather")
        again = float((remat := _remat(self._line(path))) is not None and remat.enabled)
        if how == "ring":
            # Backward, keys and values go around once more, and their gradients with them.
            for phase, times in _passes(1.0, 2.0 + again):
                yield Transfer(
                    *("permute", axes, keys, times * (n - 1) * layers, phase, "attention"),
                    f"{path} keys and values",
                )
        elif how == "all_to_all":
            for phase, times in _passes(1.0, 1.0 + again):
                yield Transfer(
                    *("all_to_all", axes, queries + keys, times * layers, phase, "nothing"),
                    f"{path} heads for positions",
                )
        else:
            for phase, times in _passes(1.0, again):
                yield Transfer(
                    *("all_gather", axes, keys * n, times * layers, phase, "nothing"),
                    f"{path} keys and values",
                )
            yield Transfer(
                *("reduce_scatter", axes, keys * n, layers, "backward", "nothing"),
                f"{path} gradients of keys and values",
            )

    def _permutes(self) -> Iterator[Transfer]:
        """What a stage hands to the next one."""
        if self.pipeline is None:
            return
        width = getattr(self.model.cfg, "model_dim", 0)
        item = jnp.dtype(getattr(self.model, "compute_dtype", "float32")).itemsize
        size = self.stage_tokens * width * item / self.pipeline.num_microbatches
        count = self.pipeline.num_microbatches * self.pipeline.num_repeats
        for phase, times in _passes(count, count):
            yield Transfer("permute", ("pipeline",), size, times, phase, "nothing", "stages")

    def _layers(self, path: str) -> int:
        counts = (m.layers for _, m in self._line(path))
        layers = math.prod(len(n) for n in counts if isinstance(n, range))
        return max(layers // self.pipeline.num_stages, 1) if self.pipeline else layers


def _passes(forward: float, backward: float) -> tuple[tuple[Pass, float], tuple[Pass, float]]:
    return ("forward", forward), ("backward", backward)


def _remat(line: list[tuple[str, Module]]) -> Remat | None:
    return next((m.cfg.remat for _, m in line[1:] if isinstance(m, BaseStack)), None)


def _is_like(axis: str | None, name: str) -> bool:
    return axis is not None and name in {link.name for link in axis_line(axis)}
