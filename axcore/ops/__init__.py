"""Operations with a contract, a pure-XLA reference, and kernels that plugins add.

Each function here states its maths, shapes and dtypes, chooses an implementation when it is traced
(:mod:`axcore.ops._select`) and runs it. On a CPU target that is the reference; elsewhere the first
implementation of the target's acceptable list that serves the call.

Names load on first use, so that configurations and kernels' ``supports`` can use the masks without
importing JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.lazy import lazy_attributes

# name -> module that defines it
_PUBLIC = {
    "ACTIVATIONS": "axcore.ops._activation",
    "And": "axcore.ops.masks",
    "BaseDotGeneral": "axcore.ops.dot_general",
    "Causal": "axcore.ops.masks",
    "DenseKV": "axcore.ops._attention",
    "DotGeneral": "axcore.ops.dot_general",
    "Full": "axcore.ops.masks",
    "KVView": "axcore.ops._attention",
    "KernelChoice": "axcore.ops._records",
    "LinearCrossEntropy": "axcore.ops._linear_cross_entropy",
    "Mask": "axcore.ops.masks",
    "MaskArrays": "axcore.ops.masks",
    "OpRule": "axcore.ops._records",
    "PrefixLM": "axcore.ops.masks",
    "REFERENCE": "axcore.ops._select",
    "Refusal": "axcore.ops._records",
    "SegmentIds": "axcore.ops.masks",
    "SlidingWindow": "axcore.ops.masks",
    "TracedWindow": "axcore.ops.masks",
    "activation": "axcore.ops._activation",
    "add_rms_norm": "axcore.ops._norms",
    "all_gather_matmul": "axcore.ops._collective_matmul",
    "ambient_target": "axcore.ops._select",
    "attention": "axcore.ops._attention",
    "gated_activation": "axcore.ops._activation",
    "group_of_rows": "axcore.ops._grouped_matmul",
    "grouped_matmul": "axcore.ops._grouped_matmul",
    "layer_norm": "axcore.ops._norms",
    "linear_cross_entropy": "axcore.ops._linear_cross_entropy",
    "matmul_reduce_scatter": "axcore.ops._collective_matmul",
    "on_target": "axcore.ops._select",
    "paged_attention": "axcore.ops._paged_attention",
    "record_choices": "axcore.ops._select",
    "reference": "axcore.ops._select",
    "rms_norm": "axcore.ops._norms",
    "rotary": "axcore.ops._rotary",
    "select": "axcore.ops._select",
}

__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from axcore.ops._activation import ACTIVATIONS as ACTIVATIONS
    from axcore.ops._activation import activation as activation
    from axcore.ops._activation import gated_activation as gated_activation
    from axcore.ops._attention import DenseKV as DenseKV
    from axcore.ops._attention import KVView as KVView
    from axcore.ops._attention import attention as attention
    from axcore.ops._collective_matmul import all_gather_matmul as all_gather_matmul
    from axcore.ops._collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
    from axcore.ops._grouped_matmul import group_of_rows as group_of_rows
    from axcore.ops._grouped_matmul import grouped_matmul as grouped_matmul
    from axcore.ops._linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from axcore.ops._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from axcore.ops._norms import add_rms_norm as add_rms_norm
    from axcore.ops._norms import layer_norm as layer_norm
    from axcore.ops._norms import rms_norm as rms_norm
    from axcore.ops._paged_attention import paged_attention as paged_attention
    from axcore.ops._records import KernelChoice as KernelChoice
    from axcore.ops._records import OpRule as OpRule
    from axcore.ops._records import Refusal as Refusal
    from axcore.ops._rotary import rotary as rotary
    from axcore.ops._select import REFERENCE as REFERENCE
    from axcore.ops._select import ambient_target as ambient_target
    from axcore.ops._select import on_target as on_target
    from axcore.ops._select import record_choices as record_choices
    from axcore.ops._select import reference as reference
    from axcore.ops._select import select as select
    from axcore.ops.dot_general import BaseDotGeneral as BaseDotGeneral
    from axcore.ops.dot_general import DotGeneral as DotGeneral
    from axcore.ops.masks import And as And
    from axcore.ops.masks import Causal as Causal
    from axcore.ops.masks import Full as Full
    from axcore.ops.masks import Mask as Mask
    from axcore.ops.masks import MaskArrays as MaskArrays
    from axcore.ops.masks import PrefixLM as PrefixLM
    from axcore.ops.masks import SegmentIds as SegmentIds
    from axcore.ops.masks import SlidingWindow as SlidingWindow
    from axcore.ops.masks import TracedWindow as TracedWindow

__getattr__, __dir__ = lazy_attributes(globals(), _PUBLIC)
