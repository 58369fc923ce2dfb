"""Published weights of MiniLM: they have the form of BERT's, so its converters serve them."""

from __future__ import annotations

from axlearn_models.bert.convert import HuggingFaceBert, HuggingFaceBertMaskedLM

__all__ = ["HuggingFaceBert", "HuggingFaceBertMaskedLM"]
