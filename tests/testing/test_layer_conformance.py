"""The layer suite passes on core's layers and catches layers that break the contract."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from axcore.layers import FeedForward, Layer, Linear, Ones, RMSNorm, SequenceInfo
from axcore.testing import LayerConformance


class TestFeedForward(LayerConformance):
    def config(self):
        return FeedForward.Config(input_dim=8)

    def inputs(self, key):
        return jax.random.normal(key, (2, 4, 8)), SequenceInfo(positions=jnp.zeros((2, 4), int))


class TestRmsNorm(LayerConformance):
    def config(self):
        return RMSNorm.Config(input_dim=8)

    def inputs(self, key):
        return (jax.random.normal(key, (2, 4, 8)),)


class Broken(Layer):
    """Right or wrong in one chosen way."""

    class Config(Layer.Config):
        input_dim: int = 8
        fault: str = "none"

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._add_weight("scale", (cfg.input_dim,), ("embed",), Ones())
        self._calls = 0

    def forward(self, x):
        scale = self._param("scale")
        self._calls += 1
        if self.cfg.fault == "detached":
            scale = jax.lax.stop_gradient(scale)
        if self.cfg.fault == "not finite":
            x = x / 0.0
        if self.cfg.fault == "remembers calls":
            x = x + self._calls
        if self.cfg.fault == "sums a part" and (mesh := self._context.target.mesh) is not None:
            # Each device has its own part, and nobody adds them up.
            part, whole = PartitionSpec("model"), PartitionSpec()
            x = x + jax.shard_map(
                lambda s: jnp.sum(s), mesh=mesh, in_specs=part, out_specs=whole, check_vma=False
            )(scale)
        elif self.cfg.fault == "sums a part":
            x = x + jnp.sum(scale)
        return x * scale


class Suite(LayerConformance):
    fault = "none"

    def config(self):
        return Broken.Config(fault=self.fault)

    def inputs(self, key):
        return (jax.random.normal(key, (2, 4, 8)),)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("detached", "test_gradients_are_finite_and_reach_every_parameter"),
        ("not finite", "test_forward_is_finite_and_repeatable"),
        ("remembers calls", "test_forward_is_finite_and_repeatable"),
        ("remembers calls", "test_jit_changes_nothing"),
    ],
)
def test_the_suite_catches(fault, test):
    suite = Suite()
    getattr(suite, test)()
    suite.fault = fault
    with pytest.raises(AssertionError):
        getattr(suite, test)()


def test_the_suite_catches_a_sum_over_a_device_s_part():
    suite = Suite()
    suite.test_sharded_equals_unsharded("model")
    suite.fault = "sums a part"
    with pytest.raises(AssertionError, match="result over model"):
        suite.test_sharded_equals_unsharded("model")


def test_a_layer_that_changes_the_shape_does_not_stack():
    class Suite(LayerConformance):
        def config(self):
            return Linear.Config(input_dim=8, output_dim=4)

        def inputs(self, key):
            return (jax.random.normal(key, (2, 8)),)

    with pytest.raises(pytest.skip.Exception, match="does not stack"):
        Suite().test_stacked_equals_scanned()
