"""Rotary position embeddings for axcore."""

__version__ = "0.1.0"
