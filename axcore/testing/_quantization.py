"""The suite that every training recipe's tests subclass: config, error bounds, gradients, state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axcore.config import Config, apply_modifier
from axcore.context import functional
from axcore.errors import ConfigError
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    Linear,
    RepeatedTransformer,
    TransformerLayer,
)
from axcore.module import flatten_specs
from axcore.plugins import host
from axcore.quantization import Operand, QuantizedDot, QuantizeModifier, find_sites
from axcore.remat import Remat

from ._closeness import assert_close

__all__ = ["QuantizationConformance", "operand_error"]

# Half a step, relative to the largest value of the channel.
_HALF_STEP = {
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3": 2.0**-4,
    "float8_e3m4": 2.0**-5,
    "float8_e5m2": 2.0**-3,
}
_ROWS, _INPUTS, _OUTPUTS = 16, 64, 24
_ORDER = 1e-5  # what sums of float32 in another order differ by


def operand_error(operand: Operand | None) -> float:
    """Returns the largest error of a quantized value relative to the largest of its tensor."""
    if operand is None:
        return 0.0
    # Random rounding may go a whole step; a block's exponent is rounded up by less than one bit,
    # which a float's relative error does not see.
    return _HALF_STEP[operand.dtype] * (2.0 if operand.stochastic else 1.0)


class QuantizationConformance:
    """Checks one training recipe; a subclass names it.

    Attributes:
        recipe: Its registered name.
        options: Fields of the recipe that differ from its defaults.
        lhs_error: Largest error of quantized activations relative to the largest of their tensor.
            None takes what the product states (``rounding_errors``: a tuple of these three), else
            what the plan of a :class:`axcore.quantization.QuantizedDot` says.
        rhs_error: The same for weights.
        grad_error: The same for gradients.

    Example:
        ```python
        class TestAcmeFp6(QuantizationConformance):
            recipe = "acme-fp6"
            lhs_error = rhs_error = grad_error = 2.0**-3
        ```
    """

    recipe: str
    options: Mapping[str, Any] = {}
    lhs_error: float | None = None
    rhs_error: float | None = None
    grad_error: float | None = None

    # -- config ----------------------------------------------------------------------------

    def test_is_registered_with_the_dtypes_that_it_multiplies(self) -> None:
        spec = host().quantization.get(self.recipe)
        assert spec.dtypes
        assert spec.scope
        sites = find_sites(self._model(self._recipe()).instantiate(name="model"))
        used = {d for s in sites.values() for d in getattr(s.module, "operand_dtypes", ())}
        assert used <= {*spec.dtypes}

    def test_replaces_linear_layers_and_leaves_head_and_attention(self) -> None:
        plain = find_sites(self._model().instantiate(name="model"))
        sites = find_sites(self._model(self._recipe()).instantiate(name="model"))
        assert set(sites) == set(plain)
        for path, site in sites.items():
            changed = type(site.module) is not type(plain[path].module)
            assert changed == (site.kind == "linear"), path

    def test_config_round_trip(self) -> None:
        cfg = self._model(self._recipe())
        again = Config.from_text(cfg.to_text(), trusted=tuple(host().trusted_packages()))
        assert again == cfg

    def test_applied_twice_or_to_nothing_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="already"):
            apply_modifier(self._model(self._recipe()), self._recipe())
        with pytest.raises(ConfigError, match="matches none"):
            apply_modifier(self._model(), self._recipe().set(include="nowhere/*"))

    def test_parameters_are_those_of_the_plain_model(self) -> None:
        plain = self._model().instantiate(name="model")
        model = self._model(self._recipe()).instantiate(name="model")
        before, after = (flatten_specs(m.parameter_specs()) for m in (plain, model))
        added = {path: spec for path, spec in after.items() if path not in before}
        assert {p: s for p, s in after.items() if p not in added} == before
        for path, spec in added.items():
            assert spec.kind == "state", f"{path} is a parameter: the learner would train it"
            assert spec.optional, f"{path}: weights of a plain model would not load"

    # -- one product -----------------------------------------------------------------------

    def test_forward_and_gradients_are_within_their_bounds(self) -> None:
        layer, state, x, w, c = self._product()
        y, (dx, dw) = self._run(layer, state, x, w, c)
        a, b, g = (np.asarray(v, np.float64) for v in (x, w, c))
        e_lhs, e_rhs, e_grad = self._errors(layer)
        self._within(y, a @ b, _bound(a, b, e_lhs, e_rhs))
        self._within(dx, g @ b.T, _bound(g, b.T, e_grad, e_rhs))
        self._within(dw, a.T @ g, _bound(a.T, g, e_lhs, e_grad))
        assert not np.allclose(y, a @ b, rtol=1e-6), "the product is exact: is it quantized?"

    def test_repeats_to_the_bit_and_survives_zeros(self) -> None:
        layer, state, x, w, c = self._product()
        once, again = (self._run(layer, state, x, w, c) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, once, again)
        y, grads = self._run(layer, state, jnp.zeros_like(x), w, jnp.zeros_like(c))
        for array in jax.tree.leaves((y, grads)):
            np.testing.assert_array_equal(array, np.zeros_like(array))

    def test_jit_changes_nothing(self) -> None:
        layer, state, x, w, c = self._product()
        eager = self._call(layer.copy().instantiate(name="layer"), state, x, w, c)
        assert_close(self._run(layer, state, x, w, c), eager, _ORDER)

    @pytest.mark.parametrize("dim", ["rows", "sum", "outputs"])
    def test_sharded_equals_unsharded(self, dim: str) -> None:
        """A scale is that of the whole channel or tensor, wherever its parts lie."""
        if len(jax.devices()) < 2:
            pytest.skip("there is one device")
        layer, state, x, w, c = self._product()
        expected = self._run(layer, state, x, w, c)
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("half",), axis_types=auto, devices=jax.devices()[:2])

        def split(array: jax.Array, *dims: str) -> jax.Array:
            spec = PartitionSpec(*("half" if d == dim else None for d in dims))
            return jax.device_put(array, NamedSharding(mesh, spec))

        x, w, c = split(x, "rows", "sum"), split(w, "sum", "outputs"), split(c, "rows", "outputs")
        assert_close(self._run(layer, state, x, w, c), expected, _ORDER)

    def test_keeps_the_size_of_numbers(self) -> None:
        layer, state, x, w, c = self._product()
        for scale in (1e-12, 1e12):  # far outside of any 8 bit format's range
            y, _ = self._run(layer, state, x * scale, w, c)
            want = np.asarray(x, np.float64) * scale @ np.asarray(w, np.float64)
            assert np.linalg.norm(y - want) < 0.25 * np.linalg.norm(want)

    def test_keeps_dtypes_and_maps_over_a_batch(self) -> None:
        layer, state, x, w, c = self._product()
        module = layer.copy().set(compute_dtype="bfloat16").instantiate(name="layer")
        x, c = x.astype(jnp.bfloat16), c.astype(jnp.bfloat16)
        shapes = jax.eval_shape(lambda *args: self._call(module, *args), state, x, w, c)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(shapes)]
        assert dtypes == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
        many = jax.eval_shape(
            jax.vmap(lambda x, c: self._call(module, state, x, w, c)), x[None], c[None]
        )
        assert [m.shape[1:] for m in jax.tree.leaves(many)] == [
            leaf.shape for leaf in jax.tree.leaves(shapes)
        ]

    # -- a model ---------------------------------------------------------------------------

    def test_trains_in_a_scan_with_remat_and_keeps_its_state(self) -> None:
        cfg = self._model(self._recipe())
        model: Any = cfg.instantiate(name="model")
        specs = flatten_specs(model.parameter_specs())
        state = jax.tree.map(
            lambda spec: (
                0.05 * jnp.cos(jnp.arange(spec.struct().size)).reshape(spec.shape)
                if spec.kind == "parameter"
                else jnp.zeros(spec.shape, spec.dtype)
            ),
            model.parameter_specs(),
        )
        ids = jax.random.randint(jax.random.key(1), (2, 16), 0, 32)

        @jax.jit
        def step(state: Any) -> tuple[Any, Any]:
            def loss(state: Any) -> tuple[jax.Array, Any]:
                _, collection = functional(
                    model,
                    state=state,
                    inputs={"input_ids": ids, "target_ids": ids},
                    is_training=True,
                    key=jax.random.key(2),
                )
                (entry,) = collection.losses.values()
                return entry.result(), collection.state_updates

            return jax.grad(loss, has_aux=True)(state)

        grads, updates = step(state)
        for path, spec in specs.items():
            node: Any = grads
            for part in path.split("/"):
                node = node[part]
            assert np.isfinite(np.asarray(node, np.float32)).all(), path
            if spec.kind == "state":
                assert not np.asarray(node).any(), f"{path} is state and has a gradient"
                assert path in updates, f"{path} is state that a training step does not set"
                assert updates[path].total.shape == spec.shape

    # -- private ---------------------------------------------------------------------------

    def _recipe(self) -> QuantizeModifier.Config:
        return QuantizeModifier.Config(recipe=self.recipe, options=self.options)

    def _model(self, modifier: Config | None = None) -> CausalLM.Config:
        cfg = CausalLM.Config(
            vocab_size=32,
            model_dim=32,
            max_seq_len=16,
            decoder=Decoder.Config(
                num_layers=2,
                layer=TransformerLayer.Config(attention=Attention.Config(num_heads=2)),
                stack=RepeatedTransformer.Config(remat=Remat("full")),
            ),
        )
        return cfg if modifier is None else apply_modifier(cfg, modifier)

    def _product(self) -> tuple[Any, Any, jax.Array, jax.Array, jax.Array]:
        """Returns a linear layer, its state but for the weight, input, weight, output gradient."""
        layer = apply_modifier(
            Linear.Config(input_dim=_INPUTS, output_dim=_OUTPUTS, bias=False), self._recipe()
        )
        specs = layer.copy().instantiate(name="layer").parameter_specs()
        state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
        state.pop("weight")
        keys = jax.random.split(jax.random.key(1), 3)
        x = jax.random.normal(keys[0], (_ROWS, _INPUTS))
        w = jax.random.normal(keys[1], (_INPUTS, _OUTPUTS)) / 8
        return layer, state, x, w, jax.random.normal(keys[2], (_ROWS, _OUTPUTS))

    def _run(self, layer: Any, state: Any, x: Any, w: Any, c: Any) -> Any:
        """Returns the result and its gradients; compiled once for a suite."""
        if "compiled" not in vars(type(self)):
            module = layer.copy().instantiate(name="layer")
            type(self).compiled = staticmethod(jax.jit(lambda *args: self._call(module, *args)))
        return self.compiled(state, x, w, c)

    compiled: Any

    def _call(self, module: Any, state: Any, x: Any, w: Any, c: Any) -> Any:
        def loss(x: Any, w: Any) -> tuple[Any, Any]:
            y, _ = functional(
                module,
                state={**state, "weight": w},
                inputs=(x,),
                is_training=True,
                key=jax.random.key(4),
            )
            return jnp.sum(y.astype(jnp.float32) * c.astype(jnp.float32)), y

        grads, y = jax.grad(loss, (0, 1), has_aux=True)(x, w)
        return y, grads

    def _errors(self, layer: Any) -> tuple[float, float, float]:
        dot = layer.copy().instantiate(name="layer").dot
        stated = (self.lhs_error, self.rhs_error, self.grad_error)
        own: tuple[float, ...] | None = getattr(dot, "rounding_errors", None)
        if own is None and isinstance(dot, QuantizedDot):
            own = tuple(operand_error(o) for o in (dot.plan.lhs, dot.plan.rhs, dot.plan.grad))
        lhs, rhs, grad = (
            o if s is None else s for s, o in zip(stated, own or (None, None, None), strict=True)
        )
        assert lhs is not None and rhs is not None and grad is not None, (
            "state lhs_error, rhs_error and grad_error"
        )
        return lhs, rhs, grad

    def _within(self, got: Any, want: np.ndarray, bound: np.ndarray) -> None:
        error = np.abs(np.asarray(got, np.float64) - want)
        # Sums of float32 err too, by far less than what is quantized.
        worst = np.max(error / (bound + 1e-5 * np.abs(want).max()))
        assert worst <= 1.0, f"the error is {worst:.2f} times the bound"


def _bound(a: np.ndarray, b: np.ndarray, e_a: float, e_b: float) -> np.ndarray:
    """What ``a b`` may be off when each value of both is off by a share of the tensor's largest."""
    top_a, top_b = np.abs(a).max(), np.abs(b).max()
    first = e_a * top_a * np.abs(b).sum(0)[None, :] + e_b * top_b * np.abs(a).sum(1)[:, None]
    return first + a.shape[1] * e_a * e_b * top_a * top_b
