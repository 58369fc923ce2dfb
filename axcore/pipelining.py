"""Pipelines over children: stages on devices of their own, microbatches that move through them.

A schedule is a loop over *ticks*. In each tick every stage runs one group of layers on one
microbatch and hands the result to the next stage (a collective-permute). With one repeat this is
GPipe (Huang et al., arXiv:1811.06965); with R repeats each stage holds R groups of layers and a
microbatch goes round the ring R times (the interleaved schedule of Narayanan et al.,
arXiv:2104.04473, section 2.2), which fills and empties a pipeline R times as short.

Only the mesh axes of the stages are taken over by hand (``shard_map`` over those axes). What the
layers say of batch, sequence and tensor dims holds inside as it does outside, a stage has its own
parameters by construction, and picking one of its groups or a microbatch's data moves nothing.

Inputs that wait and outputs that are done lie spread over the stages: a stage stores ``1 / stages``
of the microbatches. They move one stage down whenever their column is used, so that the first stage
finds each input when its turn comes; the last stage puts outputs into the places that inputs left.
The outputs come to rest where their inputs were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from axcore import transforms
from axcore.collection import KINDS, OutputCollection, merge, neutral, reduce_leading
from axcore.context import InvocationContext, current_context
from axcore.errors import ModuleError
from axcore.module import Module

__all__ = ["PipelineSchedule", "pipeline_layers"]

# ``(x, rows, whole, values) -> x``: one repeat of the layers; see pipeline_layers.
RepeatFn = Callable[[Any, Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Who does what when.

    Microbatches enter in groups of ``num_stages``; each group goes round ``num_repeats`` times
    before the next one enters.

    Attributes:
        num_stages: Stages, each on its own devices.
        num_microbatches: Microbatches, any number.
        num_repeats: Groups of layers that each stage holds; 1 is GPipe.

    Example:
        >>> PipelineSchedule(num_stages=4, num_microbatches=8).num_ticks
        11
        >>> PipelineSchedule(num_stages=4, num_microbatches=8, num_repeats=2).bubble_fraction
        0.15789473684210525
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int = 1

    @property
    def num_columns(self) -> int:
        """Microbatches that a stage stores while they wait or are done."""
        return -(-self.num_microbatches // self.num_stages)

    @property
    def num_ticks(self) -> int:
        """Ticks until the last microbatch is done.

        ``num_microbatches * num_repeats + num_stages - 1`` when the stages divide the microbatches,
        or with one repeat; otherwise the last, smaller group leaves gaps on its round trips.
        """
        last = self.num_microbatches - (self.num_columns - 1) * self.num_stages
        return self.num_columns * self.num_stages * self.num_repeats + last - 1

    @property
    def bubble_fraction(self) -> float:
        """Share of a stage's ticks in which it has nothing to do."""
        return 1 - self.num_microbatches * self.num_repeats / self.num_ticks

    def homes(self) -> np.ndarray:
        """Returns int (num_microbatches,): ``stage * num_columns + column`` of each output."""
        m = np.arange(self.num_microbatches)
        moves = (self.num_microbatches - 1 - m) // self.num_columns
        column = (m + self.num_stages - 1) % self.num_columns
        return (self.num_stages - 1 - moves) * self.num_columns + column


def pipeline_layers(
    groups: Sequence[Sequence[Module]],
    fn: RepeatFn,
    x: jax.Array,
    rows: Any,
    whole: Any,
    values: Any,
    *,
    num_microbatches: int,
    axes: tuple[str, ...],
    rows_by_stage: bool = False,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
    unroll: int = 1,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> jax.Array:
    """Runs stacked layers as a pipeline; ``fn`` calls the children of ``groups[0]`` as one repeat.

    Args:
        groups: ``num_repeats`` groups in the order of their layers, each with one module per
            position of the period, named ``a:b:c``; all of one length, divisible by the stages.
        fn: ``(x, rows, whole, values) -> x`` for one microbatch and one repeat of the period.
        x: (batch, ...).
        rows: Pytree of arrays of shape (batch, ...) that go with their rows.
        whole: Pytree of arrays that all microbatches see whole.
        values: Pytree of arrays with a leading dim of all repeats of the period, in order.
        num_microbatches: Divides the batch. Each one has keys of its own if there are several.
        axes: Mesh axes of the stages, which split the leading dim of the layers' parameters.
        rows_by_stage: Whether the stages' axes are the outermost that split the batch; rows then
            wait on the devices that they come from. The deal differs: each stage deals its own.
        constrain: Applied to (..., microbatch, ...) arrays like ``x`` inside of the pipeline.
        unroll: Repeats per iteration of the loop inside a stage.
        wrap: Applied to the pure function of one repeat, such as ``jax.checkpoint``.

    Returns:
        The output, like ``x``. What layers collect stays stacked under their names; over the
        microbatches it is combined by each entry's reduction.

    Raises:
        ModuleError: No module call is running.
    """
    ctx = current_context()
    if ctx is None or ctx.target.mesh is None:
        raise ModuleError("pipeline_layers needs a running module call on a mesh", code="AX330")
    mesh = ctx.target.mesh
    stages = math.prod(mesh.shape[axis] for axis in axes)
    plan = PipelineSchedule(stages, num_microbatches, len(groups))
    deal = _Deal(plan, by_stage=rows_by_stage)
    staged = PartitionSpec(axes)
    children = groups[0]
    prefixes = tuple(_prefix(ctx, child) for child in children)

    # Everything has a leading dim of the stages, so that no derivative is summed inside.
    inputs = {
        "stage": jnp.arange(stages),
        "waiting": deal.split(x),
        "rows": jax.tree.map(lambda a: _on_each(deal.flat(a), stages), rows),
        "whole": jax.tree.map(lambda a: _on_each(a, stages), whole),
        "groups": [[ctx.state.get(child.name, {}) for child in group] for group in groups],
        "numbers": [[jnp.asarray(child.layers) for child in group] for group in groups],
        "values": _by_group(values, len(groups)),
    }
    body = transforms._Body(
        lambda micro, rows, whole, stacked, values: transforms.scan_layers(
            children,
            lambda carry, v: (fn(carry, rows, whole, v), None),
            micro,
            values,
            unroll=unroll,
            wrap=wrap,
            stacked=stacked,
        )[0]
    )

    def run(local: Any) -> Any:
        local = dict(local)
        for name in ("stage", "waiting", "rows", "whole"):
            local[name] = jax.tree.map(lambda a: a[0], local[name])
        outputs, collected = _Stage(plan, axes, body, local, constrain, prefixes)()
        return outputs[None], jax.tree.map(lambda a: a[None], collected)

    mapped: Any = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(staged,),
        out_specs=(staged, staged),
        axis_names=set(axes),
        check_vma=False,
    )
    outputs, collected = mapped(inputs)
    body.finish(_by_name(ctx, collected, groups))
    return deal.join(outputs)


@dataclasses.dataclass(frozen=True)
class _Deal:
    """How the rows of a batch are dealt to microbatches, and where these wait."""

    plan: PipelineSchedule
    by_stage: bool

    def flat(self, x: jax.Array) -> jax.Array:
        """(batch, ...) -> (slots, rows, ...): slot m has microbatch m, slots too many repeat."""
        waiting = self.split(x)
        return waiting.reshape(-1, *waiting.shape[2:])

    def split(self, x: jax.Array) -> jax.Array:
        """(batch, ...) -> (stages, columns, rows, ...)."""
        stages, columns, num = self.plan.num_stages, self.plan.num_columns, self._num
        rows = x.shape[0] // num
        if num % stages:
            # Row r goes to microbatch r mod num.
            x = jnp.swapaxes(x.reshape(rows, num, *x.shape[1:]), 0, 1)
            x = jnp.take(x, np.arange(stages * columns) % num, axis=0)
            return x.reshape(stages, columns, *x.shape[1:])
        # The same without a step in which a dim is neither the stages' nor the rows'.
        if self.by_stage:
            return jnp.swapaxes(x.reshape(stages, rows, columns, *x.shape[1:]), 1, 2)
        return jnp.moveaxis(x.reshape(rows, stages, columns, *x.shape[1:]), 0, 2)

    def join(self, outputs: jax.Array) -> jax.Array:
        """Outputs where they came to rest, (stages, columns, rows, ...) -> (batch, ...)."""
        stages, columns, num = self.plan.num_stages, self.plan.num_columns, self._num
        shape = outputs.shape[2:]
        if num % stages:
            x = outputs.reshape(-1, *shape)
            x = jnp.swapaxes(jnp.take(x, self.plan.homes(), axis=0), 0, 1)
        else:
            x = jnp.roll(outputs, -((stages - 1) % columns), axis=1)
            x = jnp.swapaxes(x, 1, 2) if self.by_stage else jnp.moveaxis(x, 2, 0)
        return x.reshape(num * shape[0], *shape[1:])

    @property
    def _num(self) -> int:
        return self.plan.num_microbatches


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The program of one stage: the loop over ticks."""

    plan: PipelineSchedule
    axes: tuple[str, ...]
    body: Any
    inputs: dict[str, Any]
    constrain: Callable[[jax.Array], jax.Array]
    prefixes: tuple[str, ...]

    def __call__(self) -> tuple[jax.Array, OutputCollection]:
        """Returns this stage's (columns, rows, ...) of outputs and what its layers collected."""
        waiting = self.constrain(self.inputs["waiting"])
        groups = self.inputs["groups"]
        # A copy of the stage's parameters, so that one index picks a group of them.
        stacked = jax.tree.map(lambda *g: jnp.stack(g), *groups) if len(groups) > 1 else groups[0]
        numbers = jax.tree.map(lambda *n: jnp.stack(n), *self.inputs["numbers"])
        values = jax.tree.map(lambda *v: jnp.stack(v), *self.inputs["values"])
        # A stage with nothing to do yet works on rows of its own, not on zeros: what it makes is
        # dropped, and the derivative of a layer at zero may be infinite.
        idle = waiting[0]
        first = jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(
            lambda w, s: self._layers(w, first, first, s, (numbers, values)), idle, stacked
        )[1]
        start = shapes.map_entries(self._empty)

        def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
            return self._tick(carry, t, stacked, (numbers, values)), None

        ticks = jnp.arange(self.plan.num_ticks, dtype=jnp.int32)
        (_, outputs, collected), _ = jax.lax.scan(step, (idle, waiting, start), ticks)
        return outputs, collected

    def _tick(self, carry: Any, t: jax.Array, stacked: Any, by_repeat: Any) -> Any:
        arriving, waiting, collected = carry
        plan, stage = self.plan, self.inputs["stage"]
        stages, trip = plan.num_stages, plan.num_stages * plan.num_repeats
        # A group's inputs are taken in its first `stages` ticks. Its outputs come one tick before
        # the next group's inputs are taken, so both share one clock, which rests in between.
        phase = t % trip
        column = (t // trip * stages + jnp.minimum(phase, stages - 1)) % plan.num_columns
        moves = (phase < stages - 1) | (phase == trip - 1)
        front = jax.lax.dynamic_index_in_dim(waiting, column, 0, keepdims=False)
        x = jnp.where((stage == 0) & (phase < stages), front, arriving)

        since = t - stage  # ticks since the first microbatch came here
        busy = jnp.maximum(since, 0)
        repeat = busy % trip // stages
        micro = busy // trip * stages + busy % stages
        valid = (since >= 0) & (micro < plan.num_microbatches)
        micro = jnp.minimum(micro, plan.num_microbatches - 1)
        y, new = self._layers(x, micro, repeat, stacked, by_repeat)
        collected = self._merged(collected, new, valid, repeat)

        behind = self._shift(front, -1)
        entering = jnp.where(stage == stages - 1, y, behind)
        entering = jnp.where(moves, entering, front) if plan.num_repeats > 1 else entering
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, entering, column, 0)
        return self._shift(y, 1), waiting, collected

    def _shift(self, x: jax.Array, by: int) -> jax.Array:
        n = self.plan.num_stages
        return jax.lax.ppermute(x, self.axes, [(i, (i + by) % n) for i in range(n)])

    def _layers(
        self, x: Any, micro: Any, repeat: Any, stacked: Any, by_repeat: Any
    ) -> tuple[Any, OutputCollection]:
        """Runs one group of this stage's layers on one microbatch."""

        def pick(tree: Any, index: Any) -> Any:
            return jax.tree.map(
                lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree
            )

        numbers, values = pick(by_repeat, repeat)
        states = pick(stacked, repeat) if self.plan.num_repeats > 1 else stacked
        rows = pick(self.inputs["rows"], micro)
        index = (micro,) if self.plan.num_microbatches > 1 else ()
        return self.body(x, rows, self.inputs["whole"], (numbers, states), values, index=index)

    def _by_repeat(self, path: str) -> bool:
        return self.plan.num_repeats > 1 and path.startswith(self.prefixes)

    def _empty(self, path: str, entry: Any) -> Any:
        """What nothing was collected in yet; of layers, for each of the stage's groups."""
        empty = neutral(entry)
        if not self._by_repeat(path):
            return empty
        repeats = self.plan.num_repeats
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (repeats, *a.shape)), empty)

    def _merged(
        self, old: OutputCollection, new: OutputCollection, valid: jax.Array, repeat: jax.Array
    ) -> OutputCollection:
        """Adds what one tick collected, unless it was idle."""

        def picked(path: str, entry: Any) -> Any:
            return jax.tree.map(lambda a: a[repeat], entry) if self._by_repeat(path) else entry

        before = old.map_entries(picked)
        after = jax.tree.map(lambda a, b: jnp.where(valid, a, b), merge(before, new), before)

        def put(kind: str, path: str, entry: Any) -> Any:
            now = getattr(after, kind)[path]
            if not self._by_repeat(path):
                return now
            return jax.tree.map(lambda a, b: a.at[repeat].set(b), entry, now)

        return OutputCollection(
            *({p: put(kind, p, e) for p, e in getattr(old, kind).items()} for kind in KINDS)
        )


def _on_each(x: jax.Array, stages: int) -> jax.Array:
    return jnp.broadcast_to(x, (stages, *jnp.shape(x)))


def _by_group(values: Any, num_groups: int) -> list[Any]:
    """Cuts the leading dim of all repeats into that of each group."""

    def cut(a: jax.Array, group: int) -> jax.Array:
        size = a.shape[0] // num_groups
        return a[group * size : (group + 1) * size]

    return [jax.tree.map(lambda a, g=g: cut(a, g), values) for g in range(num_groups)]


def _prefix(ctx: InvocationContext, child: Module) -> str:
    return f"{ctx.path}/{child.name}/" if ctx.path else f"{child.name}/"


def _by_name(
    ctx: InvocationContext, collected: OutputCollection, groups: Sequence[Sequence[Module]]
) -> OutputCollection:
    """Writes (stages, ...) entries under the names of the layers that they are of."""
    several = len(groups) > 1

    def layers(a: jax.Array, group: int) -> jax.Array:
        a = a[:, group] if several else a  # (stages, repeats of a stage, ...)
        return a.reshape(-1, *a.shape[2:])

    named = OutputCollection()
    common = reduce_leading(collected)  # whatever is not a layer's
    for kind in KINDS:
        for path, entry in getattr(collected, kind).items():
            position = next(
                (n for n, c in enumerate(groups[0]) if path.startswith(_prefix(ctx, c))), None
            )
            if position is None:
                named.add(kind, path, getattr(common, kind)[path])
                continue
            tail = path.removeprefix(_prefix(ctx, groups[0][position]))
            for g, group in enumerate(groups):
                of_group = jax.tree.map(lambda a, g=g: layers(a, g), entry)
                named.add(kind, _prefix(ctx, group[position]) + tail, of_group)
    return named
