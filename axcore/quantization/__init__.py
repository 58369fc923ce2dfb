"""Quantization recipes: products of few bits to train with, weights and caches of few to serve.

A recipe is a modifier: it replaces products (:class:`axcore.ops.DotGeneral`) of any model and edits
no layer. Recipes are registered under a name through the hook ``axcore_quantization``; a hardware
plugin's rule chooses one with :class:`QuantizeModifier`. See ``docs/quantization.md``.
"""

from axcore.quantization._dots import (
    DelayedFp8Dot,
    Fp8Dot,
    Int4Dot,
    Int8Dot,
    MxFp8Dot,
    QuantizedDot,
)
from axcore.quantization._modifiers import (
    DelayedFp8Recipe,
    Fp8Recipe,
    Int4Recipe,
    Int8Recipe,
    MxFp8Recipe,
    QuantizeModifier,
    Recipe,
    Unquantized,
)
from axcore.quantization._place import DEFAULT_EXCLUDE, Site, find_sites
from axcore.quantization._products import Plan, contract, contract_blocks, quantized_product
from axcore.quantization._values import (
    Operand,
    Quantized,
    dequantize,
    largest,
    quantize,
    quantize_blocks,
)

__all__ = [
    "DEFAULT_EXCLUDE",
    "DelayedFp8Dot",
    "DelayedFp8Recipe",
    "Fp8Dot",
    "Fp8Recipe",
    "Int4Dot",
    "Int4Recipe",
    "Int8Dot",
    "Int8Recipe",
    "MxFp8Dot",
    "MxFp8Recipe",
    "Operand",
    "Plan",
    "QuantizeModifier",
    "Quantized",
    "QuantizedDot",
    "Recipe",
    "Site",
    "Unquantized",
    "contract",
    "contract_blocks",
    "dequantize",
    "find_sites",
    "largest",
    "quantize",
    "quantize_blocks",
    "quantized_product",
]
