"""BERT: a bidirectional encoder of text, trained to tell hidden tokens.

``config.py`` has the members, ``convert.py`` their published weights.
"""
