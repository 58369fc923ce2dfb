"""float8 with scales from earlier steps ("delayed scaling")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from axcore.context import current_context
from axcore.errors import ConfigError, ModuleError
from axcore.layers.initializers import Zeros
from axcore.module import Module, ParameterSpec, no_context
from axcore.quantization._dots import QuantizedDot, check_float8
from axcore.quantization._grouped import quantized_grouped_product
from axcore.quantization._products import Magnitudes, Plan
from axcore.quantization._values import Operand

__all__ = ["DelayedFp8Dot", "is_recipe_state"]

_LHS = "lhs_amax"
# Of the weights: of all of them, and with channels of each output and of each input.
_RHS, _RHS_OUT, _RHS_IN = "rhs_amax", "rhs_out_amax", "rhs_in_amax"


def is_recipe_state(path: str) -> bool:
    """Whether a state path is of what a training recipe remembers, which other models can miss."""
    return path.rsplit("/", 1)[-1] in (_LHS, _RHS, _RHS_OUT, _RHS_IN)


class DelayedFp8Dot(QuantizedDot):
    """float8 whose operands' scales come from the largest magnitudes of earlier steps.

    Quantizing then waits for no pass over the tensor. The history is state of this module, set by
    training steps and read by all; until it has one, and where it holds zeros only, the magnitude
    at hand is taken. The gradient's scale is always taken from the gradient at hand: what the
    backward pass measures could leave it only as a gradient of something.

    With ``granularity="channel"`` each output of the weights has a history, and each input has one
    for the product that gives the gradient of the activations, which sums over the outputs: 4 bytes
    x ``history_length`` x (inputs + outputs). Activations have one scale in either case, for a
    token is another one in each step.

    Of groups of rows, such as those of a mixture's experts, each group's matrix has a history of
    its own, and each row a scale of the values at hand: which rows come, and how many, changes from
    step to step.
    """

    class Config(QuantizedDot.Config):
        """Formats, what shares a scale, and the history."""

        dtype: str = "float8_e4m3fn"
        grad_dtype: str = "float8_e5m2"
        granularity: Literal["tensor", "channel"] = "tensor"
        # Steps that are looked back on; the largest magnitude among them counts.
        history_length: int = 128
        # The scale leaves room for magnitudes that grow by this factor within a step.
        headroom: float = 1.0

    needs_context = True

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        check_float8(self)
        if cfg.history_length < 1 or not cfg.headroom >= 1.0:
            raise ConfigError(
                f"history_length is {cfg.history_length} and headroom {cfg.headroom}, expected at "
                "least 1 of each",
                code="AX433",
                where=self.config_path or self.path,
            )
        weight = self.contracted_weight
        summed = () if weight is None else weight.fan_in_dims
        if cfg.granularity == "channel" and not summed:
            raise ConfigError(
                "channels are those of a weight, and no layer that owns this product has one with "
                "dims that are summed",
                code="AX436",
                where=self.config_path or self.path,
                hint="make it the `dot` of a Linear, or take granularity='tensor'",
            )
        # Dims of the weight that each of its histories has.
        groups = tuple(range(summed[0])) if summed else ()
        self._kept: dict[str, tuple[int, ...]] = {_RHS: groups}
        if cfg.granularity == "channel":
            assert weight is not None
            outputs = [d for d in range(len(weight.shape)) if d not in (*groups, *summed)]
            self._kept = {_RHS_OUT: (*groups, *outputs), _RHS_IN: (*groups, *summed)}
        self.plan = Plan(
            lhs=Operand(cfg.dtype, "channel" if groups else "tensor"),
            rhs=Operand(cfg.dtype, cfg.granularity),
            grad=Operand(cfg.grad_dtype, "channel" if groups else cfg.granularity),
            precision=cfg.precision,
        )
        shape, axes = ((), ()) if weight is None else (weight.shape, weight.axes)
        scalar = ParameterSpec((), "float32", (), Zeros(), kind="state", optional=True)
        self._magnitude_specs = {
            name: dataclasses.replace(
                scalar, shape=tuple(shape[d] for d in kept), axes=tuple(axes[d] for d in kept)
            )
            for name, kept in self._kept.items()
        }
        histories = self._magnitude_specs if groups else {_LHS: scalar, **self._magnitude_specs}
        for name, spec in histories.items():
            whole = (cfg.history_length, *spec.shape)
            self._add_parameter(
                name, dataclasses.replace(spec, shape=whole, axes=(None, *spec.axes))
            )

    @property
    def takes_groups(self) -> bool:
        """Whether :meth:`grouped` stands for :meth:`forward` where rows come in groups."""
        return True

    @property
    def group_specs(self) -> dict[str, ParameterSpec]:
        """What describes the arrays of :meth:`group_state`: magnitudes, without their history."""
        return self._magnitude_specs

    def group_state(self, weights: jax.Array) -> dict[str, jax.Array]:
        """Returns the magnitudes that scale each group's matrix, and notes those at hand."""
        return self._of_weights(weights)

    @no_context
    def grouped(
        self,
        rows: jax.Array,
        weights: jax.Array,
        group_sizes: jax.Array,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Multiplies groups of rows; see :meth:`axcore.ops.DotGeneral.grouped`."""
        assert state is not None
        magnitudes = self._spread(state, weights.ndim)
        return quantized_grouped_product(
            self.plan, rows, weights, group_sizes, magnitudes=magnitudes
        )

    def _magnitudes(self, lhs: jax.Array, rhs: jax.Array) -> Magnitudes:
        magnitudes = self._spread(self._of_weights(rhs), rhs.ndim)
        if _LHS not in self._specs:
            return magnitudes
        return magnitudes._replace(lhs=self._from_history(_LHS, lhs, ()))

    def _of_weights(self, weights: jax.Array) -> dict[str, jax.Array]:
        return {name: self._from_history(name, weights, kept) for name, kept in self._kept.items()}

    def _spread(self, state: Mapping[str, jax.Array], ndim: int) -> Magnitudes:
        """Gives magnitudes the rank of the weights."""

        def spread(name: str) -> jax.Array:
            shared = [d for d in range(ndim) if d not in self._kept[name]]
            return jnp.expand_dims(state[name], shared)

        forward, back = (_RHS, _RHS) if _RHS in self._kept else (_RHS_OUT, _RHS_IN)
        return Magnitudes(rhs=spread(forward), rhs_back=spread(back))

    def _from_history(self, name: str, x: jax.Array, kept: tuple[int, ...]) -> jax.Array:
        """Returns the magnitudes that scale ``x``, of its dims ``kept``; notes those at hand."""
        ctx = current_context()
        if ctx is None or name not in ctx.state:
            raise ModuleError(
                f"the state given has no history {name!r}",
                code="AX328",
                where=self.path,
                hint="pass the whole state that module.initialize(key) returned",
            )
        history = ctx.state[name]
        shared = tuple(d for d in range(x.ndim) if d not in kept)
        now = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=shared).astype(jnp.float32)
        if ctx.is_training:
            # The largest over repeated calls, microbatches and replicas: the older entries are
            # equal in all of them.
            ctx.set_state(name, jnp.concatenate([now[None], history[:-1]]), reduction="max")
        before = jnp.max(history, axis=0)
        return jnp.where(before > 0, before * self.cfg.headroom, now)
