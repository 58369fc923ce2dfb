"""glassllm: the two models of 0.85M parameters in the package of that name, Llama-like in NumPy.

``config.py`` has the member, ``convert.py`` the weights, ``tokenizer.py`` the tokenizer: small
enough to hold every converted number, gradients included, against the package's own.
"""
