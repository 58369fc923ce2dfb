"""Evidence that a converted model computes what its source does."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from axcore.checkpoint.convert._source import TensorSource
from axcore.errors import CheckpointError

if TYPE_CHECKING:
    from axcore.checkpoint.convert._family import Oracle

__all__ = ["model_logits", "prompt_ids", "transformers_oracle"]

_ROWS = 2
_TOKENS = 24
_TEXT = (
    "The capital of France is Paris. def add(a, b): return a + b. Water boils at 100 degrees; "
    "1 + 1 = 2, and the quick brown fox jumps over the lazy dog. Once upon a time there was a "
    "small model that had been converted with care."
)


def prompt_ids(tokenizer: Any, vocab_size: int, limit: int | None = None) -> np.ndarray:
    """Returns the fixed prompts as int32 ids (rows, tokens).

    Args:
        tokenizer: What makes ids of the text; None takes fixed pseudo-random ids.
        vocab_size: Number of ids of the model.
        limit: Longest row that the model takes.
    """
    tokens = _TOKENS if limit is None else max(1, min(_TOKENS, limit))
    count = _ROWS * tokens
    ids = np.asarray([] if tokenizer is None else tokenizer.encode(_TEXT), np.int32)
    ids = ids[ids < vocab_size]
    more = count - len(ids)
    if more > 0:  # a text of few tokens is filled up with ids of the whole vocabulary
        ids = np.concatenate([ids, np.random.default_rng(0).integers(0, vocab_size, more)])
    return ids[:count].astype(np.int32).reshape(_ROWS, tokens)


def model_logits(model: Any, state: Any, input_ids: np.ndarray) -> np.ndarray:
    """Returns a causal language model's logits, float32 (batch, seq, vocab_size)."""
    import jax

    from axcore import functional

    def run(state: Any, ids: Any) -> Any:
        inputs = {"input_ids": ids}
        return functional(model, state=state, inputs=inputs, method="logits", is_training=False)[0]

    return np.asarray(jax.jit(run)(state, input_ids), np.float32)


def transformers_oracle(source: TensorSource) -> Oracle | None:
    """Returns the source as a causal language model of ``transformers``, in float32.

    It runs no code of the source's, reads safetensors or GGUF only, and asks no network.

    Raises:
        CheckpointError: ``transformers`` is absent or cannot run it (AX623).
    """
    if source.format not in ("hf", "gguf"):
        return None
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(
                f"{package} is not installed",
                code="AX623",
                hint="with torch and transformers the source's own logits are compared",
            )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)
    directory = source.path if source.path.is_dir() else source.path.parent
    if source.format == "gguf":
        options["gguf_file"] = source.path.name
    else:
        options["use_safetensors"] = True
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    except Exception as error:  # whatever another library makes of the files
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers cannot run it: {type(error).__name__}: {text}", code="AX623"
        ) from error
    model.eval()

    def run(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(ids.astype(np.int64))).logits.float().numpy()

    return run
