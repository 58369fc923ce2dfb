"""Fine-tuning few parameters: LoRA, DoRA and freezing as modifiers; merge, export, attach.

The adapters are :class:`axcore.layers.LoRA` and :class:`axcore.layers.DoRA`. A modifier puts them
into any config; see ``docs/peft.md``.
"""

from axcore.peft._attach import attach, detach, linear_paths
from axcore.peft._directory import attach_adapter, export_adapter, merge_adapter
from axcore.peft._merge import merge_state, plain_config
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
    "attach_adapter",
    "detach",
    "export_adapter",
    "linear_paths",
    "merge_adapter",
    "merge_state",
    "plain_config",
]
