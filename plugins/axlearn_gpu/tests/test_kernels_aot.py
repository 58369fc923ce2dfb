"""Kernels compiled for GPUs that are not here, to machine code; nothing is run."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from axcore.ops import Causal, SegmentIds
from axcore.parallel import resolve_instance
from axcore.parallel.aot import compiler_for
from axlearn_gpu._target import SILICON
from axlearn_gpu.pallas_attention import attention_pallas
from axlearn_gpu.pallas_grouped_matmul import grouped_matmul_pallas

pytestmark = [
    pytest.mark.aot,
    pytest.mark.xdist_group("gpu-aot"),
    pytest.mark.usefixtures("cuda_compiler"),
]
GPUS = ("h100", "h200", "b200")


def compiled(gpu, function, shapes, dtype="bfloat16", static=()):
    """Returns the program of a function and its gradients, for one GPU.

    Args:
        gpu: The GPU.
        function: Takes the arrays by name; its floating-point results are summed.
        shapes: Name -> shape of a differentiated array.
        dtype: Of those.
        static: Name -> ``ShapeDtypeStruct`` of the others.
    """
    instance = resolve_instance(f"gpu-{gpu}-1")
    compiler = compiler_for(instance)
    compiler.prepare()
    sharding = SingleDeviceSharding(compiler.devices(instance)[0])
    floats = {n: jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for n, s in shapes.items()}
    others = {
        n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)
        for n, s in dict(static).items()
    }

    def total(floats, others):
        leaves = jax.tree.leaves(function(**floats, **others))
        floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x.astype(jnp.float32)) for x in floating)

    lowered = (
        jax.jit(jax.value_and_grad(total)).trace(floats, others).lower(lowering_platforms=("cuda",))
    )
    return lowered.compile(compiler_options=dict(compiler.compile_options(instance)))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "bfloat16"), (256, "float16")])
def test_attention_fits_the_gpu_and_keeps_no_logits(gpu, head_dim, dtype):
    """Shared memory that does not suffice would be an error of the compiler."""

    def attend(q, k, v, ids):
        mask = Causal() & SegmentIds()
        ids = {"q_segment_ids": ids, "kv_segment_ids": ids}
        return attention_pallas(q, k, v, mask=mask, logit_scale=0.1, logit_cap=30.0, **ids)

    t = 8192
    shapes = {"q": (1, t, 8, head_dim), "k": (1, t, 2, head_dim), "v": (1, t, 2, head_dim)}
    ids = {"ids": jax.ShapeDtypeStruct((1, t), jnp.int32)}
    with jax.default_matmul_precision("highest"):  # a setting of users that must not reach inside
        program = compiled(gpu, attend, shapes, dtype, ids)
    # One head's logits in bfloat16 would take this much.
    assert program.memory_analysis().temp_size_in_bytes < 2 * t * t


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("weights", "kernels"), [("bfloat16", 3), ("float8_e4m3fn", 2), ("int8", 2)]
)
def test_grouped_products_fit_the_gpu_and_make_nothing_per_expert(gpu, weights, kernels):
    """Forward, the rows' gradient, and that of matrices that are as wide as rows."""
    m, k, n, experts = 65536, 1024, 768, 64
    matrices = jax.ShapeDtypeStruct((experts, k, n), weights)
    sizes = {"sizes": jax.ShapeDtypeStruct((experts,), jnp.int32)}
    trained = weights == "bfloat16"
    program = compiled(
        gpu,
        lambda rows, weights, sizes: grouped_matmul_pallas(rows, weights, sizes),
        {"rows": (m, k), **({"weights": matrices.shape} if trained else {})},
        static=sizes if trained else {"weights": matrices, **sizes},
    )
    assert program.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == kernels
    # The result and its gradient in bfloat16, where XLA's own ragged product has one per expert.
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * 2 * (2 * m * n)


TRITON = {
    "rms_norm": ("triton_rms_norm:rms_norm_triton", {"x": (2, 64, 4096), "scale": (4096,)}, {}),
    "add_rms_norm": (
        "triton_rms_norm:add_rms_norm_triton",
        {"x": (2, 64, 4096), "residual": (2, 64, 4096), "scale": (4096,)},
        {},
    ),
    "gated_activation": (
        "triton_swiglu:gated_activation_triton",
        {"gate": (2, 64, 1024), "up": (2, 64, 1024)},
        {"activation": "silu"},
    ),
    "rotary": (
        "triton_rotary:rotary_triton",
        {"q": (2, 64, 8, 128), "k": (2, 64, 2, 128), "cos": (1, 64, 64), "sin": (1, 64, 64)},
        {"pairing": "interleaved"},
    ),
    "linear_cross_entropy": (
        "triton_linear_cross_entropy:linear_cross_entropy_triton",
        {"hidden": (2, 64, 1024), "weight": (32000, 1024)},
        {"logit_cap": 30.0, "chunk_tokens": 64},
    ),
}


@pytest.mark.parametrize(("gpu", "number"), [("h100", 90), ("h200", 90), ("b200", 100)])
def test_triton_kernels_compile_both_ways(gpu, number, monkeypatch):
    for name in ("jax_triton", "triton"):
        pytest.importorskip(name, reason=f"{name} is not installed; axlearn-gpu brings it on Linux")
    from axcore.plugins import load_target

    assert SILICON[gpu].capability == divmod(number, 10)
    for op, (target, shapes, options) in TRITON.items():
        function = load_target(f"axlearn_gpu.{target}", where=op)
        module = __import__(function.__module__, fromlist=["current_capability"])
        monkeypatch.setattr(module, "current_capability", lambda: number)
        targets = {"targets": jax.ShapeDtypeStruct((2, 64), jnp.int32)}
        static = targets if op == "linear_cross_entropy" else {}
        text = compiled(
            gpu, lambda f=function, o=options, **arrays: f(**arrays, **o), shapes, static=static
        ).as_text()
        assert text.count('custom_call_target="triton_kernel_call"') >= 2, op
