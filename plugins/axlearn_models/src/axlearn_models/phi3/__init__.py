"""Phi-3: the dense Llama-like models that Microsoft publishes as mini and medium.

``config.py`` has the members, ``convert.py`` their published weights.
"""
