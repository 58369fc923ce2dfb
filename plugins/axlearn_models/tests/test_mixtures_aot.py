"""Mixtures of real widths and few layers, compiled for GPUs and TPUs that are not there.

Full sizes: ``benchmarks/aot_cases.py``.
"""

from __future__ import annotations

import importlib.util

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from axcore import experiments
from axcore.train import aot, assemble

pytestmark = [pytest.mark.aot, pytest.mark.slow]

GPU = [
    pytest.mark.xdist_group("gpu-aot"),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
        reason="JAX's CUDA plugin is not installed: axlearn-gpu[aot]",
    ),
]
TPU = [
    pytest.mark.xdist_group("libtpu"),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed: axlearn-tpu[aot]",
    ),
]
TWO_GROUPS = 'mesh_shape={"expert": 2, "fsdp": -1}'
EXPERTS = "model.decoder.layer.feed_forward.num_experts"


@pytest.fixture(autouse=True, scope="module")
def no_compile_cache():
    """JAX's own cache cannot be read back by a compiler without devices."""
    former = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX remembers whether it was on
    yield
    jax.config.update("jax_enable_compilation_cache", former)
    compilation_cache.reset_cache()


@pytest.mark.timeout(900)  # up to 80 CPU-seconds each, on cores that others may use too
@pytest.mark.parametrize(
    ("name", "instance", "sets", "kernel"),
    [
        pytest.param(
            "qwen3-30B-A3B",
            "gpu-b200-8",
            ["model.decoder.num_layers=2", "seq_len=4096", "batch_size=16"],
            "pallas_triton",
            marks=GPU,
        ),
        pytest.param(
            "deepseek-V3",
            "gpu-h100-16",
            ["model.decoder.num_layers=4", f"{EXPERTS}=32", "batch_size=16"],
            "pallas_triton",
            marks=GPU,
        ),
        pytest.param(
            "qwen3-30B-A3B",
            "tpu-v5p-16",
            [
                *("model.decoder.num_layers=1", f"{EXPERTS}=16", "model.vocab_size=4096"),
                *("seq_len=1024", "batch_size=8"),
            ],
            "pallas_megablox",
            marks=TPU,
        ),
    ],
    ids=["qwen3 B200", "deepseek H100", "qwen3 v5p"],
)
def test_a_mixture_in_two_groups_fits_and_exchanges_as_many_bytes_as_predicted(
    name, instance, sets, kernel
):
    """Half of what a device's tokens send is for the other group, in each of six exchanges."""
    report = aot(
        assemble(experiments.get(name), instance=instance, sets=[TWO_GROUPS, *sets]), advice=False
    )
    assert report.fits and report.mesh["expert"] == 2
    chosen = {k["chosen"] for k in report.kernels if k["op"] == "grouped_matmul"}
    assert chosen == {kernel}
    exchanged = {c.mesh_axes: c for c in report.collectives if c.kind == "ragged-all-to-all"}
    assert exchanged.keys() == {"expert"}
    predicted = report.predicted["collective_bytes"]
    assert exchanged["expert"].received_bytes == predicted["all_to_all expert"]
