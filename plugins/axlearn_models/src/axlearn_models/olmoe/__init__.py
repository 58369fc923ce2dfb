"""OLMoE: the open mixture of experts of Ai2, 64 experts a layer, 8 of them for each token.

``config.py`` has the members, ``convert.py`` their published weights.
"""
