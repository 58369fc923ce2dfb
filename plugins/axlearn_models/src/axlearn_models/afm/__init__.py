"""AFM: the pair of foundation language models that Apple describes; weights are not published.

``config.py`` has the members and says what is published and what is chosen here. Its structure is
Qwen3's, so a model of it is exported as ``hf:Qwen3ForCausalLM``.
"""
