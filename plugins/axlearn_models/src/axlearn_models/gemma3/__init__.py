"""Gemma 3: Google's models of 2025, their text part; five local layers, then a global one.

``config.py`` has the members, ``convert.py`` their published weights.
"""
