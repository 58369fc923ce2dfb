"""AFM: the pair of foundation language models that Apple describes; weights are not published.

``config.py`` has the members and says what is published and what is chosen here.
"""
