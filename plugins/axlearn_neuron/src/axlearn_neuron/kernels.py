"""The kernels that this package registers, best first; strings only."""

from __future__ import annotations

from collections.abc import Mapping

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


def _plain(op: str, supports: str, what_for: str) -> KernelSpec:
    """The reference, last in the list of an op."""
    return KernelSpec(
        op=op,
        implementation="xla_neuron",
        platforms=("neuron",),
        target=f"axlearn_neuron.reference:{op}",
        supports=f"axlearn_neuron.supports:{supports}",
        compiler_partitioned=True,
        priority=-100,
        description=f"the XLA reference, for {what_for}",
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
    _plain("attention", "xla_attention", "fewer than 2,048 keys and for caches"),
    _plain("rms_norm", "xla_norm", "what the NKI kernel does not serve"),
)
