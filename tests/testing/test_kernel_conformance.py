"""The kernel suite passes on references and catches kernels that compute something else."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from axcore import ops
from axcore.ops._select import REFERENCES
from axcore.plugins import KernelSpec, Registry
from axcore.testing import KernelConformance
from axcore.testing._op_cases import default_cases


class TestRmsNorm(KernelConformance):
    op = "rms_norm"
    implementation = "xla"


class TestGroupedMatmul(KernelConformance):
    op = "grouped_matmul"
    implementation = "xla"


@pytest.mark.parametrize(("op", "case"), [(op, c) for op in REFERENCES for c in default_cases(op)])
def test_every_case_is_a_call_that_the_reference_takes(op, case):
    outputs = jax.eval_shape(lambda a: ops.reference(op)(**a, **case.static), case.arrays())
    assert jax.tree.leaves(outputs)


def _wrong_value(x, scale=None, *, eps):
    return ops.reference("rms_norm")(x, scale, eps=eps) * 1.001


def _wrong_eps(x, scale=None, *, eps):
    return ops.reference("rms_norm")(x, scale, eps=0.0)


def _wrong_dtype(x, scale=None, *, eps):
    return ops.reference("rms_norm")(x, scale, eps=eps).astype(jnp.float16)


@jax.custom_vjp
def _value(x, scale, eps):
    return ops.reference("rms_norm")(x, scale, eps=eps)


_value.defvjp(
    lambda x, scale, eps: (_value(x, scale, eps), (x, scale)), lambda r, g: (g, g[0, 0], None)
)


def _wrong_gradient(x, scale=None, *, eps):
    return _value(x, scale, eps)


@pytest.mark.parametrize(
    ("function", "test", "case"),
    [
        (_wrong_value, "test_forward", "scaled"),
        (_wrong_eps, "test_forward", "large-eps"),
        (_wrong_dtype, "test_shape_and_dtype", "scaled"),
        (_wrong_gradient, "test_gradient", "scaled"),
    ],
)
def test_the_suite_catches(function, test, case):
    class Suite(TestRmsNorm):
        wrong = False

        def function(self):
            return function if self.wrong else super().function()

    suite = Suite()
    (chosen,) = [c for c in suite.cases() if c.name == case]
    getattr(suite, test)(chosen)
    suite.wrong = True
    with pytest.raises(AssertionError):
        getattr(suite, test)(chosen)


def test_an_op_without_cases_asks_for_them():
    class Suite(KernelConformance):
        op = "fourier"

    with pytest.raises(pytest.fail.Exception, match="override cases"):
        Suite().cases()


@pytest.fixture
def acme_rms_norm(monkeypatch):
    """Registers acme's RMSNorm, which may be split over rows, as the only kernel."""
    spec = KernelSpec(
        op="rms_norm",
        implementation="acme",
        platforms=("*",),
        target="nowhere:rms_norm",
        partitioning={"x": ("batch",)},
    )
    fake = types.SimpleNamespace(kernels=Registry("kernels", {spec.name: (spec, "acme")}, tuple))
    for module in ("axcore.plugins", "axcore.testing._kernels", "axcore.testing._sharded_op"):
        monkeypatch.setattr(f"{module}.host", lambda: fake)


@pytest.mark.usefixtures("acme_rms_norm")
def test_the_suite_catches_a_kernel_that_is_wrong_on_shards():
    def over_rows(x, scale=None, *, eps):
        """Wrong by a factor that depends on the rows of the device."""
        return ops.reference("rms_norm")(x, scale, eps=eps) * jnp.sqrt(x.shape[0])

    class Suite(KernelConformance):
        op = "rms_norm"
        implementation = "acme"
        right = True

        def function(self):
            return ops.reference("rms_norm") if self.right else over_rows

    suite = Suite()
    suite.test_sharded_equals_unsharded()
    suite.right = False
    with pytest.raises(AssertionError, match="result over data"):
        suite.test_sharded_equals_unsharded()


@pytest.mark.usefixtures("acme_rms_norm")
def test_the_suite_catches_a_gradient_that_is_wrong_on_shards():
    """The derivative of the scale sums over rows, and each device has its own."""

    @jax.custom_vjp
    def scaled(x, scale):
        return ops.reference("rms_norm")(x, scale, eps=1e-6)

    def backward(saved, g):
        _, pull = jax.vjp(lambda *a: ops.reference("rms_norm")(*a, eps=1e-6), *saved)
        d_x, d_scale = pull(g)
        return d_x, d_scale * saved[0].shape[0] / 2  # right for the two rows of the case alone

    scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), backward)

    class Suite(KernelConformance):
        op = "rms_norm"
        implementation = "acme"

        def function(self):
            return lambda x, scale, *, eps: scaled(x, scale)

    suite = Suite()
    suite.test_gradient(suite.cases()[0])
    with pytest.raises(AssertionError, match="gradient of scale over data"):
        suite.test_sharded_equals_unsharded()
