"""Gemma 2: Google's models of 2024; local and global layers in turn, capped logits.

``config.py`` has the members, ``convert.py`` their published weights.
"""
