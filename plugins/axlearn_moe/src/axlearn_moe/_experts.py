"""The experts of a mixture: feed-forward networks of one shape with weights in common arrays."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers import BaseGroupedLinear, Linear
from axcore.layers.base import Layer
from axcore.module import ParameterSpec, no_context
from axcore.ops import BaseDotGeneral
from axcore.parallel import Axis
from axcore.remat import site, weight_product

__all__ = ["EXPERT_BATCH", "EXPERT_MLP", "BaseExperts", "ClampedGLU", "ExpertLinear", "Experts"]

EXPERT_MLP = Axis("expert_mlp", like="mlp", description="hidden units of an expert")
# Not over the mesh axis of the experts, which an array with both dims has already used.
EXPERT_BATCH = Axis(
    "expert_batch", rule=(("data", "fsdp"), ()), description="rows beside a dim of experts"
)
Weights = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ClampedGLU:
    r"""The gated product of GPT-OSS: :math:`(u' + 1)\, g'\, \sigma(\alpha g')`.

    With :math:`g' = \min(g, \mathrm{limit})` and :math:`u'` the up projection within the limits.

    Attributes:
        alpha: Steepness of the sigmoid.
        limit: Where the two projections are cut off.

    References:
        gpt-oss model card, arXiv:2508.10925, section 2.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns the product, of equal shapes and dtype."""
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(self.alpha * gate))


class ExpertLinear(BaseGroupedLinear):
    """A linear map for each expert: weight (experts, in, out), bias (experts, out)."""

    class Config(BaseGroupedLinear.Config):
        """:class:`Experts` sets all of these; ``linear`` says what one expert's map is like."""

        num_experts: Required[int] = REQUIRED
        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        linear: Linear.Config = Linear.Config()
        # Logical axes of one expert's weight.
        axes: tuple[str | None, ...] = ("embed", "expert_mlp")

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        linear = cfg.linear
        if linear.target is not Linear:
            raise ModuleError(
                f"experts are made of plain Linear, got {linear.target.__name__}",
                code="AX914",
                where=self.config_path,
                hint="leave it out for the experts, by a pattern of paths for instance",
            )
        self._add_weight(
            "weight",
            (cfg.num_experts, cfg.input_dim, cfg.output_dim),
            ("experts", *cfg.axes),
            linear.weight_init,
            fan_in_dims=(1,),
            fan_out_dims=(2,),
        )
        if linear.bias:
            shape = (cfg.num_experts, cfg.output_dim)
            axes = ("experts", cfg.axes[1])
            self._add_weight("bias", shape, axes, linear.bias_init, weight_decay=False)
        self.dot = self._add_child("dot", linear.dot, BaseDotGeneral)
        spec = self._specs["weight"]
        self._specs["weight"] = self.dot.stored_weight(spec)
        # Such a product reads the weight as it is; others get it in the compute dtype.
        self._reads_stored = self._specs["weight"] is not spec

    @property
    def takes_groups(self) -> bool:
        """Whether the product multiplies groups of rows too."""
        return self.dot.takes_groups

    @no_context
    def grouped(self, rows: jax.Array, arrays: Weights, sizes: jax.Array) -> jax.Array:
        """Multiplies rows that are sorted by expert; see :meth:`BaseExperts.grouped`."""
        state = {name: arrays[f"dot/{name}"] for name in self.dot.group_specs}
        return weight_product(self.dot.grouped(rows, arrays["weight"], sizes, state))

    def arrays(self) -> dict[str, jax.Array]:
        """Returns ``weight``, ``bias`` and, as ``dot/...``, what the product keeps."""
        bias = {name: self._param(name) for name in self._specs if name != "weight"}
        weight = self._weight()
        of_dot = {f"dot/{name}": value for name, value in self.dot.group_state(weight).items()}
        return {"weight": weight, **bias, **of_dot}

    @property
    def array_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of :meth:`arrays`."""
        weight = self._specs["weight"]

        def axes(spec: ParameterSpec) -> tuple[str | None, ...]:
            # Scales of the blocks of a matrix lie where those do.
            of_blocks = spec.kind == "state" and len(spec.shape) == len(weight.shape)
            return weight.axes if of_blocks else spec.axes

        of_dot = {f"dot/{name}": axes(spec) for name, spec in self.dot.group_specs.items()}
        return {**{name: spec.axes for name, spec in self._specs.items()}, **of_dot}

    def forward(self, x: jax.Array) -> jax.Array:
        """(experts, rows, in) -> (experts, rows, out)."""
        y = weight_product(self.dot(x, self._weight(), (((2,), (1,)), ((0,), (0,)))))
        return y + self._param("bias")[:, None] if self.cfg.linear.bias else y

    def _weight(self) -> jax.Array:
        held = self._context.state.get("weight") if self._reads_stored else None
        return self._param("weight") if held is None else held


class BaseExperts(Layer):
    """Role of the experts: rows in, rows out, each row by one expert."""

    class Config(Layer.Config):
        """The mixture sets all of these; ``up``, ``gate`` and ``down`` are those of one expert."""

        num_experts: Required[int] = REQUIRED
        input_dim: Required[int] = REQUIRED
        hidden_dim: Required[int] = REQUIRED
        activation: Required[str] = REQUIRED
        up: Required[Linear.Config] = REQUIRED
        gate: Linear.Config | None = None
        down: Required[Linear.Config] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array) -> jax.Array:
        """(experts, rows, input_dim) -> the same shape."""

    @abc.abstractmethod
    def weights(self) -> dict[str, jax.Array]:
        """Returns the arrays that :meth:`grouped` reads, as it reads them."""

    @property
    @abc.abstractmethod
    def weight_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of those arrays: ``experts`` first, ``expert_mlp`` where split."""

    @no_context
    @abc.abstractmethod
    def grouped(
        self, weights: Weights, rows: jax.Array, sizes: jax.Array, *, is_first: Any = True
    ) -> jax.Array:
        """Returns what the experts make of rows that are sorted by expert.

        A function of its arguments alone, so that a device can run it on its experts. Results of a
        split ``expert_mlp`` are partial sums.

        Args:
            weights: As :meth:`weights` returns them, or a device's part of them.
            rows: (rows, input_dim).
            sizes: int32 (experts,), rows of each; what follows them is not computed.
            is_first: Whether this device adds what must be added once.
        """


class Experts(BaseExperts):
    """Each expert is a feed-forward network: ``down(act(up(x)))`` or ``down(act(gate(x)) up(x))``.

    Parameters: ``up/weight`` and ``gate/weight`` (experts, embed, expert_mlp), ``down/weight``
    (experts, expert_mlp, embed), and ``*/bias`` (experts, dim) where the config asks for them.
    """

    class Config(BaseExperts.Config):
        """The mixture sets the fields of the role."""

        # What a gate does, in place of ``activation(gate) * up``.
        glu: ClampedGLU | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        if cfg.glu is not None and cfg.gate is None:
            raise ModuleError(
                "glu is set and there is no gate",
                code="AX914",
                where=self.config_path,
                hint="set gate=Linear.Config(...) of the mixture",
            )
        self.up = self._linear("up", cfg.up, cfg.input_dim, cfg.hidden_dim)
        self.gate: ExpertLinear | None = None
        if cfg.gate is not None:
            self.gate = self._linear("gate", cfg.gate, cfg.input_dim, cfg.hidden_dim)
        self.down = self._linear("down", cfg.down, cfg.hidden_dim, cfg.input_dim)
        self._activation = ops.activation(cfg.activation)

    def _linear(
        self, name: str, linear: Linear.Config, input_dim: int, output_dim: int
    ) -> ExpertLinear:
        cfg = ExpertLinear.Config(linear=linear)
        cfg.axes = ("expert_mlp", "embed") if name == "down" else ("embed", "expert_mlp")
        own = {n: getattr(linear, n) for n in self.inherited_fields if getattr(linear, n)}
        mixture = self.config_path.rpartition(".")[0]
        return self._add_child(
            name,
            cfg,
            ExpertLinear,
            config_path=f"{mixture}.{name}" if mixture else name,  # the mixture's field
            num_experts=self.cfg.num_experts,
            input_dim=input_dim,
            output_dim=output_dim,
            **own,
        )

    @property
    def takes_groups(self) -> bool:
        """Whether every product multiplies groups of rows too."""
        return all(linear.takes_groups for linear in self._linears.values())

    @property
    def _linears(self) -> dict[str, ExpertLinear]:
        named = {"up": self.up, "gate": self.gate, "down": self.down}
        return {name: linear for name, linear in named.items() if linear is not None}

    def forward(self, x: jax.Array) -> jax.Array:
        """(experts, rows, input_dim) -> the same shape."""
        x = x.astype(self.compute_dtype)
        axes = ("experts", "expert_batch", "expert_mlp")
        up = self._constrain(site(self.up(x), "ffn_hidden"), *axes)
        gate = None
        if self.gate is not None:
            gate = self._constrain(site(self.gate(x), "ffn_gate"), *axes)
        return self.down(self._hidden(gate, up))

    def weights(self) -> dict[str, jax.Array]:
        """Returns ``{"up/weight": array, ...}``, each with a dim of experts in front."""
        return {
            f"{name}/{key}": value
            for name, linear in self._linears.items()
            for key, value in linear.arrays().items()
        }

    @property
    def weight_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the arrays of :meth:`weights`."""
        return {
            f"{name}/{key}": axes
            for name, linear in self._linears.items()
            for key, axes in linear.array_axes.items()
        }

    @no_context
    def grouped(
        self, weights: Weights, rows: jax.Array, sizes: jax.Array, *, is_first: Any = True
    ) -> jax.Array:
        """Returns what the experts make of rows that are sorted by expert; see the role."""
        has_bias = any(linear.cfg.linear.bias for linear in self._linears.values())
        of_row = ops.group_of_rows(sizes, rows.shape[0]) if has_bias else None

        def product(name: str, x: jax.Array) -> jax.Array:
            start = f"{name}/"
            own = {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
            y = self._linears[name].grouped(x, own, sizes)
            if of_row is None or "bias" not in own:
                return y
            bias = own["bias"][of_row]
            return y + (jnp.where(is_first, bias, 0) if name == "down" else bias)

        rows = rows.astype(self.compute_dtype)
        up = site(product("up", rows), "ffn_hidden")
        gate = None if self.gate is None else site(product("gate", rows), "ffn_gate")
        return product("down", self._hidden(gate, up))

    def _hidden(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        if gate is None:
            return self._activation(up)
        if self.cfg.glu is not None:
            return self.cfg.glu(gate, up)
        return ops.gated_activation(gate, up, self.cfg.activation)
