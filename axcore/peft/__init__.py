"""Fine-tuning few parameters: LoRA, DoRA and freezing as modifiers; merge, export, attach.

The adapters are :class:`axcore.layers.LoRA` and :class:`axcore.layers.DoRA`. A modifier puts them
into any config; see ``docs/peft.md``.
"""

from axcore.peft._attach import attach, detach, linear_paths
from axcore.peft._modifiers import (
    ADAPTER_PATTERN,
    BaseLoRAModifier,
    DoRAModifier,
    FreezeModifier,
    LoRAModifier,
)

__all__ = [
    "ADAPTER_PATTERN",
    "BaseLoRAModifier",
    "DoRAModifier",
    "FreezeModifier",
    "LoRAModifier",
    "attach",
    "detach",
    "linear_paths",
]
