"""Model FLOPs from the config alone: what a step has to compute, however it is run.

``6 N + attention`` for training: a weight that meets a token costs a multiplication and an addition
forward, and twice that backward (Kaplan et al., arXiv:2001.08361, section 2.1). Embedding look-ups,
norms, activations and the softmax are left out; the vocabulary head is in, tied or not.

A layer that is not core's own says what is not in its parameter specs with two properties:

- ``experts_per_token``: how many of its experts a token goes to; parameters with an ``experts``
  axis then count with that share.
- ``attention_dims``: ``(num_heads, key_dim, value_dim)`` of its two products, if it is an attention
  without ``num_heads`` and ``head_dim`` in its config.

A replacement of :class:`axcore.ops.DotGeneral` that computes in another dtype says so with
``operand_dtype``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from axcore.collection import expand_path
from axcore.config import Config
from axcore.errors import ShardingError
from axcore.layers import BaseAttention, CrossAttention
from axcore.layers.roles import BaseEmbedding, BaseHead, BaseMultiToken, BasePooler
from axcore.layers.stack import BaseStack
from axcore.module import Module, ParameterSpec, flatten_specs
from axcore.ops import BaseDotGeneral
from axcore.ops.masks import Full
from axcore.parallel.cost._model_flops import FlopTerm, ModelFlops
from axcore.parallel.cost._pairs import Pairs, count_pairs
from axcore.parallel.cost._recompute import attention_recompute, projection_recompute
from axcore.parallel.traits import expert_dim

__all__ = ["attention_dims", "built", "experts_per_token", "model_flops"]

# Logits, and tokens, above which they are computed in chunks that the backward pass recomputes.
_HEAD_CHUNK = 2**24
_HEAD_TOKENS = 512


def model_flops(
    model: Any, seq_len: int | None = None, *, target_len: int | None = None
) -> ModelFlops:
    """Counts the model FLOPs of an experiment or a model; builds no array.

    Args:
        model: A trainer's config, a model's config, or a module.
        seq_len: Tokens per row; default the trainer's. Of an encoder-decoder, those of the source;
            of an image model, its patches and class token.
        target_len: Tokens per row that the decoder of an encoder-decoder writes; default
            ``seq_len``.

    Returns:
        The terms, and their sums per token of ``seq_len``.

    Raises:
        ShardingError: There is no ``seq_len``, or ``model`` is neither.

    Example:
        >>> from axcore import experiments
        >>> round(model_flops(experiments.get("tiny-lm")).train.full)
        789504
    """
    if seq_len is None:
        seq_len = getattr(getattr(model, "cfg", model), "seq_len", None)
    if seq_len is None or seq_len < 1:
        raise ShardingError(
            f"seq_len is {seq_len}, expected the tokens of a row",
            code="AX467",
            where="model_flops",
            hint="pass seq_len=, or a trainer's config",
        )
    module, learner = built(model, seq_len)
    return _Walk(module, learner, seq_len, target_len or seq_len).result()


def built(model: Any, seq_len: int | None = None) -> tuple[Module, Any]:
    """Returns ``(model, learner or None)`` of a config or module.

    Args:
        model: A trainer's or model's config, or a module.
        seq_len: What a model's config alone takes as its ``max_seq_len``, if that follows a
            trainer's ``seq_len``.

    Raises:
        ShardingError: It is neither.
    """
    if isinstance(model, Config) and seq_len is not None and "max_seq_len" in model.fields():
        if not isinstance(getattr(model, "max_seq_len", None), int):
            model = model.copy().set(max_seq_len=seq_len)
    module = _instantiated(model) if isinstance(model, Config) else model
    if not isinstance(module, Module):
        raise ShardingError(
            f"expected a trainer's or model's config or a module, got {type(model).__name__}",
            code="AX467",
            where="cost",
        )
    learner = module.children.get("learner")
    if learner is None or "model" not in module.children:
        return module, None
    return module.children["model"], learner


# What a search varies most and no module reads: for these a config is not built anew.
_OUTSIDE_MODULES = ("mesh_shape", "sharding_rules", "accumulation_steps", "compiler_options", "ops")
_KEPT = 64
_BUILT: dict[str, Any] = {}


def _instantiated(cfg: Config) -> Any:
    """Returns the module of a config, of the last few that differ in what modules read.

    Modules hold no arrays and do not change, so they may be shared; a planner asks for thousands of
    configs that differ in their mesh only.
    """
    lines = cfg.to_text().splitlines()
    key = "\n".join(line for line in lines if not line.startswith(_OUTSIDE_MODULES))
    module = _BUILT.get(key)
    if module is None:
        module = cfg.instantiate(name="counted")
        while len(_BUILT) >= _KEPT:
            _BUILT.pop(next(iter(_BUILT)), None)
        _BUILT[key] = module
    return module


class _Walk:
    """One look at a module tree."""

    def __init__(self, model: Module, learner: Any, seq_len: int, target_len: int):
        self.model = model
        self.modules: dict[str, Module] = dict(model.walk())
        self.seq_len, self.target_len = seq_len, target_len
        specs = model.parameter_specs()
        self.specs: dict[str, ParameterSpec] = {
            p: s for p, s in flatten_specs(specs).items() if s.kind == "parameter"
        }
        self.trainable = _trainable_layers(learner, specs)
        # What reads a source while the rest writes a target.
        self.has_source = "encoder" in model.children and "decoder" in model.children
        self.notes: dict[str, None] = {}

    def result(self) -> ModelFlops:
        terms: list[FlopTerm] = []
        total = active = looked_up = 0
        for path, spec in self.specs.items():
            size = math.prod(spec.shape)
            share = self._active_share(path, spec)
            total, active = total + size, active + size * share
            lookup = self._is_lookup(path, spec)
            looked_up += size if lookup else 0
            terms += self._head(path, spec) if lookup else self._weight(path, spec, size * share)
        for path, module in self.modules.items():
            if isinstance(module, BaseAttention):
                terms += self._attention(path, module)
        return ModelFlops(
            seq_len=self.seq_len,
            terms=tuple(terms),
            num_parameters=total,
            num_active_parameters=round(active),
            num_embedding_parameters=looked_up,
            notes=tuple(self.notes),
        )

    # -- parameters ------------------------------------------------------------------------

    def _line(self, path: str) -> list[tuple[str, Module]]:
        """Returns the modules from the owner of a path up to the root, with their paths."""
        parts = path.split("/")
        line = [("/".join(parts[:n]), n) for n in range(len(parts), -1, -1)]
        return [(p, self.modules[p]) for p, _ in line if p in self.modules]

    def _is_lookup(self, path: str, spec: ParameterSpec) -> bool:
        """Whether a parameter is a table of vectors that are picked, not multiplied."""
        owner = self._line(path)[0][1]
        if isinstance(owner, BaseEmbedding):
            return len(spec.shape) - spec.num_stacked >= 2
        return not spec.fan_in_dims and "position" in path.split("/")[-2:-1]

    def _weight(self, path: str, spec: ParameterSpec, active: float) -> list[FlopTerm]:
        """The product of a weight with every token that meets it."""
        line = self._line(path)
        owner = line[0][1]
        dims = len(spec.shape) - spec.num_stacked
        if not spec.fan_in_dims or dims < 2:
            if dims >= 2 and type(owner).__module__.startswith("axcore.interop"):
                self.notes["weights of foreign layers count with every dim but stacked ones"] = None
            else:
                return []
        is_head = isinstance(owner, BaseHead)
        tokens = self._tokens(line)
        if is_head:
            tokens = self._predictions()
        return [
            FlopTerm(
                path=path.rsplit("/", 1)[0],
                kind="head" if is_head else "projection",
                dtype=_product_dtype(owner),
                forward_causal=2 * active * tokens,
                forward_full=2 * active * tokens,
                backward=1 + self._trainable_share(path),
                recompute=self._head_recompute(spec)
                if is_head
                else projection_recompute(line, self._remat(line)),
            )
        ]

    def _head(self, path: str, spec: ParameterSpec) -> list[FlopTerm]:
        """The head that an embedding serves as, if it does."""
        line = self._line(path)
        owner_path, owner = line[0]
        if not isinstance(owner, BaseEmbedding) or len(line) < 2:
            return []
        model = line[1][1]
        # A model that has a slot for a head of its own and leaves it empty uses the embedding.
        if getattr(model, "embedding", None) is not owner or "lm_head" in model.children:
            return []
        if "lm_head" not in model.cfg.fields():
            return []
        flops = 2 * math.prod(spec.shape) * self._predictions()
        return [
            FlopTerm(
                path=owner_path,
                kind="head",
                dtype=_product_dtype(owner),
                forward_causal=flops,
                forward_full=flops,
                backward=1 + self._trainable_share(path),
                recompute=self._head_recompute(spec),
            )
        ]

    def _head_recompute(self, spec: ParameterSpec) -> float:
        names = [a for a in spec.axes if a == "vocab"]
        vocab = spec.shape[spec.axes.index("vocab")] if names else 1
        return float(self.target_len * vocab > max(_HEAD_CHUNK, _HEAD_TOKENS * vocab))

    def _predictions(self) -> int:
        """Positions of a row at which the head predicts a token, further tokens included."""
        depths = sum(
            len(module.children)
            for module in self.modules.values()
            if isinstance(module, BaseMultiToken)
        )
        return (self.target_len if self.has_source else self.seq_len) * (1 + depths)

    def _tokens(self, line: list[tuple[str, Module]]) -> int:
        """Tokens of a row that meet the weights of a module."""
        if any(isinstance(module, BasePooler) for _, module in line):
            return 1
        path = line[0][0]
        if path == "classifier":
            return 1
        if path.split("/")[0] == "patches" and getattr(self.model.cfg, "class_token", False):
            return self.seq_len - 1
        if not self.has_source:
            return self.seq_len
        if path.split("/")[0] == "encoder":
            return self.seq_len
        for (child, _), (_, module) in pairwise(line):
            if isinstance(module, CrossAttention) and child.split("/")[-1] in ("key", "value"):
                return self.seq_len
        return self.target_len

    def _active_share(self, path: str, spec: ParameterSpec) -> float:
        """Share of a parameter that one token meets."""
        dim = expert_dim(spec)
        if dim is None:
            return 1.0
        chosen = experts_per_token([module for _, module in self._line(path)])
        if chosen is None:
            self.notes[f"{path}: no layer states experts_per_token, so all experts count"] = None
            return 1.0
        return chosen / spec.shape[dim]

    def _trainable_share(self, path: str) -> float:
        if self.trainable is None:
            return 1.0
        layers = [layer for layer, _ in expand_path(path)]
        return sum(layer in self.trainable for layer in layers) / len(layers)

    # -- attention -------------------------------------------------------------------------

    def _attention(self, path: str, module: Module) -> list[FlopTerm]:
        line = self._line(path)
        dims = attention_dims(module)
        if dims is None:
            self.notes[f"{path}: {type(module).__name__} states no attention_dims: not counted"] = (
                None
            )
            return []
        num_heads, key_dim, value_dim = dims
        pairs = self._pairs(module, line)
        each = 2 * num_heads * (key_dim + value_dim)
        return [
            FlopTerm(
                path=path,
                kind="attention",
                dtype=_product_dtype(module, "logits_dot"),
                forward_causal=each * pairs.causal,
                forward_full=each * pairs.full,
                backward=2.0,
                recompute=attention_recompute(self._remat(line)),
            )
        ]

    def _pairs(self, module: Module, line: list[tuple[str, Module]]) -> Pairs:
        """Pairs of one row, over all layers that the module stands for."""
        if isinstance(module, CrossAttention):
            pairs = count_pairs(Full(), self.target_len, self.seq_len)
            return _times(pairs, _num_layers(line))
        tokens = self._tokens(line)
        mask = getattr(module.cfg, "mask", Full())
        if "window" not in mask.needs:
            return _times(count_pairs(mask, tokens, tokens), _num_layers(line))
        causal = full = 0.0
        for window in _windows(line):
            found = count_pairs(mask, tokens, tokens, window)
            causal, full = causal + found.causal, full + found.full
        return Pairs(causal, full)

    def _remat(self, line: list[tuple[str, Module]]) -> Any:
        """The remat policy of the stack that a module is in, or None."""
        return next((m.cfg.remat for _, m in line[1:] if isinstance(m, BaseStack)), None)


def attention_dims(module: Module) -> tuple[int, int, int] | None:
    """Returns ``(num_heads, key_dim, value_dim)`` of an attention layer, or None if unknown."""
    stated = getattr(module, "attention_dims", None)
    if stated is not None:
        num_heads, key_dim, value_dim = stated
        return num_heads, key_dim, value_dim
    fields = module.cfg.fields()
    if not {"num_heads", "head_dim", "input_dim"} <= set(fields):
        return None
    head_dim = module.cfg.head_dim or module.cfg.input_dim // module.cfg.num_heads
    return module.cfg.num_heads, head_dim, head_dim


def experts_per_token(modules: Iterable[Module]) -> float | None:
    """Returns what the nearest of the modules states, or None."""
    stated = (getattr(module, "experts_per_token", None) for module in modules)
    return next((float(chosen) for chosen in stated if chosen is not None), None)


def _windows(line: list[tuple[str, Module]]) -> list[int | None]:
    """Windows of the layers that a module stands for, from its stack's ``layer_values``."""
    layers: range | int | None = None
    for _, module in line:
        layers = module.layers if layers is None else layers
        if isinstance(module, BaseStack):
            values = module.cfg.layer_values.get("window", ())
            numbers = [layers] if isinstance(layers, int) else list(layers or ())
            chosen = [values[n] for n in numbers if n < len(values)]
            return [int(w) if math.isfinite(w) else None for w in chosen]
    return [None]


def _num_layers(line: list[tuple[str, Module]]) -> int:
    return math.prod(len(m.layers) for _, m in line if isinstance(m.layers, range))


def _times(pairs: Pairs, n: int) -> Pairs:
    return Pairs(pairs.causal * n, pairs.full * n)


def _product_dtype(module: Module, child: str = "dot") -> str:
    """Dtype that the products of a module run in."""
    dot = module.children.get(child)
    if isinstance(dot, BaseDotGeneral):
        stated = getattr(dot, "operand_dtype", None)
        if stated is not None:
            return str(stated)
    return getattr(module, "compute_dtype", "float32")


def _trainable_layers(learner: Any, specs: Mapping[str, Any]) -> set[str] | None:
    """Returns the paths of trained parameters, layer by layer; None when all are."""
    if learner is None:
        return None
    trained = flatten_specs(learner.trainable_specs(specs))
    return {layer for path in trained for layer, _ in expand_path(path)}
