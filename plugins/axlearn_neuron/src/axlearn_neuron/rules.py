"""Mesh rules of Trainium machines, from traits of the experiment and the machine alone.

Parameters are sharded over all devices (``fsdp=-1``) and tensors split over the devices of one chip
(``model=4``; 8, four chips, on Trainium1 with its 16 GiB a device): these share memory and links,
and as many times fewer bytes of weights are gathered through the network. No quantization recipe is
named: what one gains here has not been measured.
"""

from __future__ import annotations

from axcore.config import Config
from axcore.parallel import RematChoice, Traits, experts_sharded, fully_sharded
from axcore.plugins import Instance
from axcore.remat import Remat

__all__ = ["experts", "trn1", "trn2", "trn3"]

# Widths, in units of a token's width between layers: its input (1) and attention's output (1) are
# whole on each device; queries, keys and values (3 without grouping) are split with the heads.
_QKV_AND_OUT = RematChoice(Remat("sites", save=("qkv_proj", "attn_out")), whole=2, split=3)
_FULL = RematChoice(Remat("full"), whole=1)


def trn1(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """16 GiB a device: ``model=8``, everything recomputed."""
    return fully_sharded(traits, instance, choices=(_FULL,), model=8)


def trn2(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """24 GiB a device: ``model=4``, attention saved where it fits."""
    return fully_sharded(traits, instance, choices=(_QKV_AND_OUT, _FULL), model=4, max_model=8)


def trn3(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """36 GiB a device: as Trainium2."""
    return trn2(traits, instance)


def experts(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """A mixture of experts: groups of experts in place of split tensors, for they are narrow."""
    return experts_sharded(traits, instance, max_model=8)
