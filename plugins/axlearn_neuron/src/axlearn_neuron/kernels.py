"""The kernels that this package registers, best first; strings only."""

from __future__ import annotations

from collections.abc import Mapping

from axcore.ops.references import FEW_LOGITS, FEW_LOGITS_TEXT, reference_kernel
from axcore.plugins import KernelSpec

__all__ = ["KERNELS", "NKI"]

_QUERIES = ("batch", "heads")
_KEYS = ("batch", "kv_heads")

#: Op and implementation of each kernel that needs the vendor's packages.
NKI = (("attention", "nki_flash"), ("rms_norm", "nki"))


def _kernel(
    op: str,
    implementation: str,
    target: str,
    supports: str,
    partitioning: Mapping[str, tuple[str, ...]],
    description: str,
) -> KernelSpec:
    return KernelSpec(
        op=op,
        implementation=implementation,
        platforms=("neuron",),
        target=f"axlearn_neuron.{target}",
        supports=f"axlearn_neuron.supports:{supports}",
        partitioning=partitioning,
        priority=30,
        description=description,
    )


KERNELS: tuple[KernelSpec, ...] = (
    _kernel(
        "attention",
        "nki_flash",
        "nki_flash_attention:attention_nki",
        "nki_flash",
        {
            "q": _QUERIES,
            "k": _KEYS,
            "v": _KEYS,
            "q_positions": ("batch",),
            "kv_positions": ("batch",),
            "q_segment_ids": ("batch",),
            "kv_segment_ids": ("batch",),
        },
        "the vendor's flash attention: full and causal masks, segment ids; head dims up to 128",
    ),
    _kernel(
        "rms_norm",
        "nki",
        "nki_rms_norm:rms_norm_nki",
        "nki_rms_norm",
        {"x": ("batch", "seq", "residual_seq", "heads")},
        "one pass over memory forward, XLA backward",
    ),
    reference_kernel(
        "attention", "xla_neuron", "neuron", supports=FEW_LOGITS, serves=FEW_LOGITS_TEXT
    ),
    reference_kernel(
        "rms_norm",
        "xla_neuron",
        "neuron",
        supports="axlearn_neuron.supports:xla_norm",
        serves="for what the NKI kernel does not serve",
    ),
)
