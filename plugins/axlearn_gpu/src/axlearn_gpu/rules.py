"""Mesh rules of GPU machines, from traits of the experiment and the machine alone.

Inside one NVLink domain parameters are sharded over all GPUs (``fsdp=-1``) and nothing else: NVLink
gathers the weights of a layer in less time than the layer takes. Beyond it weights travel through
the hosts' adapters, some 50 GB/s for each GPU, and gathering all of them would take longer than
computing: there tensors are split within the host (``model``), so that each GPU gathers its part.

Mixtures of experts (trait ``moe``) split tensors no further than the batch needs: an expert is
narrow, and the sums of every token's result would outweigh the weights that are spared. They add
groups of experts (``expert``) instead where gathering a layer takes longer than computing one.

On H100 and H200 linear layers and experts multiply in FP8 with delayed scaling over 128 steps, as
the published H100 rule says of linear layers (arXiv:2507.05411). ``--modifier
quantize:recipe=none`` keeps bfloat16.
"""

from __future__ import annotations

from axcore.config import Config
from axcore.parallel import RematChoice, Traits, experts_sharded, fully_sharded
from axcore.plugins import Instance
from axcore.quantization import QuantizeModifier
from axcore.remat import Remat

__all__ = ["experts", "gpu"]

# Widths, in units of a token's width between layers: its input (1) and attention's output (1) are
# whole on each GPU; queries, keys and values (3 without grouping) are split with the heads.
_CHOICES = (
    RematChoice(Remat("sites", save=("qkv_proj", "attn_out")), whole=2, split=3),
    RematChoice(Remat("full"), whole=1),
)
_MAX_MODEL = 8
_FP8 = QuantizeModifier.Config(recipe="fp8-delayed", override=True, options={"history_length": 128})
_HOPPER = ("gpu-h100", "gpu-h200")


def gpu(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """``fsdp=-1``; beyond NVLink ``model=8`` (4 on hosts of 4); attention saved where it fits.

    FP8 products on Hopper.
    """
    within = min(_MAX_MODEL, instance.devices_per_host)
    inside_nvlink = instance.num_devices <= int(instance.attributes["nvlink_domain"])
    fitted = fully_sharded(
        traits,
        instance,
        choices=_CHOICES,
        model=1 if inside_nvlink else within,
        max_model=within,
    )
    return (*fitted, _FP8) if instance.family in _HOPPER else fitted


def experts(traits: Traits, instance: Instance) -> tuple[Config, ...]:
    """A mixture of experts; FP8 products on Hopper, as for dense models."""
    within = min(_MAX_MODEL, instance.devices_per_host)
    fitted = experts_sharded(traits, instance, max_model=within)
    return (*fitted, _FP8) if instance.family in _HOPPER else fitted
