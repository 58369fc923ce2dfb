"""Mixtral: the mixtures of experts that Mistral AI publishes, 8 experts a layer, 2 for each token.

``config.py`` has the members, ``convert.py`` their published weights.
"""
