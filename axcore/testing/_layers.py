"""The suite that every layer's tests subclass: config, parameters, calls, stacks, gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import transforms
from axcore.config import Config
from axcore.context import functional
from axcore.errors import ShardingError
from axcore.layers import Layer
from axcore.module import Module
from axcore.parallel import MeshShape, ProgramTarget, build_mesh

from ._closeness import assert_close, weighted_sum

__all__ = ["LayerConformance"]

_NUM_LAYERS = 2


class _Stack(Layer):
    """Copies of a layer, each added to its input: unrolled or scanned."""

    class Config(Layer.Config):
        """``layer`` is copied; ``scanned`` chooses the execution."""

        layer: Layer.Config = Layer.Config()
        scanned: bool = False

    def __init__(self, cfg: Any, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        names = [f"0:{_NUM_LAYERS}:1"] if cfg.scanned else [str(i) for i in range(_NUM_LAYERS)]
        self._copies = [self._add_child(name, cfg.layer) for name in names]

    def forward(self, x: jax.Array, *rest: Any) -> jax.Array:
        """Runs the layers in order."""
        if not self.cfg.scanned:
            for layer in self._copies:
                x = x + layer(x, *rest)
            return x

        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + self._copies[0](x, *rest), None

        return transforms.scan_layers(self._copies, step, x)[0]


class LayerConformance:
    """Checks one layer; a subclass says how to configure and call it.

    Attributes:
        method: The public method that is called.
        is_training: Whether it is called as in training.
        tolerance: Largest error between equivalent ways to compute, relative to the largest
            magnitude.
        gradient_tolerance: The same for gradients of split parameters.

    Example:
        ```python
        class TestAcmeFeedForward(LayerConformance):
            def config(self):
                return AcmeFeedForward.Config(input_dim=8)

            def inputs(self, key):
                return (jax.random.normal(key, (2, 4, 8)),)
        ```
    """

    method: str = "forward"
    is_training: bool = True
    tolerance: float = 1e-5
    gradient_tolerance: float = 1e-4

    def config(self) -> Layer.Config:
        """Returns a small config of the layer, complete."""
        raise NotImplementedError("a subclass of LayerConformance states config()")

    def inputs(self, key: jax.Array) -> tuple[Any, ...]:
        """Returns positional arguments for the layer's method."""
        raise NotImplementedError("a subclass of LayerConformance states inputs(key)")

    def test_config_round_trip(self) -> None:
        cfg = self.config()
        text = cfg.to_text()
        package = type(cfg).__module__.partition(".")[0]
        again = Config.from_text(text, trusted=(package,))
        assert again == cfg
        assert again.to_text() == text
        assert again.fingerprint() == cfg.fingerprint()
        assert cfg.copy() == cfg

    def test_parameters_are_as_described(self) -> None:
        layer = self._layer()
        specs = layer.parameter_specs()
        params = layer.initialize(jax.random.key(0))
        assert jax.tree.structure(params) == jax.tree.structure(specs)
        for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
            assert (array.shape, str(array.dtype)) == (spec.shape, spec.dtype)
            assert len(spec.axes) == array.ndim
            assert np.isfinite(np.asarray(array, np.float32)).all()

    def test_initialization_depends_on_the_key_alone(self) -> None:
        first = self._layer().initialize(jax.random.key(1))
        second = self._layer().initialize(jax.random.key(1))
        jax.tree.map(np.testing.assert_array_equal, first, second)

    def test_forward_is_finite_and_repeatable(self) -> None:
        layer, params, inputs = self._ready()
        first = self._call(layer, params, inputs)
        second = self._call(layer, params, inputs)
        assert jax.tree.leaves(first), "the layer returns no arrays"
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert np.isfinite(np.asarray(a, np.float32)).all()
            np.testing.assert_array_equal(a, b)

    def test_jit_changes_nothing(self) -> None:
        layer, params, inputs = self._ready()
        compiled = jax.jit(lambda p, i: self._call(layer, p, i))(params, inputs)
        assert_close(compiled, self._call(layer, params, inputs), self.tolerance)

    def test_gradients_are_finite_and_reach_every_parameter(self) -> None:
        layer, params, inputs = self._ready()
        gradients = jax.jit(jax.grad(lambda p: weighted_sum(self._call(layer, p, inputs))))(params)
        flat, _ = jax.tree_util.tree_flatten_with_path(gradients)
        for path, gradient in flat:
            name = jax.tree_util.keystr(path)
            assert np.isfinite(np.asarray(gradient, np.float32)).all(), f"{name} is not finite"
            assert np.asarray(gradient, np.float32).any(), f"{name} gets no gradient"

    def test_stacked_equals_scanned(self) -> None:
        inputs = self.inputs(jax.random.key(2))
        shape = jax.eval_shape(lambda p: self._call(self._layer(), p, inputs), self._params())
        x = inputs[0]
        if not hasattr(shape, "shape") or (shape.shape, shape.dtype) != (x.shape, x.dtype):
            pytest.skip("the layer does not return the shape of its input, so it does not stack")
        results = []
        for scanned in (False, True):
            stack = _Stack.Config(layer=self.config(), scanned=scanned).instantiate(name="stack")
            params = stack.initialize(jax.random.key(0))

            def loss(params: Any, stack: Any = stack) -> Any:
                outputs = self._call(stack, params, inputs, "forward")
                return weighted_sum(outputs), outputs

            gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(params)
            if not scanned:
                params, gradients = _stacked(params), _stacked(gradients)
            results.append((params, outputs, gradients))
        (params, outputs, gradients), (params_s, outputs_s, gradients_s) = results
        key = f"0:{_NUM_LAYERS}:1"
        jax.tree.map(np.testing.assert_array_equal, params, params_s.get(key, {}))
        assert_close(outputs_s, outputs, self.tolerance)
        assert_close(gradients_s.get(key, {}), gradients, self.tolerance)

    @pytest.mark.parametrize("axis", ["data", "fsdp", "model"])
    def test_sharded_equals_unsharded(self, axis: str) -> None:
        """Parameters lie as the default rules say, on two devices; gradients too."""
        if len(jax.devices()) < 2:
            pytest.skip("there is one device")
        layer, params, inputs = self._ready()

        def run(params: Any, inputs: Any, target: Any = None) -> Any:
            def loss(params: Any) -> Any:
                outputs = self._call(layer, params, inputs, target=target)
                return weighted_sum(outputs), outputs

            return jax.jit(jax.grad(loss, has_aux=True))(params)

        mesh = build_mesh(MeshShape.of({axis: 2}), jax.devices()[:2])
        platform = jax.default_backend()
        target = ProgramTarget(f"{platform}-2", platform, mesh)
        try:
            placed = jax.device_put(params, target.shardings(layer.parameter_specs()))
        except ShardingError as error:
            pytest.skip(f"its dims do not divide: {error.message}")
        gradients, outputs = run(placed, inputs, target)
        expected_gradients, expected = run(params, inputs)
        assert_close(outputs, expected, self.tolerance, f"result over {axis}")
        what = f"gradients over {axis}"
        assert_close(gradients, expected_gradients, self.gradient_tolerance, what)

    def _layer(self) -> Any:
        return self.config().instantiate(name="layer")

    def _params(self) -> Any:
        return self._layer().initialize(jax.random.key(0))

    def _ready(self) -> tuple[Any, Any, tuple[Any, ...]]:
        layer = self._layer()
        return layer, layer.initialize(jax.random.key(0)), self.inputs(jax.random.key(2))

    def _call(
        self,
        layer: Any,
        params: Any,
        inputs: Any,
        method: str | None = None,
        target: ProgramTarget | None = None,
    ) -> Any:
        outputs, _ = functional(
            layer,
            state=params,
            inputs=tuple(inputs),
            key=jax.random.key(3),
            is_training=self.is_training,
            method=method or self.method,
            target=target,
        )
        return outputs


def _stacked(unrolled: dict[str, Any]) -> Any:
    """Stacks the state of layers 0, 1, ... on a leading axis."""
    layers = [unrolled.get(str(i), {}) for i in range(_NUM_LAYERS)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
