"""T5: an encoder and a decoder with relative position biases, trained to fill in spans.

``config.py`` has the members, ``convert.py`` their published weights.
"""
