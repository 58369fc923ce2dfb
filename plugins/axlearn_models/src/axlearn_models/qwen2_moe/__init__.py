"""Qwen1.5's and Qwen2's mixtures of experts: 60 experts a layer and a shared one with a gate.

``config.py`` has the members, ``convert.py`` their published weights.
"""
