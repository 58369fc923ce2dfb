"""Evidence that a converted model computes what its source does."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axcore.checkpoint.convert._model import parameters
from axcore.checkpoint.convert._report import Comparison
from axcore.checkpoint.convert._source import TensorSource
from axcore.errors import CheckpointError

if TYPE_CHECKING:
    from axcore.checkpoint.convert._family import ModelFamily, Oracle

__all__ = ["compare", "model_logits", "prompt_ids", "transformers_model", "transformers_oracle"]

_log = logging.getLogger("axcore.convert")

_ROWS = 2
_TOKENS = 24
# Of models that have no vocabulary: their families make inputs of other kinds from the ids.
_IDS = 256
_AUTO_PARAMETERS = 500_000_000
# Differences that are refused, as a share of the largest output. Measured: two float32 programs of
# the same 30-layer model differ by 1e-6 to 1e-5 of it; bfloat16 rounds parameters to 0.4 %.
_TOLERANCE = 1e-3
_LOW_TOLERANCE = 0.1
_LOW_PRECISION = {"bfloat16", "float16"}
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
    model = transformers_model(source)
    import torch  # pyright: ignore[reportMissingImports]

    def run(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(ids.astype(np.int64))).logits.float().numpy()

    return run


def transformers_model(source: TensorSource, auto_class: str = "AutoModelForCausalLM") -> Any:
    """Returns a source as a torch model in float32, read without network and without foreign code.

    Args:
        source: A directory with ``config.json`` and safetensors, or a GGUF file of a causal
            language model.
        auto_class: Which of the ``Auto`` classes of ``transformers`` reads the directory.

    Raises:
        CheckpointError: ``transformers`` is absent or cannot run it (AX623).
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(
                f"{package} is not installed",
                code="AX623",
                hint="with torch and transformers the source's own outputs are compared",
            )
    try:
        if source.format == "gguf":
            return _gguf_model(source).eval()
        return _safetensors_model(source, auto_class).eval()
    except Exception as error:  # whatever another library makes of the files
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers cannot run it: {type(error).__name__}: {text}", code="AX623"
        ) from error


def _safetensors_model(source: TensorSource, auto_class: str) -> Any:
    with _quiet_transformers() as transformers:
        import torch  # pyright: ignore[reportMissingImports]

        directory = source.path if source.path.is_dir() else source.path.parent
        return getattr(transformers, auto_class).from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )


def _gguf_model(source: TensorSource) -> Any:
    """``transformers``' own reader of GGUF; ``from_pretrained`` wants one package more for it."""
    with _quiet_transformers() as transformers:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # pyright: ignore[reportMissingImports]

        path = str(source.path)
        settings = load_gguf_checkpoint(path, return_tensors=False)["config"]
        config = transformers.AutoConfig.for_model(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        model.tie_weights()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    left = [*(name for name in missing if name not in tied), *unexpected]
    if left:
        raise ValueError(f"it reads the file in part: {left[0]}, ...")
    return model


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """``transformers`` without network, progress bars and talk."""
    former = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers  # pyright: ignore[reportMissingImports]

            yield transformers
    finally:
        if former is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = former


def compare(
    family: ModelFamily,
    source: TensorSource,
    trainer: Any,
    checkpoints: Path,
    *,
    step: int,
    tokenizer: Any,
    verify: str,
) -> Comparison:
    """Runs a foreign model and ours on the fixed prompts.

    Args:
        family: The converter, which provides both.
        source: The foreign model, which was read or has been written.
        trainer: Our model's trainer.
        checkpoints: Where its parameters are.
        step: The checkpoint.
        tokenizer: What makes ids of the prompts, or None.
        verify: ``auto``, ``always`` or ``never``.

    Raises:
        CheckpointError: The outputs differ by more than rounding explains (AX620), or they had to
            be compared (``always``) and cannot be (AX623).
    """
    if verify == "never":
        return Comparison(None, "the comparison was switched off")
    if verify == "auto" and source.num_values > _AUTO_PARAMETERS:
        return Comparison(
            None,
            f"the model has {source.num_values:,} parameters, more than {_AUTO_PARAMETERS:,}: "
            "it was not run unasked (--verify always)",
        )
    reason = "the foreign model cannot be run: its converter provides no oracle"
    oracle: Oracle | None = None
    _log.info("comparing the outputs of both models (--verify never leaves this out)")
    try:
        oracle = family.oracle(source)
    except CheckpointError as error:
        reason = error.message
    if oracle is None:
        if verify == "always":
            raise CheckpointError(reason, code="AX623", where=str(source.path))
        return Comparison(None, reason)
    cfg = trainer.cfg.model
    vocab_size = getattr(cfg, "vocab_size", _IDS)
    ids = prompt_ids(tokenizer, vocab_size, getattr(cfg, "max_seq_len", None))
    theirs = np.asarray(oracle(ids), np.float32)
    del oracle
    state = _restored(trainer, checkpoints, step)
    ours = np.asarray(family.outputs(trainer.model, state, ids), np.float32)
    dtypes = {x.dtype for x in parameters(trainer).values()}
    dtypes |= {info.dtype for info in source.infos.values()} & _LOW_PRECISION
    return _compared(ours, theirs, ids, bool(dtypes & _LOW_PRECISION), str(source.path))


def _compared(
    ours: np.ndarray, theirs: np.ndarray, ids: np.ndarray, is_low: bool, where: str
) -> Comparison:
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"the foreign model's outputs have shape {list(theirs.shape)}, ours {list(ours.shape)}",
            code="AX620",
            where=where,
        )
    difference, scale = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    tolerance = scale * (_LOW_TOLERANCE if is_low else _TOLERANCE)
    same = float(np.mean(ours.argmax(-1) == theirs.argmax(-1)))
    if not difference <= tolerance:  # NaN is no agreement
        raise CheckpointError(
            f"the converted model computes something else: the outputs differ by {difference:.3g}, "
            f"where they reach {scale:.3g}; {same:.0%} of the positions agree on the largest",
            code="AX620",
            where=where,
            hint="the converter does not fit this model: please report it (--verify never writes "
            "it all the same)",
        )
    rows = tuple(tuple(int(i) for i in row) for row in ids)
    return Comparison(difference, None, scale, tolerance, same, rows)


def _restored(trainer: Any, checkpoints: Path, step: int) -> Any:
    checkpointer = trainer.cfg.checkpointer.instantiate()
    checkpointer.open(checkpoints)
    try:
        state = trainer.abstract_state().model
        tree, _ = checkpointer.restore(step, {"model": state}, allow_unexpected=True)
        return tree["model"]
    finally:
        checkpointer.close()
