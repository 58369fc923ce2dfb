"""Mistral: the dense models that Mistral AI publishes.

``config.py`` has the members, ``convert.py`` their published weights.
"""
