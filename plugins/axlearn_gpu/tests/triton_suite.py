"""The kernels written in Triton against core's references, run by Triton's interpreter.

``test_triton.py`` runs this file in a process of its own: the interpreter is chosen by
``TRITON_INTERPRET=1`` when the kernels are defined. jax-triton is replaced by a callback to the
host, so that everything but the launch is what runs on a GPU, the rules of differentiation
included.
"""

import os
import threading

import jax
import numpy as np
import pytest

import axlearn_gpu._capability
import axlearn_gpu._triton
from axcore.testing import KernelCase, KernelConformance
from axlearn_gpu import supports

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_triton.py"


LOCK = threading.Lock()


class HostTensor:
    """What Triton's interpreter asks of a tensor, over a numpy array; its own storage too."""

    def __init__(self, array):
        self.array = array
        self.dtype = str(array.dtype)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.array is self.array  # it works in place

    def new_empty(self, size, device):
        return HostTensor(np.empty(size, self.array.dtype))

    def set_(self, storage, offset, size, stride):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(n // self.array.itemsize for n in self.array.strides)


def interpret(kernel, *arrays, out_shape, grid, capability, num_warps=4, num_stages=1, **constants):
    assert capability == 90 and num_warps > 0 and num_stages > 0

    def on_host(*inputs):
        inputs = [np.array(x) for x in inputs]
        outputs = [np.full(s.shape, 99, s.dtype) for s in out_shape]  # what is not written shows
        with LOCK:  # devices call at the same time, and the interpreter patches its language
            kernel[grid](*map(HostTensor, [*inputs, *outputs]), **constants)
        return tuple(outputs)

    return jax.pure_callback(on_host, tuple(out_shape), *arrays)


axlearn_gpu._capability.current_capability = lambda: 90
axlearn_gpu._triton.triton_call = interpret
supports._missing_triton = lambda: None


class Suite(KernelConformance):
    implementation = "triton"

    def function(self):
        from axcore.plugins import host, load_target

        spec = host().kernels.get(f"{self.op}.triton")
        return load_target(spec.target, where=spec.name)


class TestRmsNorm(Suite):
    op = "rms_norm"

    def cases(self):
        odd = KernelCase("odd-dim", {"x": (300, 20), "scale": (20,)}, {"eps": 1e-6})
        return [c for c in super().cases() if c.name in ("scaled", "unscaled")] + [odd]


class TestAddRmsNorm(Suite):
    op = "add_rms_norm"

    def cases(self):
        return [c for c in super().cases() if c.name != "two-dims"]


class TestGatedActivation(Suite):
    op = "gated_activation"


class TestRotary(Suite):
    op = "rotary"


class TestLinearCrossEntropy(Suite):
    op = "linear_cross_entropy"
    # The interpreter multiplies the bits of bfloat16 as integers; float16 it knows.
    low_precision = "float16"

    def cases(self):
        shapes = {"hidden": (3, 9, 40), "weight": (300, 40)}

        plain = [c for c in super().cases() if c.name in ("dv", "masked")]

        def targets():
            ids = np.arange(27, dtype=np.int32).reshape(3, 9) * 31 % 290
            return {"targets": ids, "mask": ids % 5 > 0}

        options = {
            "label_smoothing": 0.1,
            "valid_vocab_size": 290,
            "chunk_tokens": 8,
            "logit_cap": 5.0,
        }
        return [
            *plain,
            KernelCase("blocks-and-chunks", shapes, {"layout": "vd", **options}, targets),
        ]


def test_the_sum_is_rounded_before_it_is_normalized():
    """As two steps do; in float16, since the interpreter cuts bfloat16 off instead of rounding."""
    from axcore import ops
    from axlearn_gpu.triton_rms_norm import add_rms_norm_triton

    x, residual = jax.random.normal(jax.random.key(0), (2, 3, 33), "float16")
    got = add_rms_norm_triton(x, residual, eps=1e-6)
    want = ops.reference("add_rms_norm")(x, residual, eps=1e-6)
    np.testing.assert_array_equal(got[1], want[1])
    # One unit of float16, for sums of squares in another order.
    np.testing.assert_allclose(*(y.astype("float32") for y in (got[0], want[0])), rtol=2**-10)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
