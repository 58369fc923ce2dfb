"""The kernels that this package registers, best first; strings only."""

from __future__ import annotations

from collections.abc import Mapping

from axcore.ops.references import FEW_LOGITS, FEW_LOGITS_TEXT, reference_kernel
from axcore.plugins import KernelSpec

__all__ = ["KERNELS"]

_QUERIES = ("batch", "heads")
_KEYS = ("batch", "kv_heads")
_ROWS = ("batch", "seq", "residual_seq")
_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "q": _QUERIES,
    "k": _KEYS,
    "v": _KEYS,
    "q_positions": ("batch",),
    "kv_positions": ("batch",),
    "kv_valid": ("batch",),
    "q_segment_ids": ("batch",),
    "kv_segment_ids": ("batch",),
}
_GATES = {name: ("batch", "seq", "mlp") for name in ("gate", "up")}
# Ops whose reference ends the list.
_PLAIN = (
    "add_rms_norm",
    "attention",
    "gated_activation",
    "grouped_matmul",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
)


def _kernel(
    op: str,
    implementation: str,
    target: str,
    supports: str,
    partitioning: Mapping[str, tuple[str, ...]],
    priority: int,
    description: str,
) -> KernelSpec:
    return KernelSpec(
        op=op,
        implementation=implementation,
        platforms=("gpu",),
        target=f"axlearn_gpu.{target}",
        supports=f"axlearn_gpu.supports:{supports}",
        partitioning=partitioning,
        priority=priority,
        description=description,
    )


def _plain(op: str) -> KernelSpec:
    if op == "attention":
        return reference_kernel(op, "xla_gpu", "gpu", supports=FEW_LOGITS, serves=FEW_LOGITS_TEXT)
    return reference_kernel(op, "xla_gpu", "gpu")


KERNELS: tuple[KernelSpec, ...] = (
    _kernel(
        "attention",
        "cudnn",
        "cudnn_attention:attention_cudnn",
        "cudnn",
        _ATTENTION,
        30,
        "cuDNN's fused attention: full, causal and windowed masks, 16-bit",
    ),
    _kernel(
        "attention",
        "tokamax_mosaic",
        "tokamax_attention:attention_tokamax",
        "tokamax_mosaic",
        _ATTENTION,
        20,
        "tokamax's Mosaic-GPU attention for Hopper and Blackwell, without gradient",
    ),
    _kernel(
        "attention",
        "pallas_triton",
        "pallas_attention:attention_pallas",
        "pallas_triton",
        _ATTENTION,
        10,
        "blockwise attention of this package: also segment ids, windows to both sides, soft caps",
    ),
    _kernel(
        "rms_norm",
        "triton",
        "triton_rms_norm:rms_norm_triton",
        "triton_norm",
        {"x": (*_ROWS, "heads")},
        0,
        "one pass each way, a row in registers",
    ),
    _kernel(
        "add_rms_norm",
        "triton",
        "triton_rms_norm:add_rms_norm_triton",
        "triton_norm",
        {"x": _ROWS, "residual": _ROWS},
        0,
        "residual sum and norm in one pass each way",
    ),
    _kernel(
        "grouped_matmul",
        "pallas_triton",
        "pallas_grouped_matmul:grouped_matmul_pallas",
        "pallas_grouped",
        {"weights": ("mlp",)},
        0,
        "tiles of rows, each with its group's matrix; matrices in fewer bits are widened on chip",
    ),
    _kernel(
        "gated_activation",
        "triton",
        "triton_swiglu:gated_activation_triton",
        "triton_gated_activation",
        _GATES,
        0,
        "silu, tanh-gelu and relu gates, one pass each way",
    ),
    _kernel(
        "rotary",
        "triton",
        "triton_rotary:rotary_triton",
        "triton_rotary",
        {
            "q": ("batch", "seq", "heads"),
            "k": ("batch", "seq", "kv_heads"),
            "cos": ("batch", "seq"),
            "sin": ("batch", "seq"),
        },
        0,
        "all heads of a position in one pass",
    ),
    _kernel(
        "linear_cross_entropy",
        "triton",
        "triton_linear_cross_entropy:linear_cross_entropy_triton",
        "triton_linear_cross_entropy",
        {name: ("batch", "seq") for name in ("hidden", "targets", "mask")},
        # Below the reference, whose products are the tuned library's: for whoever lacks the memory.
        -110,
        "forward without logits in memory; backward in chunks",
    ),
    *(_plain(op) for op in _PLAIN),
)
