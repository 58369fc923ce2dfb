"""Qwen3 with mixtures of experts: 128 experts a layer, 8 of them for each token.

``config.py`` has the members, ``convert.py`` their published weights.
"""
