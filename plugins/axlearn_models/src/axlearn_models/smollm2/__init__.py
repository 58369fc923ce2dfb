"""SmolLM2: Hugging Face's small models, with their training recipes.

``config.py`` has the members, ``convert.py`` their published weights.
"""
