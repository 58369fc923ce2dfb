"""Mesh rules of TPU slices: one for each generation, from traits of the experiment alone.

All shard parameters and optimizer state over a whole slice (``fsdp=-1``) and replicate over slices
(``data=-1`` over the data centre network): a slice's ICI is fast enough to gather the weights of
one layer while another is at work. They differ in what the backward pass finds: that is a matter of
memory. Tensors are split (``model``) only where a step has fewer rows than the machine has devices.
A small model on a large slice has replicas inside it too (``data``): weights whose shards are less
than a tile of eight rows are gathered as sums, which moves twice as much.

Mixtures of experts (trait ``moe``) add groups of experts (``expert``) where the weights of a layer
are too large to be gathered whole, and save what attention makes where it fits.

On v5e linear layers multiply in INT8, whose rate there is twice that of bfloat16, as in the
published rule (arXiv:2507.05411). ``--modifier quantize:recipe=none`` keeps bfloat16.
"""

from __future__ import annotations

from axcore.config import Config
from axcore.parallel import RematChoice, Traits, experts_sharded, fully_sharded
from axcore.plugins import Instance
from axcore.quantization import QuantizeModifier
from axcore.remat import Remat

__all__ = ["experts", "v4", "v5e", "v5p", "v6e", "v7x"]

# Widths, in units of a token's width between layers: the layer's input is always kept (1), queries,
# keys and values are 3 without grouping, attention's output 1.
_QKV_AND_OUT = RematChoice(Remat("sites", save=("qkv_proj", "attn_out")), whole=2, split=3)
# Besides the layer's input, what is on its way to host memory and back, and what of the layer at
# work the share left free does not hold: 7B parameters on 256 chips, four rows each, took 4.5.
_OFFLOAD_DOTS = RematChoice(Remat("offload_dots"), whole=3)
_FULL = RematChoice(Remat("full"), whole=1)
_MAX_MODEL = 8
# Rows and lanes of a tile.
_TILE = (8, 128)
_INT8 = QuantizeModifier.Config(recipe="int8", override=True)


def v4(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """32 GiB: saves attention where it fits, recomputes all else."""
    return _slice(traits, instance, _QKV_AND_OUT, _FULL)


def v5e(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """16 GiB: results of matrix products go to host memory, INT8, as in the published rule."""
    return (*_slice(traits, instance, _OFFLOAD_DOTS), _INT8)


def v5p(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """95 GiB: saves attention, recomputes the rest."""
    return _slice(traits, instance, _QKV_AND_OUT, _FULL)


def v6e(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """32 GiB for twice the arithmetic of v5p: saves attention where it fits, else offloads."""
    return _slice(traits, instance, _QKV_AND_OUT, _OFFLOAD_DOTS)


def v7x(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """96 GiB for each of a chip's two devices: saves attention, recomputes the rest."""
    return _slice(traits, instance, _QKV_AND_OUT, _FULL)


def experts(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """A mixture of experts on any generation; INT8 on v5e as for dense models."""
    fitted = experts_sharded(traits, instance, max_model=_MAX_MODEL, tile=_TILE)
    return (*fitted, _INT8) if instance.family == "tpu-v5e" else fitted


def _slice(traits: Traits, instance: Instance, *choices: RematChoice) -> tuple[Config, ...]:
    return fully_sharded(traits, instance, choices=choices, max_model=_MAX_MODEL, tile=_TILE)
