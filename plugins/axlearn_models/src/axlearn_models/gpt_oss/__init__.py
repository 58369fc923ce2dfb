"""GPT-OSS: the open mixtures of experts of OpenAI; sinks, and a window in every other layer.

``config.py`` has the members, ``convert.py`` their published weights.
"""
