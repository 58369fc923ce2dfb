"""NKI kernels with fakes of the vendor's packages: forward and gradients beside the reference."""

import importlib
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import ops
from axcore.ops import Causal, Full, SegmentIds
from axcore.testing import KernelCase, KernelConformance
from axlearn_neuron import _layouts


def _beside(name):
    """Imports a helper of these tests: their folder is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nki_fakes = _beside("nki_fakes")


@pytest.fixture(scope="module")
def vendor():
    patch = pytest.MonkeyPatch()
    with patch.context():
        yield nki_fakes.install(patch)
    patch.undo()
    nki_fakes.remove()


SEGMENTS = jnp.array([[1] * 300 + [2] * 150 + [0] * 62, [1] * 512], jnp.int32)


def qkv(batch, heads, kv_heads):
    return {"q": (batch, 512, heads, 8), **{n: (batch, 512, kv_heads, 8) for n in "kv"}}


@pytest.mark.usefixtures("vendor")
@pytest.mark.xdist_group("neuron-fakes")
class TestFlashAttention(KernelConformance):
    op = "attention"
    implementation = "nki_flash"

    def cases(self):
        return [
            KernelCase("full", qkv(2, 2, 2), {"mask": Full(), "logit_scale": 0.25}),
            # 0 is padding: its rows see nothing and must be zero.
            KernelCase(
                "grouped-segments",
                qkv(2, 2, 1),
                {"mask": Causal() & SegmentIds(), "logit_scale": 0.3},
                lambda: dict.fromkeys(("q_segment_ids", "kv_segment_ids"), SEGMENTS),
            ),
        ]

    def function(self):
        return importlib.import_module("axlearn_neuron.nki_flash_attention").attention_nki


@pytest.mark.usefixtures("vendor")
@pytest.mark.xdist_group("neuron-fakes")
class TestRmsNorm(KernelConformance):
    op = "rms_norm"
    implementation = "nki"

    def cases(self):
        return [
            # Two tiles, the second not full.
            KernelCase("rows", {"x": (2, 75, 24), "scale": (24,)}, {"eps": 1e-5}),
            KernelCase("no-scale", {"x": (3, 16)}, {"eps": 1e-6}),
        ]

    def function(self):
        return importlib.import_module("axlearn_neuron.nki_rms_norm").rms_norm_nki


@pytest.mark.xdist_group("neuron-fakes")
def test_the_rows_of_a_norm_are_shared_out_among_the_cores_of_a_device(vendor, monkeypatch):
    module = importlib.import_module("axlearn_neuron.nki_rms_norm")
    monkeypatch.setattr(module, "cores_per_device", lambda: 2)
    x = jax.random.normal(jax.random.key(0), (300, 8))
    want = ops.reference("rms_norm")(x)
    np.testing.assert_allclose(module.rms_norm_nki(x), want, rtol=1e-5)
    assert module._kernel.calls[-1][0] == (2,)


@pytest.mark.xdist_group("neuron-fakes")
def test_heads_are_shared_out_among_the_cores_where_they_divide(vendor):
    module = importlib.import_module("axlearn_neuron.nki_flash_attention")
    assert module._grid(3, 8, 1) == module._grid(3, 8, 2) == (3, 8)  # the fake's nc(2) is 2
    assert module._grid(3, 7, 2) == (3, 7)


@pytest.mark.xdist_group("neuron-fakes")
def test_without_a_gradient_nothing_is_kept_for_one(vendor):
    module = importlib.import_module("axlearn_neuron.nki_flash_attention")
    q = jnp.ones((1, 1024, 1, 8))
    jax.eval_shape(lambda q: module.attention_nki(q, q, q, mask=Full(), logit_scale=1.0), q)
    _, static = vendor.forward.calls[-1]
    assert static["config"] == nki_fakes.FlashConfig(seq_tile_size=1024, training=False)


# -- layouts --------------------------------------------------------------------------------------


def test_layouts_are_what_the_vendor_states_and_come_back():
    x = jnp.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)  # (B, T, N, H)
    columns, rows = _layouts.to_columns(x), _layouts.to_rows(x)
    assert columns.shape == (2, 5, 7, 3) and rows.shape == (2, 5, 3, 7)
    assert columns[1, 4, 6, 2] == rows[1, 4, 2, 6] == x[1, 2, 4, 6]
    np.testing.assert_array_equal(_layouts.from_columns(columns), x)
    np.testing.assert_array_equal(_layouts.from_rows(rows), x)


def test_summing_heads_is_the_transpose_of_repeating_them():
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.integers(-8, 8, (2, n, 4, 5)), jnp.float32) for n in (3, 6))
    repeated = _layouts.repeat_heads(x, 2)
    assert jnp.array_equal(repeated[:, 2], x[:, 1]) and jnp.array_equal(repeated[:, 3], x[:, 1])
    assert jnp.vdot(repeated, g) == jnp.vdot(x, _layouts.sum_heads(g, 2))  # integers: exact
    np.testing.assert_array_equal(_layouts.sum_heads(x, 1), x)


def test_the_largest_tile_that_divides_the_keys_is_taken():
    assert [_layouts.key_tile(n) for n in (8192, 3072, 1536)] == [2048, 1024, 512]
