"""GPT-2: learned positions, LayerNorm, biases everywhere, a tied head.

``config.py`` has the members, ``convert.py`` their published weights.
"""
