"""Products with weights that are stored quantized: what a converted model is made of.

The layer keeps its ``weight`` at its path, in the stored dtype, and its product holds the scale:
``decoder/layer/0/feed_forward/up/weight`` int8 and ``.../up/dot/scale`` float32. Such weights are
state: no learner touches them, and an adapter (:class:`axcore.layers.LoRA`) may train beside them.
A layer with a matrix for each of several groups of rows has them in front: (groups, in, out).

Two neighbours along the last input dim share a byte of an int4 weight. (Arrays of ``jnp.int4``
would do without packing, but JAX 0.10's compiled calls refuse them for their layout.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from axcore.context import current_context
from axcore.errors import ConfigError, ModuleError
from axcore.layers.initializers import Ones, Zeros
from axcore.module import Module, ParameterSpec, no_context
from axcore.ops import BaseDotGeneral, DotGeneral
from axcore.ops.dot_general import DimensionNumbers
from axcore.quantization._grouped import contract_groups
from axcore.quantization._products import contract, labels
from axcore.quantization._values import Operand, Quantized, dequantize, quantize

__all__ = ["StoredDot", "group_size", "pack_int4", "quantize_weight", "unpack_int4"]

StoredDtype = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]


class StoredDot(DotGeneral):
    """A product with a weight stored in few bits, times its scale.

    Without ``activations`` the weight is widened as it is read and the product runs in the layer's
    dtype: what is saved is memory and its bandwidth, which bounds decoding. With them the product
    itself runs in that dtype.
    """

    class Config(DotGeneral.Config):
        """``dtype`` is the weight's."""

        dtype: StoredDtype = "int8"
        # Elements along the sum that share a scale; None: all of them, a scale per output.
        group: int | None = None
        # Dtype that activations are quantized to; a token has a scale of its own.
        activations: Literal["int8", "float8_e4m3fn"] | None = None
        # One scale for all tokens, found by calibration, instead.
        static: bool = False

    #: Whether it multiplies groups of rows too.
    in_groups = True

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        where = self.config_path or self.path
        integer = cfg.dtype.startswith("int")
        if cfg.activations is not None and cfg.activations.startswith("int") != integer:
            raise ConfigError(
                f"{cfg.activations} activations do not go with {cfg.dtype} weights: products take "
                "integers with integers and floats with floats",
                code="AX433",
                where=where,
            )
        if cfg.group is not None and cfg.activations is not None:
            raise ConfigError(
                "groups of a weight have scales that differ along the sum, so such a product "
                "cannot run on integers",
                code="AX433",
                where=where,
                hint="set group=None, or activations=None",
            )
        if cfg.static and cfg.activations is None:
            raise ConfigError(
                "a static scale is one of activations, which this product does not quantize",
                code="AX433",
                where=where,
            )
        weight = _weight_of(self)
        self._summed = weight.fan_in_dims
        first, last = self._summed[0], self._summed[-1]
        if cfg.static and first:
            raise ConfigError(
                "the product multiplies groups of rows, and data to calibrate with reach some of "
                "them seldom or never: there is no static scale for those",
                code="AX950",
                where=where,
                hint="leave such products out of this recipe with grouped=False, and store them "
                "with scales by the values at hand, by a second recipe such as "
                "int8-serving:include=PATTERN",
            )
        if cfg.dtype == "int4" and weight.shape[last] % 2:
            raise ConfigError(
                f"two int4 values share a byte, and the weight {weight.shape} has an odd number of "
                f"inputs, {weight.shape[last]}",
                code="AX436",
                where=where,
                hint="leave this layer out with exclude=, or store it as int8",
            )
        kept = [d for d in range(len(weight.shape)) if d not in self._summed]
        shape, axes = [weight.shape[d] for d in kept], [weight.axes[d] for d in kept]
        self.group: int | None = None
        if cfg.group is not None:
            self.group = group_size(weight.shape[last], cfg.group)
            shape[first:first] = [*weight.shape[first:last], weight.shape[last] // self.group]
            axes[first:first] = [*weight.axes[first:last], None]
        scale = ParameterSpec(
            tuple(shape), "float32", tuple(axes), Ones(), kind="state", fixed=True
        )
        self._add_parameter("scale", scale)
        if cfg.static:
            self._add_parameter(
                "activation_amax",
                ParameterSpec((), "float32", (), Zeros(), kind="state", fixed=True),
            )

    @property
    def operand_dtype(self) -> str | None:
        """Dtype that the product runs in; None is the layer's own."""
        return self.cfg.activations

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """What hardware must multiply."""
        return () if self.cfg.activations is None else (self.cfg.activations,)

    @no_context
    def stored_weight(self, spec: ParameterSpec) -> ParameterSpec:
        """Returns the spec in the stored dtype: no parameter, but state."""
        shape, dtype = spec.shape, self.cfg.dtype
        if dtype == "int4":
            last = spec.fan_in_dims[-1]
            shape, dtype = (*shape[:last], shape[last] // 2, *shape[last + 1 :]), "uint8"
        return dataclasses.replace(
            spec,
            shape=shape,
            dtype=dtype,
            initializer=Zeros(),
            kind="state",
            fixed=True,
            weight_decay=False,
        )

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts (..., *in) with the stored weight (*in, *out), or a group's with its own.

        Raises:
            ModuleError: The weight is not stored in this product's dtype, or it is training with
                quantized activations, which have no gradient.
        """
        ctx = current_context()
        assert ctx is not None
        lhs_dims, rhs_dims, out = labels(dimension_numbers, lhs.ndim, rhs.ndim)
        dtype = lhs.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
        a = self._activations(lhs, tuple(dimension_numbers[0][0]), ctx.state)
        b = self._weight(rhs, ctx.state["scale"], lhs.dtype)
        if self.cfg.activations is None:
            b = b._replace(values=b.values.astype(lhs.dtype))
        return contract(a, lhs_dims, b, rhs_dims, out, precision=self.cfg.precision).astype(dtype)

    @no_context
    def grouped(
        self,
        rows: jax.Array,
        weights: jax.Array,
        group_sizes: jax.Array,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Multiplies groups of rows; see :meth:`axcore.ops.DotGeneral.grouped`.

        Raises:
            ModuleError: As for :meth:`forward`.
        """
        assert state is not None
        scale = state["scale"]
        num_rows, num_groups = rows.shape[0], group_sizes.shape[0]
        if num_rows < num_groups:
            # Few rows, as in decoding: what has none of them is not even widened.
            met = jnp.nonzero(group_sizes, size=num_rows, fill_value=num_groups)[0]
            group_sizes = group_sizes.at[met].get(mode="fill", fill_value=0)
            weights, scale = (x.at[met].get(mode="clip") for x in (weights, scale))
        a = self._activations(rows, (1,), state)
        weight = self._weight(weights, scale, rows.dtype)
        return contract_groups(a, weight, group_sizes, rows.dtype)

    @property
    def takes_groups(self) -> bool:
        """Whether :meth:`grouped` stands for :meth:`forward` where rows come in groups."""
        return self.cfg.precision is None

    def _activations(
        self, x: jax.Array, summed: tuple[int, ...], state: Mapping[str, jax.Array]
    ) -> Quantized:
        if self.cfg.activations is None:
            return Quantized(x, jnp.ones((1,) * x.ndim, jnp.float32))
        ctx = current_context()
        if ctx is not None and ctx.is_training:
            raise ModuleError(
                "a product with quantized activations serves; it has no gradient",
                code="AX437",
                where=self.path,
                hint="train with a training recipe, or with weights alone quantized",
            )
        amax = state["activation_amax"] if self.cfg.static else None
        return quantize(x, Operand(self.cfg.activations), summed, amax=amax)

    def _weight(self, weight: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> Quantized:
        """Returns the weight unpacked, in ``dtype`` if it has blocks, and a scale of its rank."""
        packed = self.cfg.dtype == "int4"
        if weight.dtype != jnp.dtype("uint8" if packed else self.cfg.dtype):
            raise ModuleError(
                f"the weight is {weight.dtype}, expected one stored as {self.cfg.dtype}",
                code="AX436",
                where=self.path,
                hint="convert the model with `axcore quantize`",
            )
        first, last = self._summed[0], self._summed[-1]
        values = unpack_int4(weight, last) if packed else weight
        if self.group is None:
            return Quantized(values, jnp.expand_dims(scale, self._summed))
        split = (*values.shape[:last], -1, self.group, *values.shape[last + 1 :])
        blocks = Quantized(values.reshape(split), jnp.expand_dims(scale, last + 1))
        wide = dequantize(blocks, dtype).reshape(values.shape)
        ones = (*wide.shape[:first], *(1,) * (wide.ndim - first))
        return Quantized(wide, jnp.ones(ones, jnp.float32))


def group_size(dim: int, group: int) -> int:
    """Returns the largest divisor of ``dim`` that is at most ``group``."""
    if group < 1:
        raise ConfigError(f"group is {group}, expected at least 1", code="AX433")
    return next(g for g in range(min(group, dim), 0, -1) if dim % g == 0)


def quantize_weight(
    weight: jax.Array, num_in: int, dtype: str, group: int | None = None
) -> Quantized:
    """Quantizes a weight as a :class:`StoredDot` reads it.

    Args:
        weight: (*in, *out).
        num_in: Number of leading dims that are summed over.
        dtype: Stored dtype.
        group: Elements of the last input dim that share a scale; None: one scale per output.

    Returns:
        The weight as it is stored, and scales (*out), or (*in[:-1], groups, *out).
    """
    weight = weight.astype(jnp.float32)
    how = Operand(dtype)
    if group is None:
        q = quantize(weight, how, tuple(range(num_in)))
        scale = q.scale.reshape(weight.shape[num_in:])
        return Quantized(_packed(q.values, num_in - 1, dtype), scale)
    size = group_size(weight.shape[num_in - 1], group)
    lead = (*weight.shape[: num_in - 1], weight.shape[num_in - 1] // size)
    q = quantize(weight.reshape(*lead, size, *weight.shape[num_in:]), how, (num_in,))
    values = _packed(q.values.reshape(weight.shape), num_in - 1, dtype)
    return Quantized(values, jnp.squeeze(q.scale, num_in))


def _packed(values: jax.Array, dim: int, dtype: str) -> jax.Array:
    return pack_int4(values, dim) if dtype == "int4" else values


def pack_int4(values: jax.Array, dim: int) -> jax.Array:
    """Returns uint8 with neighbours along ``dim`` in a byte, the first in its low half.

    Args:
        values: int8 from -8 to 7; an even number of them along ``dim``.
        dim: The dim that shrinks to a half.
    """
    bits = values.astype(jnp.uint8) & 15
    low, high = (jax.lax.slice_in_dim(bits, n, None, stride=2, axis=dim) for n in (0, 1))
    return low | (high << 4)


def unpack_int4(packed: jax.Array, dim: int) -> jax.Array:
    """Returns the int8 values of :func:`pack_int4`."""
    shape = (*packed.shape[:dim], 2 * packed.shape[dim], *packed.shape[dim + 1 :])
    shifts = jnp.array([0, 4], jnp.uint8).reshape(2, *(1,) * (packed.ndim - dim - 1))
    # One expression for both halves, not a concatenation, so that it joins what reads it.
    bits = (jnp.expand_dims(packed, dim + 1) >> shifts) & 15
    return ((bits ^ 8).astype(jnp.int8) - 8).reshape(shape)  # the sign is the fourth bit


def _weight_of(dot: BaseDotGeneral) -> ParameterSpec:
    """Returns the spec of the weight that the owner contracts, behind any wrapper."""
    spec = dot.contracted_weight
    summed = () if spec is None else spec.fan_in_dims
    if spec is None or not summed or summed != tuple(range(summed[0], summed[-1] + 1)):
        raise ConfigError(
            "a stored weight needs a layer that owns it, with neighbouring dims that are summed",
            code="AX436",
            where=dot.config_path or dot.path,
            hint="make it the `dot` of a Linear",
        )
    return spec
