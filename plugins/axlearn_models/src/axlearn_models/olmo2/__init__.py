"""OLMo 2: the open models of Ai2; norms after each branch, norms over all heads together.

``config.py`` has the members, ``convert.py`` their published weights.
"""
