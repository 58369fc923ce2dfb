"""The kernels that this package registers, best first; strings only."""

from __future__ import annotations

from axcore.ops.references import FEW_LOGITS, FEW_LOGITS_TEXT, reference_kernel
from axcore.plugins import KernelSpec

__all__ = ["KERNELS"]

_ROWS = ("batch",)
_ATTENTION = {
    "q": ("batch", "heads"),
    "k": ("batch", "kv_heads"),
    "v": ("batch", "kv_heads"),
    "sinks": ("heads",),
    "q_positions": _ROWS,
    "kv_positions": _ROWS,
    "kv_valid": _ROWS,
    "q_segment_ids": _ROWS,
    "kv_segment_ids": _ROWS,
    "prefix_lengths": _ROWS,
}

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        op="attention",
        implementation="pallas_splash",
        platforms=("tpu",),
        target="axlearn_tpu.pallas_splash:attention_splash",
        supports="axlearn_tpu.supports:splash",
        partitioning=_ATTENTION,
        priority=30,
        description="JAX's splash attention: blocks that the mask hides are skipped",
    ),
    KernelSpec(
        op="grouped_matmul",
        implementation="pallas_megablox",
        platforms=("tpu",),
        target="axlearn_tpu.pallas_grouped_matmul:grouped_matmul_megablox",
        supports="axlearn_tpu.supports:megablox",
        partitioning={"weights": ("mlp",)},
        priority=30,
        description="JAX's megablox: tiles of rows, each with its group's matrix",
    ),
    KernelSpec(
        op="paged_attention",
        implementation="pallas_paged",
        platforms=("tpu",),
        target="axlearn_tpu.pallas_paged_attention:paged_attention_pallas",
        supports="axlearn_tpu.supports:paged_attention",
        partitioning={
            "q": ("batch", "heads"),
            "k_pages": ("kv_heads",),
            "v_pages": ("kv_heads",),
            "lengths": _ROWS,
            "page_table": _ROWS,
        },
        priority=30,
        description="JAX's paged attention: pages are copied while others are computed",
    ),
    reference_kernel("attention", "xla_tpu", "tpu", supports=FEW_LOGITS, serves=FEW_LOGITS_TEXT),
    reference_kernel("grouped_matmul", "xla_tpu", "tpu"),
    reference_kernel("paged_attention", "xla_tpu", "tpu"),
)
