"""Traits: what a rule may know of a model, so that N models x M machines need N + M pieces."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from axcore.errors import PluginError
from axcore.module import Module, ParameterSpec, flatten_specs
from axcore.plugins import host

__all__ = ["Traits", "compute_traits"]

_QUANTITY = re.compile(
    r"(?P<name>num_parameters|parameter_bytes|layer_bytes|seq_len):"
    r"(?P<low>[0-9.]+[KMGTP]?)(?:\+|-(?P<high>[0-9.]+[KMGTP]?))"
)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_LAYER = re.compile(r"^\d+$|^\d+:\d+:\d+$")


@dataclass(frozen=True)
class Traits:
    """What a rule may know of an experiment.

    Attributes:
        num_parameters: Parameters of the model.
        parameter_bytes: Their bytes, once.
        layer_bytes: Bytes of the largest layer of a stack; 0 without stacks.
        seq_len: Tokens per row, or None if the experiment has no such number.
        tags: Tags of the layers in it, such as ``moe``.
    """

    num_parameters: int = 0
    parameter_bytes: int = 0
    layer_bytes: int = 0
    seq_len: int | None = None
    tags: frozenset[str] = frozenset()

    def holds(self, trait: str) -> bool:
        """Tells whether a trait named by a rule holds.

        Args:
            trait: A tag, ``"moe"``; or a quantity, ``"num_parameters:10G+"`` (at least ten
                billion) or ``"seq_len:4096-32768"`` (the upper end excluded). K, M, G, T, P count
                in thousands for parameters and tokens, in 1024s for bytes.

        Raises:
            PluginError: It looks like a quantity and is none.
        """
        if ":" not in trait:
            return trait in self.tags
        match = _QUANTITY.fullmatch(trait)
        if match is None:
            raise PluginError(
                f"trait {trait!r} is neither a tag nor a quantity",
                code="AX208",
                hint="quantities: num_parameters:10G+, parameter_bytes:16G-64G, layer_bytes:1G+, "
                "seq_len:32K+",
            )
        value = getattr(self, match["name"])
        if value is None:
            return False
        base = 1024 if match["name"].endswith("_bytes") else 1000
        high = _number(match["high"], base) if match["high"] else math.inf
        return _number(match["low"], base) <= value < high

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return {
            "num_parameters": self.num_parameters,
            "parameter_bytes": self.parameter_bytes,
            "layer_bytes": self.layer_bytes,
            "seq_len": self.seq_len,
            "tags": sorted(self.tags),
        }


def _number(text: str, base: int) -> float:
    unit = text[-1] if text[-1] in _UNITS else ""
    return float(text.removesuffix(unit)) * base ** _UNITS[unit]


def compute_traits(cfg: Any) -> Traits:
    """Returns the traits of an experiment; its model is built (no arrays) to count parameters.

    Args:
        cfg: A trainer's config: ``model`` and ``seq_len`` are looked at, either may be missing.

    Raises:
        ConfigError: The model cannot be built, since a value is missing.
    """
    fields = cfg.fields()
    seq_len = cfg.seq_len if "seq_len" in fields else None
    sizes = (0, 0, 0)
    if "model" in fields:
        # From the whole tree, for values that follow from the root's.
        model = cfg.model.instantiate(name="model")
        if isinstance(model, Module):
            sizes = _sizes(flatten_specs(model.parameter_specs()))
    return Traits(*sizes, seq_len if isinstance(seq_len, int) else None, _tags(cfg))


def _sizes(specs: dict[str, ParameterSpec]) -> tuple[int, int, int]:
    """Returns number and bytes of the parameters, and bytes of the largest layer."""
    number = num_bytes = 0
    layers: dict[str, float] = {}
    for path, spec in specs.items():
        if spec.kind != "parameter":
            continue
        size = math.prod(spec.shape)
        size_bytes = size * jnp.dtype(spec.dtype).itemsize
        number, num_bytes = number + size, num_bytes + size_bytes
        parts = path.split("/")
        for n, part in enumerate(parts):
            if _LAYER.match(part):
                count = spec.shape[0] if ":" in part else 1
                key = "/".join(parts[: n + 1])
                layers[key] = layers.get(key, 0) + size_bytes / count
                break
    return number, num_bytes, round(max(layers.values(), default=0))


def _tags(cfg: Any) -> frozenset[str]:
    """Returns the tags that plugins gave to the layers in a config."""
    tagged: list[tuple[type, tuple[str, ...]]] = []
    for spec in host().layers.specs():
        module_name, _, attribute = spec.target.partition(":")
        # A layer that is in the config has been imported; what has not is not in it.
        layer = getattr(sys.modules.get(module_name), attribute, None)
        if spec.tags and isinstance(layer, type):
            tagged.append((layer, spec.tags))
    found: set[str] = set()
    for _, node in cfg.walk():
        for layer, tags in tagged:
            if isinstance(node.target, type) and issubclass(node.target, layer):
                found.update(tags)
    return frozenset(found)
