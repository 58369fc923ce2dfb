"""The suite that every kernel's tests subclass: results, gradients, determinism, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import ops
from axcore.plugins import OpCall, host, load_target

from ._closeness import assert_close, gradients
from ._op_cases import NOT_DIFFERENTIABLE, KernelCase, default_cases
from ._sharded_op import MESH_AXES, op_function, run_sharded

__all__ = ["KernelCase", "KernelConformance"]


class KernelConformance:
    """Checks one implementation of an op against the float32 reference.

    Errors are measured against the largest magnitude of the reference's result.

    Attributes:
        op: The op's name.
        implementation: The implementation's name.
        tolerance: Largest relative error of results in float32.
        gradient_tolerance: The same for gradients.
        low_precision: Dtypes of the low-precision test, or one; None leaves it out.
        low_precision_tolerance: Largest relative error there; bfloat16 rounds to 2**-8.
        differentiable: Whether the kernel has a gradient.
        batchable: Whether it claims to work under ``jax.vmap``.

    Example:
        ```python
        class TestRmsNorm(KernelConformance):
            op = "rms_norm"
            implementation = "acme"
        ```
    """

    op: str
    implementation: str
    tolerance: float = 1e-5
    gradient_tolerance: float = 1e-4
    low_precision: str | tuple[str, ...] | None = "bfloat16"
    low_precision_tolerance: float = 2e-2
    differentiable: bool = True
    batchable: bool = False

    def cases(self) -> Sequence[KernelCase]:
        """Returns the calls to check; by default a few small ones for each op of core."""
        return default_cases(self.op)

    def function(self) -> Callable[..., Any]:
        """Returns the kernel as this machine can run it.

        Skips where the kernel is for another platform. Override it to check a kernel without its
        hardware, with Pallas' ``interpret=True`` for example.
        """
        spec = host().kernels.get(f"{self.op}.{self.implementation}")
        platform = jax.default_backend()
        if not spec.runs_on(platform):
            pytest.skip(f"{spec.name} runs on {', '.join(spec.platforms)}, this is {platform}")
        return load_target(spec.target, where=spec.name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Runs each test once per case, and low precision once per dtype."""
        if "dtype" in metafunc.fixturenames:
            low = self.low_precision
            dtypes = (low,) if isinstance(low, str) else low or ()
            metafunc.parametrize("dtype", dtypes)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases(), ids=lambda case: case.name)

    def test_shape_and_dtype(self, case: KernelCase) -> None:
        arrays = case.arrays()
        expected = jax.eval_shape(self._closed(ops.reference(self.op), case), arrays)
        got = jax.eval_shape(self._kernel(case, arrays), arrays)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)

    def test_forward(self, case: KernelCase) -> None:
        arrays = case.arrays()
        got = jax.jit(self._kernel(case, arrays))(arrays)
        assert_close(got, self._reference(case, arrays), self.tolerance)

    def test_low_precision(self, case: KernelCase, dtype: str) -> None:
        low = _cast(case.arrays(), dtype)
        got = jax.jit(self._kernel(case, low))(low)
        expected = self._reference(case, _cast(low, "float32"))
        assert_close(got, expected, self.low_precision_tolerance)

    def test_gradient(self, case: KernelCase) -> None:
        if not self._has_gradient:
            pytest.skip("there is no gradient")
        arrays = case.arrays()
        kernel = self._kernel(case, arrays)
        got = jax.jit(gradients(kernel))(arrays)
        expected = gradients(self._closed(ops.reference(self.op), case))(arrays)
        for name in expected:
            assert_close(got[name], expected[name], self.gradient_tolerance, name)

    def test_determinism(self, case: KernelCase) -> None:
        arrays = case.arrays()
        kernel = jax.jit(self._kernel(case, arrays))
        first, second = kernel(arrays), kernel(arrays)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_jit_changes_nothing(self) -> None:
        case = self.cases()[0]
        arrays = case.arrays()
        kernel = self._kernel(case, arrays)
        assert_close(jax.jit(kernel)(arrays), kernel(arrays), self.tolerance)

    def test_vmap_equals_a_loop(self) -> None:
        if not self.batchable:
            pytest.skip("the suite does not claim it")
        case = self.cases()[0]
        first = case.arrays()
        second = {n: a[::-1] if a.ndim else a for n, a in first.items()}
        both = {n: jnp.stack([first[n], second[n]]) for n in first}
        kernel = self._kernel(case, first)
        got = jax.jit(jax.vmap(kernel))(both)
        loop = [kernel(arrays) for arrays in (first, second)]
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop)
        assert_close(got, expected, self.tolerance)

    def test_sharded_equals_unsharded(self) -> None:
        """Over every dim that ``partitioning`` tolerates split, on two devices; gradients too."""
        spec = host().kernels.get(f"{self.op}.{self.implementation}")
        tolerated = {axis for axes in spec.partitioning.values() for axis in axes}
        if not tolerated or spec.communicates or len(jax.devices()) < 2:
            pytest.skip("no dim may be split, it is for split dims only, or there is one device")
        case = self.cases()[0]
        arrays = case.arrays()
        public = op_function(self.op, {*arrays, *case.static})
        if public is None:
            pytest.skip(f"ops has no function {self.op} with the arguments of the case")
        expected = jax.jit(self._kernel(case, arrays))(arrays)
        # What the kernel gives on one device equals these: another test.
        reference = self._closed(ops.reference(self.op), case)
        expected_gradients = gradients(reference)(arrays) if self._has_gradient else {}
        refusals: list[str] = []
        for axis, logical in MESH_AXES.items():
            if tolerated.isdisjoint(logical):
                continue
            call, kernel = self._closed(public, case), self.function()
            got = run_sharded(spec, kernel, call, arrays, axis, gradient=self._has_gradient)
            if isinstance(got, str):
                refusals.append(f"{axis}: {got}")
                continue
            result, got_gradients = got
            assert_close(result, expected, self.tolerance, f"result over {axis}")
            for name, gradient in expected_gradients.items():
                what = f"gradient of {name} over {axis}"
                assert_close(got_gradients[name], gradient, self.gradient_tolerance, what)
            refusals.append("")
        if all(refusals):
            pytest.skip("; ".join(refusals))

    def test_supports_gives_a_reason_or_none(self, case: KernelCase) -> None:
        reason = self._refusal(case, case.arrays())
        assert reason is None or (isinstance(reason, str) and reason.strip())

    @property
    def _has_gradient(self) -> bool:
        return self.differentiable and self.op not in NOT_DIFFERENTIABLE

    def _kernel(self, case: KernelCase, arrays: Mapping[str, Any]) -> Callable[..., Any]:
        reason = self._refusal(case, arrays)
        if reason is not None:
            pytest.skip(f"refused: {reason}")
        return self._closed(self.function(), case)

    def _refusal(self, case: KernelCase, arrays: Mapping[str, Any]) -> str | None:
        name = f"{self.op}.{self.implementation}"
        spec = host().kernels.get(name)
        if spec.supports is None:
            return None
        call = OpCall(
            op=self.op,
            shapes={n: tuple(a.shape) for n, a in arrays.items()},
            dtypes={n: str(a.dtype) for n, a in arrays.items()},
            mask=case.static.get("mask"),
            purpose="train" if self._has_gradient else "decode",
            needs_gradient=self._has_gradient,
            platform=spec.platforms[0] if "*" not in spec.platforms else jax.default_backend(),
            options={n: v for n, v in case.static.items() if n != "mask"},
        )
        return load_target(spec.supports, where=name)(call)

    def _closed(self, function: Callable[..., Any], case: KernelCase) -> Callable[..., Any]:
        return lambda arrays: function(**arrays, **case.static)

    def _reference(self, case: KernelCase, arrays: Mapping[str, Any]) -> Any:
        with jax.default_matmul_precision("highest"):
            return self._closed(ops.reference(self.op), case)(arrays)


def _cast(arrays: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Casts the floating-point arrays."""
    return {
        n: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
        for n, a in arrays.items()
    }
