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

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import jax

from axcore.context import current_context
from axcore.errors import OpError, PluginError, did_you_mean
from axcore.ops._records import KernelChoice, Refusal
from axcore.ops._reference_table import REFERENCE, REFERENCES, reference
from axcore.ops._shards import (
    Operand,
    auto_axes,
    num_shards,
    partition_refusal,
    shard_mapped,
    sharded_axes,
)

if TYPE_CHECKING:
    from axcore.context import Target
    from axcore.plugins import OpCall, Purpose

__all__ = [
    "REFERENCE",
    "REFERENCES",
    "Operand",
    "ambient_target",
    "dispatch",
    "kv_repeats",
    "local_implementation",
    "on_target",
    "record_choices",
    "reference",
    "select",
    "sharded_axes",
]

_TARGET: ContextVar[Target | None] = ContextVar("axcore_target", default=None)
_RECORDERS: ContextVar[tuple[list[KernelChoice], ...]] = ContextVar("axcore_choices", default=())


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
    """The target of the module call that is running; outside of one that of :func:`on_target`."""
    context = current_context()
    return _TARGET.get() if context is None else context.target


@contextmanager
def on_target(target: Target | None) -> Iterator[None]:
    """Runs ops for a target outside of module calls.

    A derivative's rule runs there; it captures the target of its call
    (:func:`ambient_target`) and calls ops inside of this.
    """
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


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
    if target is None or spec.compiler_partitioned or not auto_axes(target):
        return kernel(**arrays, **static)
    over = spec.communicates
    output = output_axes if output_placed is None else output_placed
    return shard_mapped(kernel, given, output, static, target, over)


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
            per_device.append(-(-size // num_shards(target, over)))
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
        OpError: No acceptable implementation serves the call, or there is none of a given name.
        PluginError: The forced one cannot be imported.
    """
    context = current_context()
    target = ambient_target()
    site = None if context is None else context.path
    names = (forced,) if forced else _acceptable(call.op, target)
    refused: list[Refusal] = []
    for name in names:
        reason = _refusal(call, name, target)
        stand_in = None if reason is not None else _stand_in(call, name, target, site)
        absent = None
        if reason is None and stand_in is None:
            reason = _import_refusal(call.op, name, forced)
        elif reason is None:
            absent = _import_refusal(call.op, name, None)  # to be told; the stand-in is traced
        if reason is None:
            return _record(
                KernelChoice(
                    *(site or "", call.op, name, tuple(refused), call),
                    stand_in=stand_in,
                    absent=absent,
                )
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
    parts = num_shards(target, over)
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
        near = did_you_mean(name, [*known, REFERENCE])
        raise OpError(
            f"no installed and active plugin has an implementation {name!r} of {call.op}; known: "
            f"{', '.join(sorted({*known, REFERENCE}))}",
            code="AX415",
            where=f"ops.{call.op}.implementations",
            hint=near or "`axcore kernels list` shows all, with the distribution of each",
        )
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
    return partition_refusal(call, spec, target)


def _import_refusal(op: str, name: str, forced: str | None) -> str | None:
    """Why the implementation cannot be had here, or None.

    Raises:
        PluginError: It was named, so nothing else will do.
    """
    if name == REFERENCE:
        return None
    from axcore.plugins import host

    try:
        host().kernels.load(f"{op}.{name}")
    except PluginError as error:
        if forced is not None:
            raise
        return f"{error.message}{f' ({error.hint})' if error.hint else ''}"
    return None
