"""Weights of the package glassllm: npz archives, both ways.

Matrices are stored (in, out), float16, and the two halves of a rotary pair stand side by side.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axcore import experiments
from axcore.checkpoint.convert import (
    Matrix,
    ModelFamily,
    Oracle,
    PairsToHalves,
    Rule,
    TensorInfo,
    TensorRule,
    TensorSource,
)
from axcore.data import BaseTokenizer
from axcore.errors import CheckpointError
from axcore.train import Trainer
from axlearn_models._hugging_face import check_all_read, settings_of
from axlearn_models._llama_like import initialized, normalized, resized, rope_of
from axlearn_models.glassllm.tokenizer import tokenizer_beside

__all__ = ["GlassLM"]


class GlassLM(ModelFamily):
    """What ``GlassLM.save`` of glassllm 0.1 writes."""

    architecture = "glassllm"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        dim = settings.require("d_model", int)
        gate = infos.get("blocks.0.ffn.W1")
        cfg = resized(
            experiments.get("glassllm"),
            vocab_size=settings.require("vocab_size", int),
            model_dim=dim,
            num_layers=settings.require("n_layers", int),
            num_heads=settings.require("n_heads", int),
            num_kv_heads=settings.require("n_kv_heads", int),
            # The package computes it so and does not store it.
            hidden_dim=gate.shape[1] if gate else 8 * dim // 3,
        )
        limit = settings.require("max_len", int)
        cfg.model.set(max_seq_len=limit)
        cfg.set(seq_len=limit)
        rope_of(cfg).set(base=settings.require("rope_base", float))
        normalized(cfg, eps=settings.require("eps", float))
        initialized(cfg, stddev=settings.require("init_std", float))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        block, ours = "blocks.{i}", "decoder/layer/{i}"
        plain, pairs = Matrix(), PairsToHalves(Matrix())
        matrices = {
            "attn.W_Q": ("attention/qkv/query", pairs),
            "attn.W_K": ("attention/qkv/key", pairs),
            "attn.W_V": ("attention/qkv/value", plain),
            "attn.W_O": ("attention/output", Matrix(num_in=2)),
            "ffn.W1": ("feed_forward/gate", plain),
            "ffn.W2": ("feed_forward/down", plain),
            "ffn.W3": ("feed_forward/up", plain),
        }
        return [
            TensorRule("E", "embedding/weight"),
            TensorRule(f"{block}.norm1.gamma", f"{ours}/attention_norm/scale"),
            TensorRule(f"{block}.norm2.gamma", f"{ours}/feed_forward_norm/scale"),
            TensorRule("norm_f.gamma", "decoder/final_norm/scale"),
            *(
                TensorRule(f"{block}.{name}", f"{ours}/{path}/weight", layout)
                for name, (path, layout) in matrices.items()
            ),
        ]

    def tokenizer(self, source: TensorSource) -> BaseTokenizer | None:
        """See :meth:`ModelFamily.tokenizer`; the package keeps it in a file beside the archive."""
        return tokenizer_beside(source.path)

    def matches(self, source: TensorSource) -> bool:
        """Tells whether the archive names a glassllm's settings and tensors."""
        return "blocks.0.attn.W_Q" in source.infos and "n_kv_heads" in source.config

    def oracle(self, source: TensorSource) -> Oracle:
        """Returns the package's own forward pass over the archive.

        Raises:
            CheckpointError: The package is not installed (AX623).
        """
        if importlib.util.find_spec("glassllm") is None:
            raise CheckpointError(
                "glassllm is not installed",
                code="AX623",
                hint="with it the source's own logits are compared",
            )
        import glassllm  # pyright: ignore[reportMissingImports]

        model = glassllm.GlassLM.load(source.path)

        def run(ids: np.ndarray) -> np.ndarray:
            with glassllm.no_grad():
                return np.asarray(model(ids).data, np.float32)

        return run
