"""Which candidates there are: meshes that fit the devices and the model, and ways to rematerialize.

Everything follows from the traits of the model and from the machine; nothing is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        num_experts: Experts of its mixtures, their greatest common divisor; 0 without any.
        pipelined: Whether its stacks can run as a pipeline.
    """

    traits: Traits
    num_experts: int = 0
    pipelined: bool = False

    @classmethod
    def of(cls, cfg: Any, traits: Traits) -> Dims:
        """Returns the dims of a trainer's config."""
        from axcore.layers import RepeatedTransformer

        model = cfg.model.instantiate(name="model")
        experts = 0
        if isinstance(model, Module):
            for spec in flatten_specs(model.parameter_specs()).values():
                for dim, axis in zip(spec.shape, spec.axes, strict=True):
                    experts = math.gcd(experts, dim) if axis == "experts" else experts
        stacks = cfg.model.find(RepeatedTransformer.Config)
        return cls(traits, experts, bool(stacks))


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

    Powers of two of each axis (and the number of experts' divisors), as far as layers, tensors,
    experts and rows divide.
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
            for expert in _parts(per_slice // (pipeline * model), dims.num_experts or 1):
                rest = per_slice // (pipeline * model * expert)
                for seq in _sequence_parts(rest, traits, rows, expert * slices):
                    shards = rest // seq
                    for data in _parts(shards, shards):
                        fsdp = shards // data
                        if rows % (data * fsdp * expert * slices):
                            continue
                        yield MeshShape(
                            pipeline, data, expert, fsdp, seq, model, across_slices=across
                        )


def _parts(devices: int, size: int, most: int | None = None) -> Iterator[int]:
    """Yields powers of two that divide both."""
    parts = 1
    while parts <= (most or devices) and devices % parts == 0 and size % parts == 0:
        yield parts
        parts *= 2


def _sequence_parts(rest: int, traits: Traits, rows: int, shared: int) -> Sequence[int]:
    """Parts of a row: needed where rows are fewer than shards, of use where rows are long."""
    seq_len = traits.seq_len or 1
    parts = [n for n in _parts(rest, seq_len) if seq_len // n >= 256 or n == 1]
    needed = [n for n in parts if rows % (rest // n * shared) == 0]
    if seq_len >= _LONG_ROW:
        return needed[:3]
    return needed[:1]
