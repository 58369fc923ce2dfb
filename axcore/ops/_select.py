"""Which kernel serves a call: chosen at trace, from the target's acceptable list, reasons kept.

An op describes its call (:class:`axcore.plugins.OpCall`), walks the implementations that the target
accepts, asks each kernel's ``supports`` and runs the first that has no objection. Platform always
means the target's, never the host's. On a CPU target the pure-XLA reference (``"xla"``) is
acceptable by default; on an accelerator whatever is not on the list is an error that names each
refusal, unless the target allows the op to fall back (``--set ops.OP.fallback=allow``).

Only this module wraps kernels in ``shard_map``: along the dims their spec's ``partitioning`` names.
A dim that is sharded but not named there is a refusal. The reference is never wrapped, nor is a
kernel that says ``compiler_partitioned``; XLA partitions them.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
from jax.sharding import PartitionSpec

from axcore.context import current_context
from axcore.errors import OpError, did_you_mean
from axcore.ops._records import KernelChoice, Refusal

if TYPE_CHECKING:
    from axcore.context import Target
    from axcore.plugins import KernelSpec, OpCall, Purpose

__all__ = [
    "REFERENCE",
    "REFERENCES",
    "Operand",
    "ambient_target",
    "dispatch",
    "kv_repeats",
    "local_implementation",
    "record_choices",
    "reference",
    "select",
    "sharded_axes",
]

#: Name of the pure-XLA implementation that every op has.
REFERENCE = "xla"

#: op -> target of its reference implementation.
REFERENCES: Mapping[str, str] = {
    "attention": "axcore.ops._attention._xla:attention_xla",
    "paged_attention": "axcore.ops._paged_attention:paged_attention_xla",
    "rms_norm": "axcore.ops._norms:rms_norm_xla",
    "add_rms_norm": "axcore.ops._norms:add_rms_norm_xla",
    "layer_norm": "axcore.ops._norms:layer_norm_xla",
    "rotary": "axcore.ops._rotary:rotary_xla",
    "gated_activation": "axcore.ops._activation:gated_activation_xla",
    "linear_cross_entropy": "axcore.ops._linear_cross_entropy._xla:linear_cross_entropy_xla",
    "grouped_matmul": "axcore.ops._grouped_matmul:grouped_matmul_xla",
    "all_gather_matmul": "axcore.ops._collective_matmul:all_gather_matmul_xla",
    "matmul_reduce_scatter": "axcore.ops._collective_matmul:matmul_reduce_scatter_xla",
}

_RECORDERS: ContextVar[tuple[list[KernelChoice], ...]] = ContextVar("axcore_choices", default=())


class Operand(NamedTuple):
    """An argument of an op: the array (or None when absent) and the logical axis of each dim.

    Attributes:
        array: The array.
        axes: What kernels know the dims by; None for a dim that they get whole.
        placed: What the dims lie by, where that differs: another axis than the one that kernels
            know, or the axis of a dim that is gathered for all but communicating kernels.
    """

    array: Any
    axes: tuple[str | None, ...]
    placed: tuple[str | None, ...] | None = None

    @property
    def layout(self) -> tuple[str | None, ...]:
        """The logical axis that each dim lies by."""
        return self.axes if self.placed is None else self.placed


@contextmanager
def record_choices() -> Iterator[list[KernelChoice]]:
    """Collects every kernel choice made while tracing inside the block, in order.

    Example:
        >>> with record_choices() as choices:  # doctest: +SKIP
        ...     jax.eval_shape(train_step, state, batch)
        >>> [(c.site, c.op, c.chosen) for c in choices]  # doctest: +SKIP
    """
    choices: list[KernelChoice] = []
    token = _RECORDERS.set((*_RECORDERS.get(), choices))
    try:
        yield choices
    finally:
        _RECORDERS.reset(token)


def ambient_target() -> Target | None:
    """The target of the module call that is running, or None outside of one."""
    context = current_context()
    return None if context is None else context.target


def sharded_axes(target: Target, logical_axis: str | None) -> tuple[str, ...]:
    """Mesh axes of more than one device that split ``logical_axis``, less those already manual."""
    if logical_axis is None or target.mesh is None:
        return ()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    sizes = target.mesh.shape
    return tuple(
        axis for axis in target.mesh_axes(logical_axis) if sizes[axis] > 1 and axis not in manual
    )


def _auto_axes(target: Target) -> set[str]:
    """The mesh axes that no enclosing ``shard_map`` handles."""
    if target.mesh is None:
        return set()
    return set(target.mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)


@functools.cache
def reference(op: str) -> Callable[..., Any]:
    """The pure-XLA implementation of ``op``: what every kernel is compared with.

    Raises:
        OpError: There is no such op.
    """
    if op not in REFERENCES:
        raise OpError(
            f"no op named {op!r}; known: {', '.join(REFERENCES)}",
            code="AX404",
            hint=did_you_mean(op, REFERENCES) or None,
        )
    module, _, name = REFERENCES[op].partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))


def dispatch(
    op: str,
    operands: Mapping[str, Operand],
    *,
    output_axes: Any,
    static: Mapping[str, Any],
    mask: Any = None,
    view: Any = None,
    output_placed: Any = None,
    communicated: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
    purpose: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Selects an implementation for a call and runs it.

    Args:
        op: The op's name.
        operands: Argument name -> array and logical axes; arrays that are None are left out.
        output_axes: Logical axes of the result, or a pytree of them like the result.
        output_placed: What the result lies by, where that differs from ``output_axes``.
        static: Further keyword arguments of the implementations.
        communicated: Logical axes by which the result lies and no operand does, for kernels that
            communicate along them.
        mask: Structured mask, for ``supports``.
        view: Kind of the KV cache's view, for ``supports``.
        options: Static facts for ``supports``.
        purpose: ``train``, ``prefill`` or ``decode``; by default from the context.
        implementation: Forced implementation.

    Returns:
        What the implementation returns.

    Raises:
        OpError: No acceptable implementation serves the call.
    """
    given = {name: operand for name, operand in operands.items() if operand.array is not None}
    target = ambient_target()
    names = (implementation,) if implementation else _acceptable(op, target)
    if names == (REFERENCE,) and not _RECORDERS.get():
        choice = None  # the common case costs nothing at trace
    else:
        call = make_call(
            op,
            given,
            communicated=communicated,
            mask=mask,
            view=view,
            options=options or {},
            purpose=purpose,
        )
        choice = select(call, implementation)
    arrays = {name: operand.array for name, operand in given.items()}
    traced = REFERENCE if choice is None else choice.stand_in or choice.chosen
    if traced == REFERENCE:
        return reference(op)(**arrays, **static)
    from axcore.plugins import host

    key = f"{op}.{traced}"
    kernel = host().kernels.load(key)
    spec = host().kernels.get(key)
    if target is None or spec.compiler_partitioned or not _auto_axes(target):
        return kernel(**arrays, **static)
    over = spec.communicates
    output = output_axes if output_placed is None else output_placed
    return _shard_mapped(kernel, given, output, static, target, over)


def make_call(
    op: str,
    operands: Mapping[str, Operand],
    *,
    communicated: tuple[str, ...] = (),
    mask: Any = None,
    view: Any = None,
    options: Mapping[str, Any],
    purpose: str | None = None,
) -> OpCall:
    """Describes a call for ``supports``: shapes, per-device shapes, dtypes, axes, target.

    Args:
        op: The op's name.
        operands: Argument name -> array and logical axes.
        communicated: Further logical axes, by which the result lies.
        mask: Structured mask.
        view: Kind of the KV cache's view.
        options: Static facts.
        purpose: ``train``, ``prefill`` or ``decode``; by default ``train`` when training or outside
            a module call, else ``prefill``.

    Returns:
        The record.
    """
    from axcore.plugins import OpCall

    context = current_context()
    target = ambient_target()
    if purpose is None:
        purpose = "train" if context is None or context.is_training else "prefill"
    shapes, device_shapes, dtypes, axes = {}, {}, {}, {}
    split: dict[str, tuple[str, ...]] = {}
    for name, operand in operands.items():
        shape = tuple(int(n) for n in jax.numpy.shape(operand.array))
        shapes[name] = shape
        dtypes[name] = str(jax.dtypes.canonicalize_dtype(jax.numpy.result_type(operand.array)))
        axes[name] = operand.axes
        per_device = []
        for size, axis, placed in zip(shape, operand.axes, operand.layout, strict=True):
            over: tuple[str, ...] = ()
            if target is not None and axis is not None and size != 1:
                over = sharded_axes(target, placed)
            if over and axis is not None:
                split[axis] = over
            per_device.append(-(-size // _num_shards(target, over)))
        device_shapes[name] = tuple(per_device)
    for axis in communicated:
        if target is not None and (over := sharded_axes(target, axis)):
            split.setdefault(axis, over)
    return OpCall(
        op=op,
        shapes=shapes,
        device_shapes=device_shapes,
        dtypes=dtypes,
        axes=axes,
        mesh_axes=split,
        mask=mask,
        view=view,
        purpose=cast("Purpose", purpose),
        needs_gradient=purpose == "train",
        instance="local" if target is None else target.instance,
        platform="cpu" if target is None else target.platform,
        options=options,
    )


def select(call: OpCall, forced: str | None = None) -> KernelChoice:
    """Chooses the implementation that serves ``call`` and records the choice.

    Args:
        call: What is asked for.
        forced: The only acceptable implementation, or None for the target's list.

    Returns:
        The choice, with the reason of each implementation that was refused before it.

    Raises:
        OpError: No acceptable implementation serves the call.
    """
    context = current_context()
    target = ambient_target()
    site = None if context is None else context.path
    names = (forced,) if forced else _acceptable(call.op, target)
    refused: list[Refusal] = []
    for name in names:
        reason = _refusal(call, name, target)
        if reason is None:
            stand_in = _stand_in(call, name, target, site)
            return _record(
                KernelChoice(site or "", call.op, name, tuple(refused), call, stand_in=stand_in)
            )
        refused.append(Refusal(name, reason))
    by_default = call.platform == "cpu"
    allowed = call.op in getattr(target, "fallbacks", ())
    if not forced and (by_default or allowed):
        return _record(
            KernelChoice(site or "", call.op, REFERENCE, tuple(refused), call, fallback=True)
        )
    reasons = "; ".join(f"{r.implementation}: {r.reason}" for r in refused)
    raise OpError(
        f"no acceptable implementation of {call.op} serves this call on {call.instance}: {reasons}",
        code="AX410",
        where=site or None,
        hint=(
            "leave implementation unset to let the target choose"
            if forced
            else f"--set ops.{call.op}.fallback=allow accepts the XLA reference"
        ),
    )


def kv_repeats(num_heads: int, num_kv_heads: int) -> int:
    """How often each key/value head must stand in attention, so that heads can be split evenly.

    Kernels see one device. Where heads are split over more devices than there are key/value heads,
    each must stand on several; XLA's own partitioning of the reference needs no copies.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key/value heads, a divisor of those.

    Returns:
        1 unless the target lists kernels, the rules split both alike, and copies let them.
    """
    target = ambient_target()
    if target is None or _acceptable("attention", target) == (REFERENCE,):
        return 1
    over = sharded_axes(target, "heads")
    parts = _num_shards(target, over)
    if num_kv_heads == 1 or over != sharded_axes(target, "kv_heads"):
        return 1
    times = parts // math.gcd(parts, num_kv_heads)
    return times if num_heads % (num_kv_heads * times) == 0 else 1


def local_implementation(op: str) -> str | None:
    """What a communicating kernel that has made its dims whole forces for the rest of its work.

    Returns:
        None, which walks the target's list (the communicating ones refuse themselves: nothing is
        split any more); the reference where the list names no others.
    """
    from axcore.plugins import host

    kernels = host().kernels
    names = [n for n in _acceptable(op, ambient_target()) if f"{op}.{n}" in kernels]
    others = [n for n in names if not kernels.get(f"{op}.{n}").communicates]
    return None if others else REFERENCE


def _acceptable(op: str, target: Target | None) -> tuple[str, ...]:
    """Implementations that the target accepts, best first; the reference where it has no list."""
    if target is None:
        return (REFERENCE,)
    return tuple(target.kernels.get(op, ())) or (REFERENCE,)


def _stand_in(call: OpCall, name: str, target: Target | None, site: str | None) -> str | None:
    """What is traced in place of an implementation that the target's compiler cannot build."""
    stand_in = getattr(target, "stand_ins", {}).get(f"{call.op}.{name}")
    if stand_in is None:
        return None
    reason = _refusal(call, stand_in, target)
    if reason is not None:
        raise OpError(
            f"{stand_in!r} is to stand in for {call.op}.{name} and cannot serve this call: "
            f"{reason}",
            code="AX411",
            where=site or None,
        )
    return stand_in


def _record(choice: KernelChoice) -> KernelChoice:
    for choices in _RECORDERS.get():
        choices.append(choice)
    return choice


def _refusal(call: OpCall, name: str, target: Target | None) -> str | None:
    """Why the implementation cannot serve the call, or None."""
    if name == REFERENCE:
        return None
    from axcore.plugins import host, load_target

    kernels = host().kernels
    key = f"{call.op}.{name}"
    if key not in kernels:
        known = [s.implementation for s in kernels.specs() if s.op == call.op]
        others = ", ".join(sorted({*known, REFERENCE}))
        hint = did_you_mean(name, [*known, REFERENCE])
        return f"not installed or not active (known: {others})" + (f", {hint}" if hint else "")
    spec = kernels.get(key)
    if not spec.runs_on(call.platform):
        return f"runs on {', '.join(spec.platforms)}, the target is {call.platform}"
    if spec.supports is not None:
        supports = load_target(spec.supports, where=f"kernel {key!r}")
        reason = supports(call)
        if reason is not None:
            return str(reason)
    for axis in spec.communicates:
        if axis not in call.mesh_axes:
            return f"it is for a split dim {axis}, which is whole on each device here"
    if target is None or spec.compiler_partitioned:
        return None
    return _partition_refusal(call, spec, target)


def _num_shards(target: Target | None, mesh_axes: tuple[str, ...]) -> int:
    num = 1
    for axis in mesh_axes:
        assert target is not None and target.mesh is not None
        num *= target.mesh.shape[axis]
    return num


def _partition_refusal(call: OpCall, spec: KernelSpec, target: Target) -> str | None:
    """Why the kernel cannot run on the shards of this call, or None."""
    for argument, axes in call.axes.items():
        tolerated = spec.partitioning.get(argument, ())
        for size, axis in zip(call.shapes[argument], axes, strict=True):
            over = call.mesh_axes.get(axis or "", ())
            if axis is None or size == 1 or not over:
                continue
            if axis not in tolerated:
                return f"does not tolerate dim {axis} of {argument} sharded over {', '.join(over)}"
            num = _num_shards(target, over)
            if size % num:
                return f"dim {axis} of {argument} ({size}) does not divide over {num} devices"
    heads, kv_heads = (call.mesh_axes.get(a, ()) for a in ("heads", "kv_heads"))
    keys = {"attention": ("k", 2), "paged_attention": ("k_pages", 0)}.get(call.op)
    if keys is None or heads == kv_heads:
        return None
    argument, dim = keys
    if call.shapes[argument][dim] != 1:
        return (
            f"query heads are sharded over {heads or 'nothing'} and key/value heads over"
            f" {kv_heads or 'nothing'}: a device would lack the keys of its queries"
        )
    return None


def _shard_mapped(
    kernel: Callable[..., Any],
    operands: Mapping[str, Operand],
    output_placed: Any,
    static: Mapping[str, Any],
    target: Target,
    communicates: tuple[str, ...],
) -> Any:
    """Runs the kernel on each device's shards; dims that are not sharded are whole everywhere."""
    assert target.mesh is not None

    def spec(axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> PartitionSpec:
        sizes = shape or (0,) * len(axes)
        return PartitionSpec(
            *(
                (sharded_axes(target, axis) or None) if size != 1 else None
                for axis, size in zip(axes, sizes, strict=True)
            )
        )

    def placement(operand: Operand) -> tuple[str | None, ...]:
        pairs = zip(operand.axes, operand.layout, strict=True)
        return tuple(p if axis is not None or p in communicates else None for axis, p in pairs)

    names = list(operands)
    in_specs = tuple(
        spec(placement(operands[name]), jax.numpy.shape(operands[name].array)) for name in names
    )
    if communicates:
        static = {**static, "mesh_axes": {a: sharded_axes(target, a) for a in communicates}}

    def is_axes(x: Any) -> bool:  # and not a tuple of results, each with its own
        return isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x)

    out_specs = jax.tree.map(spec, output_placed, is_leaf=is_axes)

    def local(*arrays: jax.Array) -> Any:
        return kernel(**dict(zip(names, arrays, strict=True)), **static)

    manual = jax.sharding.get_abstract_mesh().manual_axes
    mapped = jax.shard_map(
        local,
        mesh=None if manual else target.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=_auto_axes(target),
        check_vma=False,
    )
    return mapped(*(operands[name].array for name in names))
