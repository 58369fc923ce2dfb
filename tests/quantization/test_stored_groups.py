"""Stored weights with a matrix for each group of rows, against float64 and its error bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.config import REQUIRED, Required
from axcore.errors import ConfigError, ModuleError
from axcore.layers.initializers import VarianceScaling
from axcore.layers.roles import BaseGroupedLinear
from axcore.module import flatten_specs
from axcore.ops import DotGeneral
from axcore.quantization import StoredDot, quantize_weight
from axcore.quantization._stored import unpack_int4

E, K, N, BLOCK = 4, 24, 10, 8
MANY = np.array([7, 0, 11, 3], np.int32)
FEW = np.array([0, 2, 0, 1], np.int32)  # fewer rows than groups
WEIGHTS = {
    "int8": StoredDot.Config(dtype="int8"),
    "int4": StoredDot.Config(dtype="int4", group=BLOCK),
    "fp8": StoredDot.Config(dtype="float8_e4m3fn"),
}
ACTIVATIONS = {
    "int8": StoredDot.Config(dtype="int8", activations="int8"),
    "int4": StoredDot.Config(dtype="int4", activations="int8"),
    "fp8": StoredDot.Config(dtype="float8_e4m3fn", activations="float8_e4m3fn"),
}


class GroupedLinear(BaseGroupedLinear):
    """A matrix for each group, as a plugin's layer would describe it."""

    class Config(BaseGroupedLinear.Config):
        """The product."""

        dot: Required[DotGeneral.Config] = REQUIRED
        num_inputs: int = K

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._add_weight(
            "weight",
            (E, cfg.num_inputs, N),
            ("experts", "embed", "mlp"),
            VarianceScaling(),
            fan_in_dims=(1,),
            fan_out_dims=(2,),
        )
        self.dot = self._add_child("dot", cfg.dot, DotGeneral)
        self._specs["weight"] = self.dot.stored_weight(self._specs["weight"])

    def forward(self, x):
        """(E, rows, K) -> (E, rows, N)."""
        return self.dot(x, self._context.state["weight"], (((2,), (1,)), ((0,), (0,))))

    def sorted(self, rows, sizes):
        """(rows, K) -> (rows, N)."""
        state = self._context.state
        return self.dot.grouped(rows, state["weight"], sizes, state["dot"])


def arrays(num_rows: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((num_rows, K), (E, K, N)))
    x *= np.exp(rng.normal(size=(num_rows, 1))).astype(np.float32)  # rows of different size
    w *= np.exp(rng.normal(size=(E, 1, N))).astype(np.float32)  # outputs too, in each group
    return x, w


def stored(dot, w):
    """A layer and its state; each group's matrix is stored as if it were alone."""
    module = GroupedLinear.Config(dot=dot).instantiate(name="layer")
    each = [quantize_weight(jnp.asarray(m), 1, dot.dtype, dot.group) for m in w]
    state = {
        "weight": jnp.stack([q.values for q in each]),
        "dot": {"scale": jnp.stack([q.scale for q in each])},
    }
    want = flatten_specs(module.parameter_specs())
    assert {p: (s.shape, s.dtype) for p, s in want.items()} == {
        "weight": (state["weight"].shape, state["weight"].dtype.name),
        "dot/scale": (state["dot"]["scale"].shape, "float32"),
    }
    return module, state


def read(dot, state):
    """What the stored bits say, in float64: the weights, and the size of a step of each."""
    values, scale = state["weight"], np.asarray(state["dot"]["scale"], np.float64)
    if dot.dtype == "int4":
        values = unpack_int4(values, 1)
    if dot.group is None:
        steps = np.broadcast_to(scale[:, None], values.shape)
    else:
        steps = np.repeat(scale, dot.group, axis=1)
    return np.asarray(values, np.float64) * steps, steps


def multiply(x, w, sizes):
    """Each row times its group's matrix, in the arrays' dtype; rows past the groups are zero."""
    y, start = np.zeros((len(x), w.shape[2]), w.dtype), 0
    for matrix, size in zip(w, sizes, strict=True):
        y[start : start + size] = x[start : start + size] @ matrix
        start += size
    return y


def by_groups(module, state, x, sizes):
    def call(state, x):
        inputs = (x, jnp.asarray(sizes))
        return functional(module, state=state, inputs=inputs, is_training=False, method="sorted")[0]

    return np.asarray(jax.jit(call)(state, jnp.asarray(x)))


def all_by_all(module, state, x):
    def call(state, x):
        inputs = (jnp.broadcast_to(x, (E, *x.shape)),)
        return functional(module, state=state, inputs=inputs, is_training=False)[0]

    return np.asarray(jax.jit(call)(state, jnp.asarray(x)))


@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many_rows", "few_rows"])
@pytest.mark.parametrize("dot", WEIGHTS.values(), ids=WEIGHTS)
def test_groups_are_multiplied_by_what_is_stored_for_them(dot, sizes):
    x, w = arrays(sizes.sum() + (2 if sizes is MANY else 0))  # two rows belong to no group
    module, state = stored(dot, w)
    wide, steps = read(dot, state)
    got = by_groups(module, state, x, sizes)
    size = multiply(np.abs(x), np.abs(wide), sizes)
    # float32 sums of 24 numbers, and one product more with the scale.
    assert np.all(np.abs(got - multiply(x, wide, sizes)) <= 1e-6 * size + 1e-30)
    # Rounding is to the nearest: half a step of an integer, half of the last of three bits, or of
    # the step of what is too small to have them.
    error = 0.5 * steps if dot.dtype.startswith("int") else 2.0**-4 * np.abs(w) + 2.0**-10 * steps
    bound = multiply(np.abs(x), error, sizes)
    exact = multiply(x, w.astype(np.float64), sizes)
    assert np.all(np.abs(got - exact) <= bound * (1 + 1e-5))
    assert np.abs(got - exact).max() > 0


@pytest.mark.parametrize("sizes", [MANY, FEW], ids=["many_rows", "few_rows"])
@pytest.mark.parametrize("dot", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_quantized_rows_have_a_scale_each(dot, sizes):
    x, w = arrays(sizes.sum())
    module, state = stored(dot, w)
    wide, _ = read(dot, state)
    largest = np.abs(x).max(1, keepdims=True)
    integer = dot.dtype.startswith("int")
    rounding = largest / 254 if integer else 2.0**-4 * np.abs(x) + 2.0**-10 * largest / 448
    bound = multiply(np.broadcast_to(rounding, x.shape), np.abs(wide), sizes)
    error = by_groups(module, state, x, sizes) - multiply(x, wide, sizes)
    assert np.all(np.abs(error) <= bound * (1 + 1e-5))
    assert np.abs(error).max() > 0


@pytest.mark.parametrize(
    "dot",
    [*WEIGHTS.values(), *ACTIVATIONS.values()],
    ids=[*WEIGHTS, *(f"{name}_activations" for name in ACTIVATIONS)],
)
def test_sorted_rows_and_a_dim_of_groups_give_the_same(dot):
    x, w = arrays(MANY.sum())
    module, state = stored(dot, w)
    batched = all_by_all(module, state, x)
    of_row = np.repeat(np.arange(E), MANY)
    expected = batched[of_row, np.arange(len(x))]
    # The same products, added up in another order; those of integers are exact.
    np.testing.assert_allclose(by_groups(module, state, x, MANY), expected, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_others():
    """So groups may be split over devices, each with some of the rows."""
    x, w = arrays(MANY.sum())
    for dot in (*WEIGHTS.values(), *ACTIVATIONS.values()):
        module, state = stored(dot, w)
        alone = np.array([0, 0, 11, 0], np.int32)
        whole = by_groups(module, state, x, MANY)[7:18]
        np.testing.assert_allclose(by_groups(module, state, x[7:18], alone), whole, rtol=1e-5)


def test_the_same_call_gives_the_same_bits():
    x, w = arrays(MANY.sum())
    module, state = stored(WEIGHTS["int4"], w)
    first, second = (by_groups(module, state, x, MANY) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_arrays_keep_the_axis_of_their_groups():
    module = GroupedLinear.Config(dot=WEIGHTS["int4"]).instantiate(name="layer")
    specs = flatten_specs(module.parameter_specs())
    assert specs["weight"].shape == (E, K // 2, N)
    assert specs["weight"].axes == ("experts", "embed", "mlp")
    assert specs["dot/scale"].shape == (E, K // BLOCK, N)
    assert specs["dot/scale"].axes == ("experts", None, "mlp")
    assert {spec.kind for spec in specs.values()} == {"state"}


def test_rows_have_a_gradient_through_weights_alone_in_few_bits():
    """An adapter elsewhere may train beside such a layer."""
    x, w = arrays(MANY.sum())
    for dot in WEIGHTS.values():
        module, state = stored(dot, w)
        wide, _ = read(dot, state)

        def loss(x, module=module, state=state):
            inputs = (x, jnp.asarray(MANY))
            call = functional(module, state=state, inputs=inputs, is_training=True, method="sorted")
            return jnp.sum(call[0])

        got = jax.jit(jax.grad(loss))(jnp.asarray(x))
        expected = wide.sum(2)[np.repeat(np.arange(E), MANY)]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_what_groups_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="grouped=False") as error:
        GroupedLinear.Config(dot=StoredDot.Config(activations="int8", static=True)).instantiate(
            name="layer"
        )
    assert error.value.code == "AX950"
    with pytest.raises(ConfigError, match="odd number of inputs, 15"):
        GroupedLinear.Config(num_inputs=15, dot=WEIGHTS["int4"]).instantiate(name="layer")
    x, w = arrays(MANY.sum())
    module, state = stored(ACTIVATIONS["int8"], w)
    inputs = (jnp.asarray(x), jnp.asarray(MANY))
    with pytest.raises(ModuleError, match="no gradient"):
        functional(module, state=state, inputs=inputs, is_training=True, method="sorted")
    wrong = {**state, "weight": jnp.asarray(w)}
    with pytest.raises(ModuleError, match="expected one stored as int8"):
        functional(module, state=wrong, inputs=inputs, is_training=False, method="sorted")
