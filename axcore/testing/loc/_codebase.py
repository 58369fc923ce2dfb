"""Generated code bases in the style of axcore: N modules that take any of M variants.

A module is a file that subclasses the installed transformer layer and language model and derives an
experiment from an installed one: core's ``tiny-lm`` and, in turn, the small members of the
catalogs. A variant is a file that subclasses the installed attention and feed-forward layers and
puts them into any experiment. So module ``i`` reads the same in every code base: a smaller code
base is a part of a larger one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from axcore import experiments
from axcore.testing.loc._features import Feature

__all__ = ["added_files", "code_base", "installed_bases"]

_PLAIN = "tiny-lm"
_NORMS = ("", "RMSNorm")
_KV_HEADS = (4, 2)
_ACTIVATIONS = ("gelu_tanh", "silu")

_SIZES = '''
"""Small, plain experiments: they run in milliseconds and have none of the features yet."""

from axcore.layers import Attention, FeedForward, StackedTransformer
from axcore.ops.masks import Causal


def reduce(cfg, num_layers=1, model_dim=16):
    """Shrinks an experiment in place, takes out what features will add, and returns it."""
    model = cfg.model
    model.set(vocab_size=32, model_dim=model_dim, max_seq_len=64)
    model.set(param_dtype="float32", compute_dtype="float32")
    model.decoder.set(num_layers=num_layers, stack=StackedTransformer.Config())
    for attention in model.find(Attention.Config).values():
        attention.set(num_heads=4, num_kv_heads=4, head_dim=4)
        attention.set(query_key_transform=None, mask=Causal(), logit_cap=None)
    for feed_forward in model.find(FeedForward.Config).values():
        feed_forward.set(hidden_dim=32)
    return cfg
'''

_MODULE = '''
"""Module {i}: layers and a language model derived from {base}."""

from axcore import experiments
from axcore.layers import BaseNorm, CausalLM, RMSNorm, TransformerLayer

from ..sizes import reduce


class Layer{i}(TransformerLayer):
    """A transformer layer whose branches are scaled."""

    class Config(TransformerLayer.Config):
        branch_scale: float = {scale}

    def forward(self, x, info):
        return x + self.cfg.branch_scale * (super().forward(x, info) - x)


class Model{i}(CausalLM):
    """A language model of its own name."""

    class Config(CausalLM.Config):
        module_index: int = {i}


def experiment(**sizes):
    """Returns the experiment of this module."""
    cfg = reduce(experiments.get({base!r}), **sizes)
    cfg.replace(CausalLM.Config, Model{i}.Config())
    cfg.replace(TransformerLayer.Config, Layer{i}.Config(), allow_none=True)
{norm}    return cfg
'''

_VARIANT = '''
"""Variant {j} of attention and feed-forward layers."""

from axcore.layers import Attention, FeedForward


class Attention{j}(Attention):
    """Attention whose output is scaled."""

    class Config(Attention.Config):
        output_scale: float = {scale}

    def forward(self, x, info):
        return self.cfg.output_scale * super().forward(x, info)


class FeedForward{j}(FeedForward):
    """A feed-forward layer whose output is scaled."""

    class Config(FeedForward.Config):
        output_scale: float = {scale}

    def forward(self, x, info):
        return self.cfg.output_scale * super().forward(x, info)


def apply(cfg):
    """Puts this variant into an experiment."""
    cfg.replace(Attention.Config, Attention{j}.Config(num_kv_heads={kv_heads}))
    cfg.replace(FeedForward.Config, FeedForward{j}.Config(activation={activation!r}))
    return cfg
'''

_CATALOG = '''
"""Every module with every variant."""

{imports}

MODULES = ({modules})
VARIANTS = ({variants})


def experiment(module, variant, **sizes):
    """Returns the experiment of a module with a variant."""
    return VARIANTS[variant].apply(MODULES[module].experiment(**sizes))
'''


def installed_bases(limit: int | None = None) -> tuple[str, ...]:
    """Returns experiments that modules derive from: decoder-only ones of core and catalogs.

    Their attention and feed-forward layers are core's, which the variants of a code base edit.

    Args:
        limit: At most so many.
    """
    from axcore.layers import Attention, CausalLM, FeedForward

    names = [_PLAIN, *(n for n in experiments.names() if "-test" in n)]
    found: list[str] = []
    for name in names:
        if limit is not None and len(found) >= limit:
            break
        model = experiments.get(name).model
        if not isinstance(model, CausalLM.Config):
            continue
        of = getattr(model.decoder, "layer", ())
        layers = of if isinstance(of, tuple) else (of,)
        if all(
            isinstance(getattr(layer, "attention", None), Attention.Config)
            and isinstance(getattr(layer, "feed_forward", None), FeedForward.Config)
            for layer in layers
        ):
            found.append(name)
    return tuple(found)


def code_base(num_modules: int, num_variants: int, bases: Iterable[str]) -> dict[str, str]:
    """Returns the files of a code base: path -> text.

    Args:
        num_modules: N.
        num_variants: M.
        bases: Names of the installed experiments that modules derive from, in turn.
    """
    bases = tuple(bases)
    files = {f"{folder}/__init__.py": "" for folder in ("modules", "variants", "added")}
    files["sizes.py"] = _SIZES.lstrip()
    for i in range(num_modules):
        base = bases[i % len(bases)]
        norm = _NORMS[i % len(_NORMS)] if base == _PLAIN else ""  # a catalog has its own
        replace = f"cfg.replace(BaseNorm.Config, {norm}.Config())\n" if norm else ""
        files[f"modules/m{i:02}.py"] = _MODULE.lstrip().format(
            i=i,
            base=base,
            scale=1 + i / 64,
            norm=textwrap.indent(replace, "    "),
        )
    for j in range(num_variants):
        files[f"variants/v{j:02}.py"] = _VARIANT.lstrip().format(
            j=j,
            scale=1 + j / 16,
            kv_heads=_KV_HEADS[j % len(_KV_HEADS)],
            activation=_ACTIVATIONS[j % len(_ACTIVATIONS)],
        )
    modules = [f"m{i:02}" for i in range(num_modules)]
    variants = [f"v{j:02}" for j in range(num_variants)]
    imports = [f"from .modules import {m}" for m in modules]
    imports += [f"from .variants import {v}" for v in variants]
    files["catalog.py"] = _CATALOG.lstrip().format(
        imports="\n".join(imports),
        modules=", ".join(modules) + ",",
        variants=", ".join(variants) + ",",
    )
    return files


def added_files(feature: Feature) -> dict[str, str]:
    """Returns the files that a feature adds to a code base: its own, the experiment, the check."""
    sections = {"experiment": feature.integration, "check": feature.sections["check"]}
    own = ("feature", "plugin")
    sections |= {name: feature.sections[name] for name in own if name in feature.sections}
    files = {f"added/{feature.name}/{name}.py": text for name, text in sections.items()}
    return {f"added/{feature.name}/__init__.py": "", **files}
