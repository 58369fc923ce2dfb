"""Which candidates there are: meshes that fit the devices and the model, and ways to rematerialize.

Everything follows from the traits of the model and from the machine; nothing is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axcore.config import FrozenMapping
from axcore.module import Module, flatten_specs
from axcore.parallel.mesh import MeshShape
from axcore.parallel.plan._candidate import RematOption
from axcore.parallel.traits import Traits
from axcore.plugins import Instance
from axcore.remat import Remat, has_host_memory

__all__ = ["Dims", "meshes", "remat_options"]

# Tensors are not split further than this outside of the fast network's domain.
_MAX_MODEL = 64
# Rows of this many tokens are long enough for their positions to be split although there are rows.
_LONG_ROW = 16_384


@dataclass(frozen=True)
class Dims:
    """What of a model decides which meshes fit.

    Attributes:
        traits: The experiment's traits.
        splits: Mesh axis -> greatest common divisor of the parameters' dims that the rules split
            over that axis alone; axes without such dims are left out.
        pipelined: Whether its stacks can run as a pipeline.
        split_rows: Whether positions may be split: attention over parts of a row takes no bias and
            no second sequence.
    """

    traits: Traits
    splits: Mapping[str, int] = dataclasses.field(default_factory=FrozenMapping[int])
    pipelined: bool = False
    split_rows: bool = True

    @classmethod
    def of(cls, cfg: Any, traits: Traits) -> Dims:
        """Returns the dims of a trainer's config."""
        from axcore.layers import CrossAttention, Decoder, RepeatedTransformer
        from axcore.layers.roles import BaseAttentionBias

        model = cfg.model.instantiate(name="model")
        specs = flatten_specs(model.parameter_specs()) if isinstance(model, Module) else {}
        table = cfg.sharding_rules.table("param")
        splits: dict[str, int] = {}
        for path, spec in specs.items():
            for dim, axis in zip(spec.shape, spec.axes, strict=True):
                first = table.alternatives(axis, path)[0] if axis else ()
                if len(first) == 1:
                    splits[first[0]] = math.gcd(splits.get(first[0], 0), dim)
        stacks = cfg.model.find(RepeatedTransformer.Config)
        # Stages are alike, layers that come before them are not.
        prefixed = any(node.prefix for node in cfg.model.find(Decoder.Config).values())
        whole_rows = (BaseAttentionBias, CrossAttention)
        split_rows = not any(isinstance(module, whole_rows) for _, module in model.walk())
        return cls(traits, FrozenMapping(splits), bool(stacks) and not prefixed, split_rows)


def remat_options(traits: Traits, platform: str) -> tuple[RematOption | None, ...]:
    """Returns ways to rematerialize, from the one that keeps most to the one that keeps least."""
    if not traits.rematerializes:
        return (None,)
    options = [
        RematOption("keep all", Remat("none")),
        RematOption("keep products", Remat("dots_no_batch")),
        RematOption(
            "save qkv, attention, ffn hidden",
            Remat("sites", save=("qkv_proj", "attn_context", "attn_out", "ffn_hidden")),
        ),
        RematOption("save qkv, attention", Remat("sites", save=("qkv_proj", "attn_out"))),
    ]
    if has_host_memory(platform):
        options.append(RematOption("offload products", Remat("offload_dots")))
    return (*options, RematOption("recompute all", Remat("full")))


def meshes(dims: Dims, instance: Instance) -> Iterator[MeshShape]:
    """Yields the mesh shapes worth a look, all sizes fixed; across slices the rest is ``data``.

    Powers of two of each axis, as far as layers, tensors, experts and rows divide.
    """
    traits = dims.traits
    slices = instance.num_slices
    per_slice = instance.num_devices // slices
    rows = traits.batch_size or instance.num_devices
    domain = min(instance.ici_domain_devices or per_slice, per_slice)
    most_model = min(_MAX_MODEL, max(domain, instance.devices_per_host))
    across = {"data": slices} if slices > 1 else {}
    for pipeline in _parts(per_slice, traits.num_layers if dims.pipelined else 1):
        for model in _parts(per_slice // pipeline, traits.tensor_parts, most_model):
            for groups in _parts(per_slice // (pipeline * model), dims.splits.get("expert", 1)):
                rest = per_slice // (pipeline * model * groups)
                for seq in _sequence_parts(rest, dims, rows, groups * slices):
                    shards = rest // seq
                    for data in _parts(shards, shards):
                        fsdp = shards // data
                        if rows % (data * fsdp * groups * slices):
                            continue
                        yield MeshShape(
                            pipeline, data, groups, fsdp, seq, model, across_slices=across
                        )


def _parts(devices: int, size: int, most: int | None = None) -> Iterator[int]:
    """Yields powers of two that divide both."""
    parts = 1
    while parts <= (most or devices) and devices % parts == 0 and size % parts == 0:
        yield parts
        parts *= 2


def _sequence_parts(rest: int, dims: Dims, rows: int, shared: int) -> Sequence[int]:
    """Parts of a row: needed where rows are fewer than shards, of use where rows are long."""
    seq_len = (dims.traits.seq_len or 1) if dims.split_rows else 1
    parts = [n for n in _parts(rest, seq_len) if seq_len // n >= 256 or n == 1]
    needed = [n for n in parts if rows % (rest // n * shared) == 0]
    if seq_len >= _LONG_ROW:
        return needed[:3]
    return needed[:1]
