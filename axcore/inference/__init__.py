"""Inference: generation with the modules that train, and reading model directories."""

from axcore.inference._generate import Generation, Generator, Sampling
from axcore.inference._model_dir import LoadedModel, load_model

__all__ = ["Generation", "Generator", "LoadedModel", "Sampling", "load_model"]
