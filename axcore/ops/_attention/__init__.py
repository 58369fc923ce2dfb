"""Scaled dot-product attention: contract, pure-XLA reference, one file per further mechanism."""

from axcore.ops._attention._contract import DenseKV, KVView, attention

__all__ = ["DenseKV", "KVView", "attention"]
