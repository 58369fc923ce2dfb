"""Optimizers: thin configurations of optax with one rule for weight decay.

Each function returns an optax transformation and takes ``learning_rate`` as a float or a schedule
(see :mod:`axcore.train.schedules`). In a config: ``config_for(adamw, learning_rate=3e-4)``. Any
other optax transformation works as well: ``config_for(optax.adan, 1e-3)``.

**Weight decay** is decoupled in all of them: the update is ``-lr * (direction + decay * p)``, and
*which* parameters decay is the learner's say, by parameter path. The learner hands its mask to
``update`` as optax's extra argument ``weight_decay_mask``; :func:`decayed_weights` is the one
transformation that reads it, so ``optax.chain(my_rule, decayed_weights(0.1),
optax.scale_by_learning_rate(lr))`` obeys the same patterns. optax's own ``weight_decay=`` arguments
know nothing of them.

**Specs**: an optimizer function that has a parameter ``specs`` gets the nested
:class:`~axcore.module.ParameterSpec` of the trainable parameters from the learner
(:func:`muon` learns from them what a matrix is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from axcore.collection import expand_path
from axcore.errors import TrainError
from axcore.train._paths import flatten, lead_shape

__all__ = ["adafactor", "adamw", "decayed_weights", "lion", "muon", "sgd"]

ScalarOrSchedule: TypeAlias = float | Callable[[Any], Any]
Transformation: TypeAlias = optax.GradientTransformationExtraArgs


class DecayState(NamedTuple):
    """State of a scheduled weight decay: int32 scalar, updates made so far."""

    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]


def decayed_weights(weight_decay: ScalarOrSchedule) -> Transformation:
    """Adds ``weight_decay * p`` to the updates of the parameters that the learner's mask names.

    Args:
        weight_decay: Coefficient, or a schedule of it.

    Returns:
        A transformation that reads the extra argument ``weight_decay_mask``: a tree like the
        parameters with a bool per leaf (or a traced bool scalar per layer); None decays them all.
    """

    def init(params: Any) -> DecayState | optax.EmptyState:
        del params
        if callable(weight_decay):
            return DecayState(jnp.zeros([], jnp.int32))
        return optax.EmptyState()

    def update(
        updates: Any, state: Any, params: Any = None, *, weight_decay_mask: Any = None, **_: Any
    ) -> Any:
        if params is None:
            raise ValueError("decayed_weights needs the parameters: call update(..., params)")
        if callable(weight_decay):
            rate = weight_decay(state.count)
            state = DecayState(optax.safe_increment(state.count))
        else:
            rate = weight_decay
        # By path: a partitioned transformation shows only some of the parameters.
        mask = dict(jax.tree_util.tree_flatten_with_path(weight_decay_mask)[0])

        def decay(path: Any, u: jax.Array, p: jax.Array) -> jax.Array:
            chosen = True if weight_decay_mask is None else mask[path]
            if isinstance(chosen, bool):
                none = not chosen or (isinstance(rate, (int, float)) and rate == 0)
                return u if none else u + rate * p
            return u + jnp.where(chosen, rate * p, jnp.zeros_like(p))

        return jax.tree_util.tree_map_with_path(decay, updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check(**rates: ScalarOrSchedule) -> None:
    """Raises TrainError unless numbers are finite and not negative, and decay rates below 1."""
    for name, rate in rates.items():
        if isinstance(rate, str):  # of a flag, say
            raise TrainError(
                f"{name} must be a number or a schedule, got {rate!r}",
                code="AX701",
                where="learner.optimizer",
            )
        limit = 1.0 if name in ("b1", "b2") else math.inf
        if isinstance(rate, int | float) and not 0 <= rate < limit:
            expected = "from 0 to below 1" if limit == 1.0 else "of at least 0"
            raise TrainError(
                f"{name} must be a number {expected}, got {rate}",
                code="AX701",
                where="learner.optimizer",
            )


def _descend(
    *direction: optax.GradientTransformation,
    weight_decay: ScalarOrSchedule,
    learning_rate: ScalarOrSchedule,
) -> Transformation:
    _check(learning_rate=learning_rate, weight_decay=weight_decay)
    return optax.chain(
        *direction, decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate)
    )


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    mu_dtype: str | None = None,
    nesterov: bool = False,
) -> Transformation:
    """Adam with decoupled weight decay; the update of ``optax.adamw``.

    Args:
        learning_rate: Step size or schedule.
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        mu_dtype: Dtype name in which the first moment is kept; default that of the parameters.
        nesterov: Whether to use Nesterov momentum.

    References:
        Loshchilov and Hutter, arXiv:1711.05101.
    """
    _check(b1=b1, b2=b2, eps=eps)
    return _descend(
        optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype, nesterov=nesterov),
        weight_decay=weight_decay,
        learning_rate=learning_rate,
    )


def adafactor(
    learning_rate: ScalarOrSchedule,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    momentum_dtype: str = "float32",
    weight_decay: ScalarOrSchedule = 0.0,
    eps: float = 1e-30,
) -> Transformation:
    """Adafactor: a factored second moment, so its state is far smaller than the parameters.

    The parts of ``optax.adafactor``, except that the learning rate comes last: momentum averages
    directions rather than steps, and the weight decay is multiplied by the learning rate as in
    every optimizer here.

    Args:
        learning_rate: Step size, relative to the parameter's scale, or schedule.
        min_dim_size_to_factor: Factor only when two dims are at least this large.
        decay_rate: Exponent of the second moment's decay schedule ``1 - t**-decay_rate``.
        multiply_by_parameter_scale: Whether steps are relative to a parameter's RMS.
        clipping_threshold: Largest RMS of a parameter's update, or None.
        momentum: Decay rate of a moving average of updates, or None for no such state.
        momentum_dtype: Dtype name in which it is kept.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        eps: Added to squared gradients.

    References:
        Shazeer and Stern, arXiv:1804.04235.
    """
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor, epsilon=eps
        )
    ]
    if clipping_threshold is not None:
        parts.append(optax.clip_by_block_rms(clipping_threshold))
    if multiply_by_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    if momentum is not None:
        parts.append(optax.ema(momentum, debias=False, accumulator_dtype=momentum_dtype))
    return _descend(*parts, weight_decay=weight_decay, learning_rate=learning_rate)


def lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: ScalarOrSchedule = 0.0,
    mu_dtype: str | None = None,
) -> Transformation:
    """Lion: the sign of an interpolated momentum; the update of ``optax.lion``.

    Args:
        learning_rate: Step size (a third to a tenth of AdamW's) or schedule.
        b1: Weight of the momentum in the sign.
        b2: Decay rate of the momentum.
        weight_decay: Decoupled decay (three to ten times AdamW's), multiplied by the learning rate.
        mu_dtype: Dtype name in which the momentum is kept; default that of the parameters.

    References:
        Chen et al., arXiv:2302.06675.
    """
    _check(b1=b1, b2=b2)
    return _descend(
        optax.scale_by_lion(b1, b2, mu_dtype),
        weight_decay=weight_decay,
        learning_rate=learning_rate,
    )


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: ScalarOrSchedule = 0.0,
    momentum_dtype: str | None = None,
) -> Transformation:
    """Stochastic gradient descent; the update of ``optax.sgd``, with decoupled weight decay.

    Args:
        learning_rate: Step size or schedule.
        momentum: Decay rate of the summed gradients, or None for no such state.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        momentum_dtype: Dtype name in which the momentum is kept.
    """
    parts = []
    if momentum is not None:
        parts.append(optax.trace(momentum, nesterov, momentum_dtype))
    return _descend(*parts, weight_decay=weight_decay, learning_rate=learning_rate)


def muon(
    learning_rate: ScalarOrSchedule,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    weight_decay: ScalarOrSchedule = 0.0,
    consistent_rms: float | None = None,
    adam_scale: float = 1.0,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: str | None = None,
    adam_axes: tuple[str, ...] = ("vocab",),
    specs: Mapping[str, Any] | None = None,
) -> Transformation:
    """Muon: orthogonalized momentum for matrices, AdamW for the rest (``optax.contrib.muon``).

    With ``specs`` a matrix is a parameter that has fan-in and fan-out dims: several dims on a side
    (heads x head_dim) are flattened, and dims on neither side (experts) are separate matrices.
    Without, it is an array of rank 2. Scanned layers are separate matrices either way.

    Args:
        learning_rate: Step size or schedule.
        beta: Decay rate of the momentum.
        ns_steps: Newton-Schulz iterations.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Decoupled decay, multiplied by the learning rate; for all parameters.
        consistent_rms: Scales updates by ``sqrt(max(fan_in, fan_out)) * consistent_rms``; 0.2
            matches AdamW's RMS, so its learning rates carry over. None: width scaling.
        adam_scale: Learning rate of AdamW's part, as a multiple of ``learning_rate``.
        adam_b1: Adam's decay rate of the first moment.
        adam_b2: Adam's decay rate of the second moment.
        eps: Added to denominators.
        mu_dtype: Dtype name in which momenta are kept; default that of the parameters.
        adam_axes: Parameters with one of these logical axes (embeddings, heads) go to AdamW.
        specs: Nested specs of the parameters; the learner fills them in.

    References:
        Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982.
    """
    inner = optax.contrib.muon(
        1.0,
        ns_steps=ns_steps,
        beta=beta,
        eps=eps,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_learning_rate=adam_scale,
        consistent_rms=consistent_rms,
        muon_weight_dimension_numbers=None if specs is None else _matrix_dims(specs, adam_axes),
    )
    # Two exact sign flips let the learning rate come after the weight decay.
    return _descend(
        inner, optax.scale(-1.0), weight_decay=weight_decay, learning_rate=learning_rate
    )


def _matrix_dims(specs: Mapping[str, Any], adam_axes: tuple[str, ...]) -> Callable[[Any], Any]:
    """Returns ``params -> tree of MuonDimensionNumbers or None``, for single layers and stacks."""
    known: dict[tuple[str, ...], tuple[int, MuonDimensionNumbers | None]] = {}
    for path, spec in flatten(specs).items():
        lead = len(lead_shape(path))
        dims = None
        if spec.fan_in_dims and spec.fan_out_dims and not set(adam_axes) & set(spec.axes):
            dims = MuonDimensionNumbers(
                tuple(d - lead for d in spec.fan_in_dims),
                tuple(d - lead for d in spec.fan_out_dims),
            )
        entry = (len(spec.shape) - lead, dims)
        known[path] = entry
        known.update((tuple(n.split("/")), entry) for n, _ in expand_path("/".join(path)))

    def dims_of(params: Any) -> Any:
        def one(path: Any, x: Any) -> MuonDimensionNumbers | None:
            rank, dims = known[tuple(key.key for key in path)]
            extra = x.ndim - rank  # layer axes, when the array is a stack
            if dims is None or extra == 0:
                return dims
            return MuonDimensionNumbers(
                tuple(d + extra for d in dims.reduction_axis),  # pyright: ignore[reportGeneralTypeIssues]
                tuple(d + extra for d in dims.output_axis),  # pyright: ignore[reportGeneralTypeIssues]
            )

        return jax.tree_util.tree_map_with_path(one, params)

    return dims_of
