"""Recipes for serving: weights, activations and caches in few bits."""

from __future__ import annotations

from typing import Any, Literal

from axcore.config import Config, Modifier
from axcore.errors import ConfigError
from axcore.layers import ContiguousKVCache
from axcore.module import Module
from axcore.ops import DotGeneral
from axcore.quantization._dots import QuantizedDot
from axcore.quantization._kv_cache import QuantizedKVCache
from axcore.quantization._modifiers import Recipe, copied
from axcore.quantization._place import Site
from axcore.quantization._stored import StoredDot, StoredDtype

__all__ = [
    "KVCacheRecipe",
    "StoredRecipe",
    "fp8_kv",
    "fp8_serving",
    "fp8_static",
    "fp8_weights",
    "int4_weights",
    "int8_kv",
    "int8_serving",
    "int8_static",
    "int8_weights",
]


class StoredRecipe(Recipe):
    """:class:`StoredDot`: weights stored in few bits; what ``axcore quantize`` applies.

    Products of training recipes give way. Weights are then state, so this is for trained models.
    """

    class Config(Recipe.Config):
        """See :class:`StoredDot`."""

        dtype: StoredDtype = "int8"
        group: int | None = None
        activations: Literal["int8", "float8_e4m3fn"] | None = None
        static: bool = False

    for_trained = True

    def product(self, site: Site) -> Config:
        """Returns a :class:`StoredDot`.

        Raises:
            ConfigError: The site is no linear layer's.
        """
        if site.kind not in ("linear", "grouped"):
            raise ConfigError(
                f"the product at {site.path} is {site.kind}, whose weight cannot be stored so",
                code="AX432",
                where=site.config_path,
                hint="leave head and attention out; the cache has recipes of its own",
            )
        return copied(self.cfg, StoredDot.Config())

    def _takes(self, module: Module) -> bool:
        return type(module) is DotGeneral or isinstance(module, QuantizedDot)


class KVCacheRecipe(Modifier):
    """:class:`QuantizedKVCache` in place of every contiguous cache."""

    class Config(Modifier.Config):
        """``dtype`` of the buffers."""

        dtype: Literal["int8", "float8_e4m3fn"] = "int8"

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with quantized caches.

        Raises:
            ConfigError: It has no contiguous cache, or its caches are quantized already; or the
                model never uses any (AX982).
        """
        _check_decodes(cfg)
        nodes = [(path, node) for path, node in cfg.walk()]
        for path, node in nodes:
            if isinstance(node, QuantizedKVCache.Config):
                raise ConfigError(
                    "the cache is quantized already", code="AX431", where=path or None
                )
        if not any(isinstance(node, ContiguousKVCache.Config) for _, node in nodes):
            raise ConfigError("there is no cache to quantize", code="AX430")
        new = QuantizedKVCache.Config(dtype=self.cfg.dtype)
        for path, node in nodes:
            if isinstance(node, ContiguousKVCache.Config):
                cfg.set_path(path, new.copy().set(memory=node.memory))
        return cfg


def _check_decodes(cfg: Any) -> None:
    """Raises for a trainer's model that attends to whole sequences alone: its caches stay empty."""
    model = getattr(cfg, "model", None)
    if isinstance(model, Config) and not hasattr(model.target, "decode"):
        name = getattr(model.target, "__name__", str(model.target))
        raise ConfigError(
            f"{name} attends to whole sequences and has no `decode`: it keeps no keys and values "
            "that could be quantized",
            code="AX982",
            where="model",
            hint="leave the recipe of the cache out; recipes of weights, such as int8-weights, do "
            "apply",
        )


def int8_weights() -> StoredRecipe.Config:
    """Weights int8, a scale per output."""
    return StoredRecipe.Config(dtype="int8")


def int4_weights() -> StoredRecipe.Config:
    """Weights int4 in groups of 32."""
    return StoredRecipe.Config(dtype="int4", group=32)


def fp8_weights() -> StoredRecipe.Config:
    """Weights e4m3, a scale per output."""
    return StoredRecipe.Config(dtype="float8_e4m3fn")


def int8_serving() -> StoredRecipe.Config:
    """Weights and activations int8, a scale per token."""
    return StoredRecipe.Config(dtype="int8", activations="int8")


def fp8_serving() -> StoredRecipe.Config:
    """Weights and activations e4m3, a scale per token."""
    return StoredRecipe.Config(dtype="float8_e4m3fn", activations="float8_e4m3fn")


def int8_static() -> StoredRecipe.Config:
    """Weights and activations int8, with one calibrated scale for a product's activations."""
    return int8_serving().set(static=True)


def fp8_static() -> StoredRecipe.Config:
    """Weights and activations e4m3, with one calibrated scale for a product's activations."""
    return fp8_serving().set(static=True)


def int8_kv() -> KVCacheRecipe.Config:
    """Keys and values int8."""
    return KVCacheRecipe.Config(dtype="int8")


def fp8_kv() -> KVCacheRecipe.Config:
    """Keys and values e4m3."""
    return KVCacheRecipe.Config(dtype="float8_e4m3fn")
