"""Inference: generation with the modules that train, and reading model directories."""

from axcore.inference._comparison import compare_logits
from axcore.inference._engine import Generation, Generator, check_ids
from axcore.inference._model_dir import LoadedModel, load_model, write_model
from axcore.inference._quantize import quantize_directory, quantize_state
from axcore.inference._sampling import Chooser, Sampling
from axcore.inference._text import Completion, TextStream, complete
from axcore.inference._unrolled import unrolled

__all__ = [
    "Chooser",
    "Completion",
    "Generation",
    "Generator",
    "LoadedModel",
    "Sampling",
    "TextStream",
    "check_ids",
    "compare_logits",
    "complete",
    "load_model",
    "quantize_directory",
    "quantize_state",
    "unrolled",
    "write_model",
]
