"""JAX transforms over children: scan, remat, vmap, cond, switch, while, grad, jit, shard_map.

Inside a raw JAX transform, side outputs of a module call would leak tracers or vanish, and a key
would repeat. These helpers make a fresh closure per call (JAX traces one function object once),
return the collection *through* the transform, merge it by each entry's reduction, and fold the
iteration's index into keys. Contexts outside of the transform are read-only inside.

Outside of any module call each helper is the plain transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axcore.collection import OutputCollection, merge, neutral, reduce_leading, reduce_replicas
from axcore.context import InvocationContext, activated, current_context
from axcore.errors import ModuleError
from axcore.module import Module

__all__ = [
    "cond",
    "grad",
    "jit",
    "remat",
    "scan",
    "scan_layers",
    "shard_map",
    "switch",
    "value_and_grad",
    "vmap",
    "while_loop",
]

Fn = Callable[..., Any]


class _Body:
    """A function to run in a fork of the current context, for as often as JAX traces it."""

    def __init__(self, fn: Fn):
        self.fn = fn
        self.outer = current_context()
        self._inner: InvocationContext | None = None

    def __call__(
        self,
        *args: Any,
        index: tuple[Any, ...] = (),
        scan_index: tuple[Any, ...] = (),
        slices: dict[str, Any] | None = None,
    ) -> tuple[Any, OutputCollection]:
        if self.outer is None:
            return self.fn(*args), OutputCollection()
        inner = self.outer._fork(index, scan_index, slices or {})
        with activated(inner):
            outputs = self.fn(*args)
        self._inner = inner
        return outputs, inner.collection

    def finish(self, collection: OutputCollection) -> None:
        """Hands the collection to the outer context and goes on counting calls and draws there."""
        if self.outer is None:
            return
        self.outer.collection.update(collection)
        if self._inner is not None:
            self.outer._calls.update(self._inner._calls)
            self.outer._draws = self._inner._draws


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """``jax.lax.scan`` whose body may call children; their collections reduce over iterations.

    Args:
        fn: ``(carry, x) -> (carry, y)``.
        init: Initial carry.
        xs: Arrays with a leading axis, or None.
        length: Number of iterations when ``xs`` is None.
        unroll: As for ``jax.lax.scan``.
    """
    body = _Body(fn)
    num = length if length is not None else len(jax.tree.leaves(xs)[0])

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        index, x = x
        (carry, y), collection = body(carry, x, index=(index,))
        return carry, (y, collection)

    carry, (ys, stacked) = jax.lax.scan(step, init, (jnp.arange(num), xs), num, unroll=unroll)
    body.finish(reduce_leading(stacked))
    return carry, ys


def scan_layers(
    children: Sequence[Module],
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    unroll: int = 1,
    wrap: Callable[[Fn], Fn] | None = None,
    stacked: tuple[Sequence[Any], Sequence[Any]] | None = None,
) -> tuple[Any, Any]:
    """Scans over layers whose state is stacked; ``fn`` calls ``children`` as if one layer.

    Args:
        children: One module per position of the period, each named ``a:b:c`` for the layers
            ``range(a, b, c)`` it stands for; all of one count.
        fn: ``(carry, x) -> (carry, y)``.
        init: Initial carry.
        xs: Per-iteration values with a leading axis, or None.
        unroll: As for ``jax.lax.scan``.
        wrap: Applied to the pure body, such as ``jax.checkpoint`` with a policy.
        stacked: Layer numbers and states of each child, when they are not all of the child's
            layers (a pipeline stage has some of them).

    Returns:
        The last carry and the stacked ys. What layers collect stays stacked under their name.
    """
    body = _Body(fn)
    ctx = body.outer
    if ctx is None:
        raise ModuleError("scan_layers needs a running module call", code="AX330")
    ranges = [child.layers for child in children]
    counts = {len(r) if isinstance(r, range) else r for r in ranges}
    if len(counts) != 1 or not all(isinstance(r, range) for r in ranges):
        raise ModuleError(
            f"scan_layers got children {[c.name for c in children]}: each must stand for the same "
            "number of stacked layers (a:b:c)",
            code="AX331",
            where=ctx.module.path,
        )
    if stacked is None:
        num = counts.pop()
        layer_numbers = [jnp.arange(r.start, r.stop, r.step) for r in ranges]  # type: ignore[union-attr]
        states = [ctx.state.get(child.name, {}) for child in children]
    else:
        layer_numbers, states = map(list, stacked)
        num = layer_numbers[0].shape[0]

    def pure(carry: Any, x: Any, numbers: Any, slices: Any) -> tuple[Any, Any]:
        by_name = {c.name: (s, n) for c, s, n in zip(children, slices, numbers, strict=True)}
        return body(carry, x, slices=by_name, scan_index=(numbers[0],))

    pure = wrap(pure) if wrap else pure

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        (carry, y), collection = pure(carry, *x)
        return carry, (y, collection)

    carry, (ys, collected) = jax.lax.scan(
        step,
        init,
        (xs, layer_numbers, states),
        num,
        unroll=unroll,  # type: ignore[arg-type]
    )
    prefixes = tuple(f"{ctx.path}/{c.name}/" if ctx.path else f"{c.name}/" for c in children)
    body.finish(reduce_leading(collected, keep=lambda path: path.startswith(prefixes)))
    return carry, ys


def remat(fn: Fn, *, policy: Callable[..., bool] | None = None, prevent_cse: bool = True) -> Fn:
    """``jax.checkpoint`` for functions that call children."""

    def run(*args: Any) -> Any:
        body = _Body(fn)
        checkpointed = jax.checkpoint(lambda *a: body(*a), policy=policy, prevent_cse=prevent_cse)
        outputs, collection = checkpointed(*args)
        body.finish(collection)
        return outputs

    return run


def vmap(fn: Fn, in_axes: Any = 0, out_axes: Any = 0, *, axis_size: int | None = None) -> Fn:
    """``jax.vmap`` for functions that call children; each element has its own keys."""

    def run(*args: Any) -> Any:
        body = _Body(fn)
        axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        size = axis_size
        if size is None:
            for arg, axis in zip(args, axes, strict=True):
                leaves = jax.tree.leaves(arg)
                if isinstance(axis, int) and leaves:
                    size = leaves[0].shape[axis]
        if size is None:
            raise ModuleError("vmap cannot tell its size; pass axis_size", code="AX332")
        mapped = jax.vmap(
            lambda i, *a: body(*a, index=(i,)), in_axes=(0, *axes), out_axes=(out_axes, 0)
        )
        outputs, collection = mapped(jnp.arange(size), *args)
        body.finish(reduce_leading(collection))
        return outputs

    return run


def cond(pred: Any, true_fn: Fn, false_fn: Fn, *operands: Any) -> Any:
    """``jax.lax.cond`` whose branches may call children and must collect the same names."""
    return switch(jnp.asarray(pred, jnp.int32), [false_fn, true_fn], *operands)


def switch(index: Any, branches: Sequence[Fn], *operands: Any) -> Any:
    """``jax.lax.switch`` whose branches may call children and must collect the same names."""
    bodies = [_Body(fn) for fn in branches]
    names: list[dict[str, tuple[str, ...]]] = []

    def branch(body: _Body) -> Fn:
        def run(*args: Any) -> Any:
            outputs, collection = body(*args)
            names.append(collection.names())
            if names[0] != names[-1]:
                raise ModuleError(
                    f"branches of a switch collect different names: {names[0]} and {names[-1]}",
                    code="AX333",
                    hint="add a zero-weight entry of the same name in the other branch",
                )
            return outputs, collection

        return run

    outputs, collection = jax.lax.switch(index, [branch(b) for b in bodies], *operands)
    bodies[-1].finish(collection)
    return outputs


def while_loop(cond_fn: Fn, body_fn: Fn, init: Any) -> Any:
    """``jax.lax.while_loop`` whose body may call children.

    What the body collects combines over iterations; with no iteration sums and means are empty and
    a state keeps its value. The condition may not collect.
    """
    body = _Body(body_fn)
    index0 = jnp.zeros((), jnp.int32)
    _, shapes = jax.eval_shape(lambda c, i: body(c, index=(i,)), init, index0)
    start = shapes.map_entries(lambda _, e: neutral(e))
    if body.outer is not None:
        for path, entry in start.state_updates.items():
            name = path.rsplit("/", 1)[-1]
            in_state = path == "/".join(filter(None, (body.outer.state_path, name)))
            if entry.reduction == "last" and in_state and name in body.outer.state:
                start.state_updates[path] = type(entry)(
                    body.outer.state[name], None, "last", entry.weight
                )

    def step(loop: Any) -> Any:
        i, carry, collected = loop
        carry, collection = body(carry, index=(i,))
        return i + 1, carry, merge(collected, collection)

    _, carry, collected = jax.lax.while_loop(
        lambda loop: cond_fn(loop[1]), step, (index0, init, start)
    )
    body.finish(collected)
    return carry


def value_and_grad(fn: Fn, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Fn:
    """``jax.value_and_grad`` for functions that call children."""

    def run(*args: Any) -> Any:
        body = _Body(fn)

        def pure(*a: Any) -> Any:
            outputs, collection = body(*a)
            value, aux = outputs if has_aux else (outputs, None)
            return value, (aux, collection)

        (value, (aux, collection)), grads = jax.value_and_grad(pure, argnums, has_aux=True)(*args)
        body.finish(collection)
        return ((value, aux) if has_aux else value), grads

    return run


def grad(fn: Fn, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Fn:
    """``jax.grad`` for functions that call children."""

    def run(*args: Any) -> Any:
        value, grads = value_and_grad(fn, argnums, has_aux=has_aux)(*args)
        return (grads, value[1]) if has_aux else grads

    return run


def jit(fn: Fn, **jit_kwargs: Any) -> Fn:
    """``jax.jit`` for functions that call children; traced once per call of the helper."""

    def run(*args: Any) -> Any:
        body = _Body(fn)
        outputs, collection = jax.jit(lambda *a: body(*a), **jit_kwargs)(*args)
        body.finish(collection)
        return outputs

    return run


def shard_map(
    fn: Fn,
    *,
    in_specs: Any,
    out_specs: Any,
    mesh: jax.sharding.Mesh | None = None,
    check_vma: bool = True,
) -> Fn:
    """``jax.shard_map`` for functions that call children.

    Each device has its own keys; collections combine over all mesh axes, every shard counting as
    one observation.
    """

    def run(*args: Any) -> Any:
        body = _Body(fn)
        used = mesh or (body.outer.target.mesh if body.outer else None)
        if used is None:
            raise ModuleError("shard_map needs a mesh", code="AX334")
        names = tuple(used.axis_names)

        def pure(*a: Any) -> Any:
            index = jax.lax.axis_index(names)
            outputs, collection = body(*a, index=(index,))
            return outputs, reduce_replicas(collection, names)

        mapped = jax.shard_map(
            pure,
            mesh=used,
            in_specs=in_specs,
            out_specs=(out_specs, jax.sharding.PartitionSpec()),
            check_vma=check_vma,
        )
        outputs, collection = mapped(*args)
        body.finish(collection)
        return outputs

    return run
