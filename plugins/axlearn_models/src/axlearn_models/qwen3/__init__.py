"""Qwen3: the dense models that the Qwen team publishes, norms on queries and keys, no biases.

``config.py`` has the members, ``convert.py`` their published weights.
"""
