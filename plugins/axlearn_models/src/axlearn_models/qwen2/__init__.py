"""Qwen2.5: the dense models that the Qwen team publishes, biases on queries, keys and values.

``config.py`` has the members, ``convert.py`` their published weights.
"""
