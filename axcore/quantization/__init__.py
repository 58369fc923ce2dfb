"""Quantization recipes: products of few bits to train with, weights and caches of few to serve.

A recipe is a modifier: it replaces products (:class:`axcore.ops.DotGeneral`) of any model and edits
no layer. Recipes are registered under a name through the hook ``axcore_quantization``; a hardware
plugin's rule chooses one with :class:`QuantizeModifier`. See ``docs/quantization.md``.
"""

from axcore.quantization._calibrate import ObserverDot, calibrate
from axcore.quantization._delayed import DelayedFp8Dot, is_recipe_state
from axcore.quantization._dots import (
    Fp8Dot,
    Int4Dot,
    Int8Dot,
    MxFp8Dot,
    QuantizedDot,
)
from axcore.quantization._grouped import quantized_grouped_product
from axcore.quantization._instance import check_instance, is_quantized
from axcore.quantization._kv_cache import QuantizedKVCache
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
from axcore.quantization._products import (
    Magnitudes,
    Plan,
    contract,
    contract_blocks,
    labels,
    quantized_product,
)
from axcore.quantization._serving import (
    KVCacheRecipe,
    StoredRecipe,
    fp8_kv,
    fp8_serving,
    fp8_static,
    fp8_weights,
    int4_weights,
    int8_kv,
    int8_serving,
    int8_static,
    int8_weights,
)
from axcore.quantization._stored import StoredDot, quantize_weight
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
    "KVCacheRecipe",
    "Magnitudes",
    "MxFp8Dot",
    "MxFp8Recipe",
    "ObserverDot",
    "Operand",
    "Plan",
    "QuantizeModifier",
    "Quantized",
    "QuantizedDot",
    "QuantizedKVCache",
    "Recipe",
    "Site",
    "StoredDot",
    "StoredRecipe",
    "Unquantized",
    "calibrate",
    "check_instance",
    "contract",
    "contract_blocks",
    "dequantize",
    "find_sites",
    "fp8_kv",
    "fp8_serving",
    "fp8_static",
    "fp8_weights",
    "int4_weights",
    "int8_kv",
    "int8_serving",
    "int8_static",
    "int8_weights",
    "is_quantized",
    "is_recipe_state",
    "labels",
    "largest",
    "quantize",
    "quantize_blocks",
    "quantize_weight",
    "quantized_grouped_product",
    "quantized_product",
]
