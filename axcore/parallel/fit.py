"""Fitting a batch to memory: the arithmetic that mesh rules of all hardware share.

A rule states what its hardware prefers, best first; from the traits of a model follow the mesh,
what is recomputed and the number of microbatches. It is a rule of thumb, made for a first run
without a search: ``axcore aot`` tells what really fits.

It is coarser than :func:`axcore.parallel.cost.memory_estimate`, which builds the model and knows
every parameter and site. A rule must not: it sees traits, so that it serves models that nobody has
written yet, and it runs before the config is final. ``axcore plan`` uses the finer model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from axcore.config import Config
from axcore.parallel.mesh import MeshShape
from axcore.parallel.modifiers import MeshShapeModifier, RematModifier, SetModifier
from axcore.parallel.traits import Traits
from axcore.plugins import Instance
from axcore.remat import Remat

__all__ = ["RematChoice", "fully_sharded"]

# Of the memory that parameters leave, what saved activations may take: the rest is for gathered
# weights, the tensors of the layer at work and the logits.
_ACTIVATION_SHARE = 0.6
# Bytes of parameters, gradients and optimizer state for each byte of parameters: AdamW keeps two
# moments in the parameters' dtype.
_STATE_FACTOR = 4
# A microbatch of fewer tokens per device no longer hides the gathering of weights.
_MIN_TOKENS = 4096


@dataclass(frozen=True)
class RematChoice:
    """One way to rematerialize, and what it keeps.

    Attributes:
        remat: What is saved, moved and recomputed.
        whole: What stays in device memory for each token and layer, as a multiple of the width
            between layers, of tensors that every part of the mesh axis ``model`` holds whole.
        split: The same for tensors that are split over ``model``, such as queries.
    """

    remat: Remat
    whole: float
    split: float = 0.0


def fully_sharded(
    traits: Traits,
    instance: Instance,
    *,
    choices: Sequence[RematChoice],
    model: int = 1,
    max_model: int | None = None,
) -> tuple[Config, ...]:
    """Returns modifiers that shard parameters over a slice and keep what memory allows.

    The mesh is ``fsdp=-1, model=...`` inside a slice and ``data=-1`` across slices. The first
    choice under which a microbatch of sensible size fits is taken, with as few microbatches as
    memory allows; if none does, the last one with one row at a time.

    Args:
        traits: The experiment's traits.
        instance: The machine.
        choices: Ways to rematerialize, the fastest first.
        model: Parts that tensors are split into where the dims allow it; as many as they allow
            otherwise.
        max_model: Parts they may be split into when there are fewer rows than devices; None
            means ``model``.

    Example:
        >>> traits = Traits(batch_size=8, seq_len=128)
        >>> chip = Instance(name="a", family="a", platform="cpu", num_hosts=1, devices_per_host=4,
        ...                 hbm_bytes=2**30)
        >>> fully_sharded(traits, chip, choices=[RematChoice(Remat("full"), 1)])[0].mesh_shape.fsdp
        -1
    """
    per_slice = instance.num_devices // instance.num_slices
    model = _model_parts(traits, instance, per_slice, model, max_model or model)
    shape = MeshShape(fsdp=-1, model=model, across_slices={"data": -1})
    modifiers: list[Config] = [MeshShapeModifier.Config(mesh_shape=shape)]
    rows = _rows_per_shard(traits, instance.num_devices // model)
    free = instance.hbm_bytes - _STATE_FACTOR * traits.parameter_bytes / per_slice
    choice, steps = _choose(traits, choices, rows, max(free, 0) * _ACTIVATION_SHARE, model)
    if traits.rematerializes:
        modifiers.append(RematModifier.Config(remat=choice.remat))
    if steps > 1:
        modifiers.append(SetModifier.Config(values={"accumulation_steps": steps}))
    return tuple(modifiers)


def _model_parts(traits: Traits, instance: Instance, per_slice: int, wanted: int, most: int) -> int:
    """Returns a power of two that divides the tensors and the devices of a slice."""
    allowed = math.gcd(traits.tensor_parts, per_slice)
    parts = 1
    while parts * 2 <= wanted and allowed % (parts * 2) == 0:
        parts *= 2
    rows = traits.batch_size
    # Fewer rows than devices: rather split tensors than leave devices without a row.
    while rows and rows < instance.num_devices // parts and parts * 2 <= most:
        if allowed % (parts * 2):
            break
        parts *= 2
    return parts


def _rows_per_shard(traits: Traits, shards: int) -> int:
    batch = traits.batch_size or shards
    return 1 if batch % shards else batch // shards


def _choose(
    traits: Traits, choices: Sequence[RematChoice], rows: int, free: float, model: int
) -> tuple[RematChoice, int]:
    """Returns the choice and the number of microbatches."""
    seq_len = traits.seq_len or 1
    least = min(rows * seq_len, max(_MIN_TOKENS, seq_len))
    for choice in choices:
        width = choice.whole + choice.split / model
        per_token = 2 * traits.num_layers * traits.embed_dim * width  # bfloat16
        tokens = free / per_token if per_token else math.inf
        if tokens >= least:
            steps = (n for n in range(1, rows + 1) if rows % n == 0)
            return choice, next(n for n in steps if rows // n * seq_len <= tokens)
    return choices[-1], rows
