"""Gradients of the collected losses, in one go or over microbatches, with equal results.

The total loss is ``sum_k weight_k * sum / num_items`` over all collected losses, where sum and
``num_items`` (tokens that count) are those of the *whole* batch. Averaging the microbatches' means
would weigh a token in a short microbatch more. So the denominators come first: a pass that only
counts, from which XLA removes everything the counts do not depend on (usually all of the model),
then one scan that adds up the gradients of ``weight_k * sum_km / num_items_k``.

Rows are dealt to microbatches in turn (row ``r`` goes to microbatch ``r mod n``). The batch is
sharded over devices in contiguous blocks of rows, so each device splits its own rows and nothing
moves between devices, as long as the rows per device divide evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from axcore.collection import OutputCollection, reduce_leading, total_loss
from axcore.errors import TrainError

__all__ = ["LossFn", "loss_and_grads", "split_microbatches"]

# ``(params, batch, key) -> collection``; the losses are in the collection.
LossFn: TypeAlias = Callable[[Any, Any, Any], OutputCollection]


def split_microbatches(batch: Mapping[str, Any], num: int) -> dict[str, Any]:
    """Deals the rows of a batch to microbatches in turn.

    Args:
        batch: Pytree of arrays of shape (rows, ...).
        num: Number of microbatches; divides the rows.

    Returns:
        The same tree with shapes (num, rows / num, ...).

    Raises:
        TrainError: The rows do not divide, or leaves differ in rows.
    """
    rows = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(rows) != 1 or () in rows:
        raise TrainError(
            f"arrays of a batch must have equal leading dims, got {sorted(rows)}",
            code="AX720",
            hint="the input gives every array a row per example; values of the whole batch go "
            "with accumulation_steps=1 alone",
        )
    ((size,),) = rows
    if num < 1 or size % num:
        raise TrainError(
            f"{size} rows do not split into {num} microbatches",
            code="AX721",
            where="accumulation_steps",
            hint=f"choose a divisor of {size}, or another batch_size",
        )
    # (rows, ...) -> (rows / num, num, ...) keeps each device's rows together; then swap.
    return jax.tree.map(
        lambda x: jnp.swapaxes(jnp.reshape(x, (size // num, num, *jnp.shape(x)[1:])), 0, 1), batch
    )


def loss_and_grads(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    *,
    accumulation_steps: int = 1,
    key: jax.Array | None = None,
) -> tuple[Any, OutputCollection]:
    """Computes the gradients of the total loss.

    Args:
        loss_fn: ``(params, batch, key) -> collection``; pure, such as a closure over
            :func:`axcore.functional`.
        params: What to differentiate by; a pytree of float arrays.
        batch: Pytree of arrays of shape (rows, ...).
        accumulation_steps: Number of microbatches that run one after another.
        key: PRNG key or None. With several microbatches each gets a key of its own.

    Returns:
        ``(grads, collection)``. With microbatches, gradients are float32, and losses, summaries and
        state updates are combined by their reductions; module outputs are those of single rows'
        microbatches and are dropped.

    Raises:
        TrainError: No loss was collected, or the rows do not divide.
    """
    if accumulation_steps == 1:

        def whole(p: Any) -> tuple[jax.Array, OutputCollection]:
            collection = _checked(loss_fn(p, batch, key))
            return total_loss(collection), collection

        return jax.grad(whole, has_aux=True)(params)

    micro = split_microbatches(batch, accumulation_steps)
    numbers = jnp.arange(accumulation_steps)

    def run(p: Any, rows: Any, number: jax.Array) -> OutputCollection:
        micro_key = None if key is None else jax.random.fold_in(key, number)
        collection = _checked(loss_fn(p, rows, micro_key))
        return OutputCollection(collection.losses, collection.summaries, collection.state_updates)

    def count(_: None, rows_and_number: tuple[Any, jax.Array]) -> tuple[None, dict[str, Any]]:
        losses = run(jax.lax.stop_gradient(params), *rows_and_number).losses
        return None, {path: entry.num_items for path, entry in losses.items()}

    _, counts = jax.lax.scan(count, None, (micro, numbers))
    items = {path: jnp.sum(per_step, axis=0) for path, per_step in counts.items()}

    def share(p: Any, rows: Any, number: jax.Array) -> tuple[jax.Array, OutputCollection]:
        """This microbatch's part of the total loss."""
        collection = run(p, rows, number)
        loss = jnp.zeros((), jnp.float32)
        for path, entry in collection.losses.items():
            scale = jnp.where(items[path] > 0, entry.weight / jnp.maximum(items[path], 1e-30), 0.0)
            loss = loss + jnp.sum(entry.total * scale)
        return loss, collection

    def step(total: Any, rows_and_number: tuple[Any, jax.Array]) -> tuple[Any, OutputCollection]:
        grads, collection = jax.grad(share, has_aux=True)(params, *rows_and_number)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), collection

    zeros = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
    grads, collections = jax.lax.scan(step, zeros, (micro, numbers))
    return grads, reduce_leading(collections)


def _checked(collection: OutputCollection) -> OutputCollection:
    if not collection.losses:
        raise TrainError(
            "the model collected no loss, so there is nothing to minimize",
            code="AX722",
            hint="call current_context().add_loss(name, value, num_items=...) in the model",
        )
    return collection
