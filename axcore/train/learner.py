"""Learner: turns gradients into new parameters with any optax transformation.

The maths is in plain functions (:mod:`axcore.train.accumulation`, :mod:`axcore.train.per_layer`,
optax); this module decides, from the parameter specs and patterns of its config, which parameters
train, which decay and what is kept. All methods are pure and run inside ``jax.jit``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axcore.collection import OutputCollection
from axcore.config import REQUIRED, Config, Required
from axcore.errors import TrainError
from axcore.layers.base import is_dtype
from axcore.module import Module, no_context
from axcore.parallel.optimizer_state import StateAxes, optimizer_state_axes
from axcore.train._layout import Layout, make_layout
from axcore.train._offload import moved
from axcore.train._paths import flatten, lead_shape, leaf_masks, unflatten
from axcore.train.accumulation import LossFn, loss_and_grads
from axcore.train.per_layer import per_layer

__all__ = ["Learner", "LearnerState", "clip_by_norm", "global_norm"]

Tree = dict[str, Any]


class LearnerState(NamedTuple):
    """What the learner keeps between steps; a pytree of arrays.

    Attributes:
        updates: int32 scalar, updates applied so far; what schedules see.
        skipped: int32 scalar, steps skipped because a gradient was not finite.
        skipped_in_a_row: int32 scalar, of these the ones since the last applied update.
        optimizer: State of the optax transformation, for the trainable parameters only.
        ema: Moving average of the trainable parameters in float32, or None.
    """

    updates: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    optimizer: Any
    ema: Any


def global_norm(tree: Any) -> jax.Array:
    """Returns the float32 root of the sum of squares of all leaves."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_by_norm(tree: Any, norm: jax.Array, max_norm: float) -> Any:
    """Scales a tree of global norm ``norm`` down to ``max_norm`` if it is larger."""
    keep = norm < max_norm
    return jax.tree.map(lambda x: jnp.where(keep, x, x / norm.astype(x.dtype) * max_norm), tree)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A learner's decisions for given specs."""

    layout: Layout
    specs: Tree
    optimizer: optax.GradientTransformationExtraArgs
    decay_mask: Tree


class Learner(Module):
    """Optimizer, clipping, weight decay by path, freezing, moving average, skipping of bad steps.

    Patterns are globs over per-layer parameter paths, the same in both stack forms:
    ``decoder/layer/3/**``, ``**/bias``, ``decoder/layer/[0-3]/attention/*/weight``. ``**`` spans
    path components, ``*`` does not. A pattern that starts with ``!`` takes back what those before
    it matched: ``("**", "!**/bias")`` is all but the biases. One that matches nothing is an error.

    Parameters are trees of nested dicts, and ``specs`` is ``model.parameter_specs()`` throughout.
    Leaves of kind ``state`` are never trained. Gradients and state have the structure of the
    *trainable* tree, see :meth:`split`.

    Example:
        >>> learner = Learner.Config(
        ...     optimizer=config_for(adamw, learning_rate=1e-3, weight_decay=0.1),
        ...     clip_global_norm=1.0,
        ... ).instantiate(name="learner")  # doctest: +SKIP
        >>> state = learner.init(params, specs)  # doctest: +SKIP
        >>> grads, collection = learner.loss_and_grads(
        ...     loss_fn, params, batch, specs)  # doctest: +SKIP
        >>> params, state, metrics = learner.update(grads, state, params, specs)  # doctest: +SKIP
    """

    class Config(Module.Config):
        """How parameters are learned."""

        optimizer: Required[Config] = REQUIRED
        """``config_for`` of a function that returns an optax transformation."""

        clip_global_norm: float | None = None
        """Gradients of a larger global norm are scaled down to it."""

        weight_decay_include: tuple[str, ...] = ()
        """Parameters that decay although their layer says no (biases, norm scales)."""

        weight_decay_exclude: tuple[str, ...] = ()
        """Parameters that do not decay; wins over ``weight_decay_include``."""

        frozen_params: tuple[str, ...] = ()
        """Parameters that stay as they are: no gradient, no state."""

        ema_decay: float | None = None
        """Decay per update of a moving average of the parameters, kept in float32."""

        skip_non_finite: bool = True
        """Whether a step with a NaN or infinite gradient changes nothing but a counter."""

        report_update_norm: bool = False
        """Whether to report the norm of the update; it costs one more pass over the parameters."""

        state_dtype: str | None = None
        """Dtype in which per-parameter optimizer state is stored (computed in float32)."""

        state_memory: Literal["device", "host"] = "device"
        """Where optimizer state and moving averages are between updates."""

    def __init__(self, cfg: Learner.Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        decay = cfg.ema_decay
        if decay is not None and not 0.0 <= decay < 1.0:
            raise TrainError(
                f"ema_decay must be in [0, 1), got {decay}",
                where=self._where("ema_decay"),
                hint="0.999 averages over about 1,000 steps; None keeps no average",
            )
        clip = cfg.clip_global_norm
        if clip is not None and not clip > 0:
            raise TrainError(
                f"clip_global_norm must be positive, got {clip}",
                where=self._where("clip_global_norm"),
                hint="None switches it off",
            )
        if cfg.state_dtype is not None and not is_dtype(cfg.state_dtype, floating=True):
            raise TrainError(
                f"state_dtype is {cfg.state_dtype!r}, expected the name of a floating-point dtype",
                where=self._where("state_dtype"),
                hint="for example float32 or bfloat16",
            )

    # -- trees -----------------------------------------------------------------------------

    @no_context
    def split(self, params: Mapping[str, Any], specs: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """Returns ``(trainable, frozen)``; a stacked leaf may be in both, cut by layers."""
        return self._layout(specs).split(params)

    @no_context
    def merge(self, trainable: Tree, frozen: Tree, specs: Mapping[str, Any]) -> Tree:
        """Returns the whole tree; the inverse of :meth:`split`."""
        return self._layout(specs).merge(trainable, frozen)

    @no_context
    def trainable_specs(self, specs: Mapping[str, Any]) -> Tree:
        """Returns the specs of the trainable tree, the structure of gradients."""
        return self._layout(specs).trainable_specs(specs)

    @no_context
    def ema_params(
        self, state: LearnerState, params: Mapping[str, Any], specs: Mapping[str, Any]
    ) -> Tree:
        """Returns ``params`` with the trainable ones replaced by their moving average.

        Raises:
            TrainError: ``ema_decay`` is not set.
        """
        if state.ema is None:
            raise TrainError(
                "there is no moving average",
                where=self._where("ema_decay"),
                hint="the run was trained without learner.ema_decay: leave --ema out",
            )
        trainable, frozen = self.split(params, specs)
        if self.cfg.state_memory == "host":
            state = moved(state, jax.memory.Space.Device)
        ema = jax.tree.map(lambda e, p: e.astype(p.dtype), state.ema, trainable)
        return self.merge(ema, frozen, specs)

    @no_context
    def state_axes(self, specs: Mapping[str, Any]) -> StateAxes:
        """Returns the logical axes of the whole state (a tree like it), and what is replicated."""
        params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)), specs)
        shapes = jax.eval_shape(lambda p: self.init(p, specs), params)
        return optimizer_state_axes(shapes, self.trainable_specs(specs))

    # -- learning --------------------------------------------------------------------------

    @no_context
    def init(self, params: Mapping[str, Any], specs: Mapping[str, Any]) -> LearnerState:
        """Returns the initial state.

        Raises:
            TrainError: A pattern matches nothing, or decay patterns are set but the optimizer does
                not read the learner's mask.
        """
        bound = self._bind(specs)
        trainable, _ = bound.layout.split(params)
        self._check_decay_is_read(bound)
        ema = None
        if self.cfg.ema_decay is not None:
            ema = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), trainable)
        # Three arrays, not one thrice: a donated buffer may be given once only.
        updates, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
        return LearnerState(updates, skipped, in_a_row, bound.optimizer.init(trainable), ema)

    @no_context
    def loss_and_grads(
        self,
        loss_fn: LossFn,
        params: Mapping[str, Any],
        batch: Any,
        specs: Mapping[str, Any],
        *,
        accumulation_steps: int = 1,
        key: jax.Array | None = None,
    ) -> tuple[Tree, OutputCollection]:
        """Differentiates the collected losses by the trainable parameters.

        Args:
            loss_fn: ``(params, batch, key) -> collection``, given the whole parameter tree.
            params: The whole parameter tree.
            batch: Pytree of arrays of shape (rows, ...).
            specs: ``model.parameter_specs()``.
            accumulation_steps: Microbatches; the result equals that of the whole batch.
            key: PRNG key or None.

        Returns:
            Gradients in the structure of the trainable tree, and the collection; see
            :func:`axcore.train.accumulation.loss_and_grads`.
        """
        layout = self._layout(specs)
        trainable, frozen = layout.split(params)
        return loss_and_grads(
            lambda p, rows, k: loss_fn(layout.merge(p, frozen), rows, k),
            trainable,
            batch,
            accumulation_steps=accumulation_steps,
            key=key,
        )

    @no_context
    def update(
        self,
        grads: Tree,
        state: LearnerState,
        params: Mapping[str, Any],
        specs: Mapping[str, Any],
        *,
        loss: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Tree, LearnerState, dict[str, jax.Array]]:
        """Applies one update.

        Args:
            grads: Gradients in the structure of the trainable tree.
            state: The state.
            params: The whole parameter tree.
            specs: ``model.parameter_specs()``.
            loss: The total loss; a step whose loss is not finite is skipped like one whose
                gradients are not.
            **extra: Handed to the optax transformation (such as ``value`` for line searches).

        Returns:
            New parameters, new state, and float32 scalars: ``grad_norm`` (before clipping),
            ``skipped_steps`` and, where they are wanted or found, ``update_norm`` and
            ``learning_rate``.
        """
        cfg = self.cfg
        bound = self._bind(specs)
        offloads = cfg.state_memory == "host"
        if offloads:
            state = moved(state, jax.memory.Space.Device)
        trainable, frozen = bound.layout.split(params)
        norm = global_norm(grads)
        if cfg.clip_global_norm is not None:
            grads = clip_by_norm(grads, norm, cfg.clip_global_norm)
        updates, optimizer = bound.optimizer.update(
            grads, state.optimizer, trainable, weight_decay_mask=bound.decay_mask, **extra
        )
        new: Any = optax.apply_updates(trainable, updates)
        ema = state.ema
        if ema is not None:
            keep = cfg.ema_decay
            ema = jax.tree.map(lambda e, p: keep * e + (1 - keep) * p.astype(jnp.float32), ema, new)
        one = jnp.ones((), jnp.int32)
        finite = jnp.isfinite(norm) if cfg.skip_non_finite else jnp.array(True)
        if cfg.skip_non_finite and loss is not None:
            finite &= jnp.isfinite(loss)
        if cfg.skip_non_finite:
            # A select and not a branch: it fuses into the update and keeps buffers in place.
            new, optimizer, ema = jax.tree.map(
                lambda after, before: jnp.where(finite, after, before),
                (new, optimizer, ema),
                (trainable, state.optimizer, state.ema),
            )
        skipped = jnp.where(finite, 0, one)
        new_state = LearnerState(
            updates=state.updates + one - skipped,
            skipped=state.skipped + skipped,
            skipped_in_a_row=(state.skipped_in_a_row + skipped) * skipped,
            optimizer=optimizer,
            ema=ema,
        )
        skipped_steps = new_state.skipped.astype(jnp.float32)
        if offloads:
            new_state = moved(new_state, jax.memory.Space.Host)
        metrics = {
            "grad_norm": norm,
            "skipped_steps": skipped_steps,
        }
        if cfg.report_update_norm:
            metrics["update_norm"] = jnp.where(finite, global_norm(updates), 0.0)
        schedule = self._learning_rate()
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.updates), jnp.float32)
        return bound.layout.merge(new, frozen), new_state, metrics

    # -- private ---------------------------------------------------------------------------

    def _where(self, field: str) -> str:
        return f"{self.config_path}.{field}" if self.config_path else field

    def _layout(self, specs: Mapping[str, Any]) -> Layout:
        return make_layout(specs, self.cfg.frozen_params, where=self._where("frozen_params"))

    def _bind(self, specs: Mapping[str, Any]) -> _Bound:
        layout = self._layout(specs)
        trainable = layout.trainable_specs(specs)
        optimizer = per_layer(
            _build_optimizer(self.cfg.optimizer, trainable, self._where("optimizer"))
        )
        if self.cfg.state_dtype is not None:
            optimizer = _stored_as(optimizer, self.cfg.state_dtype, trainable)
        return _Bound(
            layout, trainable, optimizer, layout.trainable_masks(self._decay_masks(specs))
        )

    def _decay_masks(self, specs: Mapping[str, Any]) -> dict[tuple[str, ...], np.ndarray]:
        flat = flatten(specs)
        paths = [p for p, s in flat.items() if s.kind == "parameter"]
        fields = ("weight_decay_include", "weight_decay_exclude")
        include, exclude = (
            leaf_masks(paths, getattr(self.cfg, f), where=self._where(f)) for f in fields
        )
        return {
            p: (np.full(lead_shape(p), flat[p].weight_decay) | include[p].mask) & ~exclude[p].mask
            for p in paths
        }

    def _check_decay_is_read(self, bound: _Bound) -> None:
        """Decay patterns that the optimizer never looks at would be silently ignored."""
        if not (self.cfg.weight_decay_include or self.cfg.weight_decay_exclude):
            return
        structs = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)), bound.specs
        )
        masks = {p: jax.ShapeDtypeStruct(lead_shape(p), bool) for p in flatten(bound.specs)}
        state = jax.eval_shape(bound.optimizer.init, structs)

        def update(mask: Tree, state: Any, params: Tree) -> Any:
            return bound.optimizer.update(params, state, params, weight_decay_mask=mask)

        traced = jax.make_jaxpr(update)(unflatten(masks), state, structs).jaxpr
        used = {id(v) for eqn in traced.eqns for v in eqn.invars}
        if not any(id(v) in used for v in traced.invars[: len(masks)]):
            raise TrainError(
                "weight decay patterns are set, but the optimizer does not read the learner's mask",
                code="AX711",
                where=self._where("optimizer"),
                hint="use the optimizers of axcore.train.optimizers, or put decayed_weights(...) "
                "before the learning rate in an optax.chain",
            )

    def _learning_rate(self) -> Callable[[Any], Any] | None:
        """Finds ``learning_rate`` in the optimizer's config: a number or a schedule."""
        for _, node in self.cfg.optimizer.walk():
            value = getattr(node, "learning_rate", None)
            if isinstance(value, Config):
                value = value.instantiate()
            if callable(value):
                return value
            if value is not None:
                return lambda step, rate=value: rate
        return None


def _build_optimizer(cfg: Config, specs: Tree, where: str) -> optax.GradientTransformation:
    """Calls the configured function; one that has a parameter ``specs`` gets the specs."""
    wants_specs = "specs" in cfg.fields()
    optimizer = cfg.instantiate(specs=specs) if wants_specs else cfg.instantiate()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TrainError(
            f"the optimizer is a {type(optimizer).__name__}, expected an optax transformation",
            code="AX715",
            where=where,
            hint="config_for(axcore.train.optimizers.adamw, learning_rate=...)",
        )
    return optimizer


def _stored_as(
    optimizer: optax.GradientTransformationExtraArgs, dtype: str, specs: Tree
) -> optax.GradientTransformationExtraArgs:
    """Stores float state that belongs to parameters in ``dtype``; the update runs in float32."""
    wide = jnp.float32

    def cast(state: Any, to: Any) -> Any:
        owners = optimizer_state_axes(jax.eval_shape(lambda: state), specs).specs
        return jax.tree.map(
            lambda x, spec: (
                x.astype(to)
                if spec.parameter is not None and jnp.issubdtype(x.dtype, jnp.floating)
                else x
            ),
            state,
            owners,
        )

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(wide), tree)

    def init(params: Any) -> Any:
        return cast(optimizer.init(widen(params)), dtype)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        params = None if params is None else widen(params)
        new, state = optimizer.update(widen(updates), cast(state, wide), params, **extra)
        return new, cast(state, dtype)

    return optax.GradientTransformationExtraArgs(init, update)
