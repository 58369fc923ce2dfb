"""Traits: what a rule may know of a model, so that N models x M machines need N + M pieces."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from axcore.errors import PluginError
from axcore.module import Module, ParameterSpec, flatten_specs
from axcore.parallel.axes import axis_line
from axcore.plugins import host

__all__ = ["Traits", "compute_traits", "expert_dim"]

_QUANTITY = re.compile(
    r"(?P<name>num_parameters|parameter_bytes|layer_bytes|seq_len):"
    r"(?P<low>[0-9.]+[KMGTP]?)(?:\+|-(?P<high>[0-9.]+[KMGTP]?))"
)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SPLIT_AXES = ("heads", "mlp", "vocab")
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
        batch_size: Rows per step, or None if the experiment has no such number.
        num_layers: Layers in its stacks, all together.
        embed_dim: Width between layers: the largest dim on the logical axis ``embed``.
        tensor_parts: The greatest number that divides every dim on ``heads``, ``mlp``, ``vocab``
            and axes that are like them: what tensors can be split into without padding. 1 where
            there is none.
        rematerializes: Whether a config in it says what to recompute (has a field ``remat``).
        num_experts: The greatest number that divides every dim on the logical axis ``experts`` of
            which each token uses a part; 0 where there is none.
        expert_bytes: Bytes of the parameters with such a dim; part of ``parameter_bytes``.
        experts_per_token: How many of its experts a layer sends each token to, the most.
        head_features: Features of queries, keys and values of one layer, all heads together, the
            most.
    """

    num_parameters: int = 0
    parameter_bytes: int = 0
    layer_bytes: int = 0
    seq_len: int | None = None
    tags: frozenset[str] = frozenset()
    batch_size: int | None = None
    num_layers: int = 0
    embed_dim: int = 0
    tensor_parts: int = 1
    rematerializes: bool = False
    num_experts: int = 0
    expert_bytes: int = 0
    experts_per_token: float = 0.0
    head_features: int = 0

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
            "batch_size": self.batch_size,
            "num_layers": self.num_layers,
            "embed_dim": self.embed_dim,
            "tensor_parts": self.tensor_parts,
            "rematerializes": self.rematerializes,
            "num_experts": self.num_experts,
            "expert_bytes": self.expert_bytes,
            "experts_per_token": self.experts_per_token,
            "head_features": self.head_features,
        }


def _number(text: str, base: int) -> float:
    unit = text[-1] if text[-1] in _UNITS else ""
    return float(text.removesuffix(unit)) * base ** _UNITS[unit]


def compute_traits(cfg: Any) -> Traits:
    """Returns the traits of an experiment; its model is built (no arrays) to count parameters.

    Args:
        cfg: A trainer's config: ``model``, ``seq_len`` and ``batch_size`` are looked at, any of
            them may be missing.

    Raises:
        ConfigError: The model cannot be built, since a value is missing.
    """
    model = Traits()
    if "model" in cfg.fields():
        # From the whole tree, for values that follow from the root's.
        built = cfg.model.instantiate(name="model", config_path="model")
        if isinstance(built, Module):
            model = dataclasses.replace(
                _of_parameters(flatten_specs(built.parameter_specs())),
                experts_per_token=_experts_per_token(built),
            )
    return dataclasses.replace(
        model,
        seq_len=_count(cfg, "seq_len"),
        batch_size=_count(cfg, "batch_size"),
        tags=_tags(cfg),
        rematerializes=any("remat" in node.fields() for _, node in cfg.walk()),
    )


def _count(cfg: Any, field: str) -> int | None:
    value = getattr(cfg, field) if field in cfg.fields() else None
    return value if isinstance(value, int) else None


def _of_parameters(specs: dict[str, ParameterSpec]) -> Traits:
    """Returns what the parameters tell: sizes, layers, widths."""
    number = num_bytes = embed_dim = parts = experts = expert_bytes = 0
    features: dict[str, int] = {}
    layer_bytes: dict[str, float] = {}
    layer_counts: dict[str, int] = {}
    for path, spec in specs.items():
        if spec.kind != "parameter":
            continue
        size = math.prod(spec.shape)
        size_bytes = size * jnp.dtype(spec.dtype).itemsize
        number, num_bytes = number + math.prod(spec.valid_shape), num_bytes + size_bytes
        if (one_per_expert := expert_dim(spec)) is not None:
            experts = math.gcd(experts, spec.shape[one_per_expert])
            expert_bytes += size_bytes
        for dim, axis in zip(spec.shape, spec.axes, strict=True):
            if axis == "embed":
                embed_dim = max(embed_dim, dim)
            elif axis is not None and _is_split(axis):
                parts = math.gcd(parts, dim)
        segments = path.split("/")
        for n, segment in enumerate(segments):
            if _LAYER.match(segment):
                count = spec.shape[0] if ":" in segment else 1
                key = "/".join(segments[: n + 1])
                layer_bytes[key] = layer_bytes.get(key, 0) + size_bytes / count
                layer_counts[key] = count
                features[key] = features.get(key, 0) + _head_features(spec)
                break
    return Traits(
        num_parameters=number,
        parameter_bytes=num_bytes,
        layer_bytes=round(max(layer_bytes.values(), default=0)),
        num_layers=sum(layer_counts.values()),
        embed_dim=embed_dim,
        tensor_parts=parts or 1,
        num_experts=experts,
        expert_bytes=expert_bytes,
        head_features=max(features.values(), default=0),
    )


def expert_dim(spec: ParameterSpec) -> int | None:
    """Returns the dim of experts of a parameter with a matrix for each; None for another.

    A router has a column for each expert too, but every token meets all of them: experts come
    before the dims of a matrix.
    """
    for dim in range(spec.num_stacked, len(spec.shape) - 1):
        axis = spec.axes[dim]
        if axis is None or dim in spec.fan_in_dims or dim in spec.fan_out_dims:
            continue
        if any(ancestor.name == "experts" for ancestor in axis_line(axis)):
            return dim
    return None


def _experts_per_token(model: Module) -> float:
    """Returns the most that a layer states; see ``axcore.parallel.cost``."""
    stated = (getattr(module, "experts_per_token", None) for _, module in model.walk())
    return max((float(n) for n in stated if n is not None), default=0.0)


def _head_features(spec: ParameterSpec) -> int:
    """Returns the features of heads that a weight makes; 0 for one that makes something else."""
    made = spec.fan_out_dims
    names = {link.name for d in made for link in axis_line(spec.axes[d] or "")}
    return math.prod(spec.shape[d] for d in made) if names & {"heads", "kv_heads"} else 0


def _is_split(axis: str) -> bool:
    """Tells whether an axis, or one that it is like, is split among the parts of a tensor."""
    return any(ancestor.name in _SPLIT_AXES for ancestor in axis_line(axis))


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
