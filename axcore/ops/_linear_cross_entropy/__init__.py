"""Output projection and cross-entropy in one: full logits never exist."""

from axcore.ops._linear_cross_entropy._contract import LinearCrossEntropy, linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]
