"""fuji: the models that Meta publishes as Llama 1, 2 and 3, with their training recipes.

``config.py`` has the members, ``convert.py`` their published weights.
"""
