"""ViT: a classifier of images that reads patches as a sequence.

``config.py`` has the members, ``convert.py`` their published weights.
"""
