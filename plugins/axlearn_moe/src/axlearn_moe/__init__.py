"""Mixture-of-experts layers for axcore."""

__version__ = "0.1.0"
