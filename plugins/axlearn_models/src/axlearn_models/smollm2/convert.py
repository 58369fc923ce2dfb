"""Published weights of SmolLM2: they have the form of Llama's, so fuji's converters serve them."""

from __future__ import annotations

from axlearn_models.fuji.convert import GGUFLlama, HuggingFaceLlama

__all__ = ["GGUFLlama", "HuggingFaceLlama"]
