"""Rotary position embeddings for axcore.

``RoPE`` is a query/key transform of attention: put its config in the slot
``query_key_transform`` of any attention, by hand or with the modifier ``RoPEModifier``
(``--modifier axlearn-rope:rope``)::

    cfg = experiments.get("tiny-lm")
    for attention in cfg.find(Attention.Config).values():
        attention.query_key_transform = RoPE.Config(base=500_000.0)

Names are loaded on first use, so importing the package (and registering it) imports no JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.lazy import lazy_attributes

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "RoPE": "axlearn_rope._rope",
    "MultiAxis": "axlearn_rope._axes",
    "RoPEModifier": "axlearn_rope._modifier",
    "RoPEScaling": "axlearn_rope._scaling",
    "LinearScaling": "axlearn_rope._scaling",
    "NTKScaling": "axlearn_rope._scaling",
    "DynamicNTKScaling": "axlearn_rope._scaling",
    "Llama3Scaling": "axlearn_rope._scaling",
    "YaRNScaling": "axlearn_rope._scaling",
    "LongRoPEScaling": "axlearn_rope._scaling",
    "rotary_frequencies": "axlearn_rope._scaling",
    "rope_from_hf": "axlearn_rope._huggingface",
    "rope_to_hf": "axlearn_rope._huggingface",
}

__all__ = [
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "MultiAxis",
    "NTKScaling",
    "RoPE",
    "RoPEModifier",
    "RoPEScaling",
    "YaRNScaling",
    "__version__",
    "rope_from_hf",
    "rope_to_hf",
    "rotary_frequencies",
]

if TYPE_CHECKING:
    from axlearn_rope._axes import MultiAxis as MultiAxis
    from axlearn_rope._huggingface import rope_from_hf as rope_from_hf
    from axlearn_rope._huggingface import rope_to_hf as rope_to_hf
    from axlearn_rope._modifier import RoPEModifier as RoPEModifier
    from axlearn_rope._rope import RoPE as RoPE
    from axlearn_rope._scaling import DynamicNTKScaling as DynamicNTKScaling
    from axlearn_rope._scaling import LinearScaling as LinearScaling
    from axlearn_rope._scaling import Llama3Scaling as Llama3Scaling
    from axlearn_rope._scaling import LongRoPEScaling as LongRoPEScaling
    from axlearn_rope._scaling import NTKScaling as NTKScaling
    from axlearn_rope._scaling import RoPEScaling as RoPEScaling
    from axlearn_rope._scaling import YaRNScaling as YaRNScaling
    from axlearn_rope._scaling import rotary_frequencies as rotary_frequencies

__getattr__, __dir__ = lazy_attributes(globals(), _PUBLIC)
