"""MiniLM: small encoders of BERT's structure, distilled; the base of many sentence embeddings.

``config.py`` has the members, ``convert.py`` their published weights.
"""
