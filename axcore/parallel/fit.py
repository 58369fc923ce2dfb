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

__all__ = ["RematChoice", "experts_sharded", "fully_sharded"]

# Of the memory that parameters leave, what saved activations may take: the rest is for gathered
# weights, the tensors of the layer at work and the logits.
_ACTIVATION_SHARE = 0.6
# Bytes of parameters, gradients and optimizer state for each byte of parameters: AdamW keeps two
# moments in the parameters' dtype.
_STATE_FACTOR = 4
# Layers of experts that are whole on a device at a time: the one at work, the next one, and the
# gradient of the former; and the share of the memory that they may take.
_GATHERED_LAYERS = 3
_GATHERED_SHARE = 1 / 3
# Copies of what each expert gets that are alive in a layer's backward pass: sent, received, sorted,
# made, and the gradients of the last two. Exchanged buffers have room for all that peers may send.
_ASSIGNED_COPIES = 6
# With microbatches gradients are summed in float32 beside those of one.
_STATE_FACTOR_WITH_SUM = 5
# Share of the memory that a step may be counted to take.
_USABLE = 0.85
# Share of the memory that parameters and what belongs to them may take for shards of whole tiles.
_REPLICATED_SHARE = 0.1
# Share of the peak that products of narrow experts are taken to reach.
_EXPERT_EFFICIENCY = 0.4
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
    tile: tuple[int, int] = (1, 1),
) -> tuple[Config, ...]:
    """Returns modifiers that shard parameters over a slice and keep what memory allows.

    The mesh is ``fsdp=-1, model=...`` inside a slice and ``data=-1`` across slices; a slice too has
    replicas (``data``) where the model is small and its width would be cut into less than tiles.
    The first choice under which a microbatch of sensible size fits is taken, with as few
    microbatches as memory allows; if none does, the last one with one row at a time.

    Args:
        traits: The experiment's traits.
        instance: The machine.
        choices: Ways to rematerialize, the fastest first.
        model: Parts that tensors are split into where the dims allow it; as many as they allow
            otherwise.
        max_model: Parts they may be split into when there are fewer rows than devices; None
            means ``model``.
        tile: Rows and lanes of which the compiler lays out whole tiles. A shard of the width should
            be a multiple of the rows.

    Example:
        >>> traits = Traits(batch_size=8, seq_len=128)
        >>> chip = Instance(name="a", family="a", platform="cpu", num_hosts=1, devices_per_host=4,
        ...                 hbm_bytes=2**30)
        >>> fully_sharded(traits, chip, choices=[RematChoice(Remat("full"), 1)])[0].mesh_shape.fsdp
        -1
    """
    per_slice = instance.num_devices // instance.num_slices
    model = _model_parts(traits, instance, per_slice, model, max_model or model)
    data = _replicas(traits, instance, per_slice // model, tile[0])
    shape = MeshShape(data=data, fsdp=-1, model=model, across_slices={"data": -1})
    rows = _rows_per_shard(traits, instance.num_devices // model)
    free = instance.hbm_bytes - _STATE_FACTOR * traits.parameter_bytes * data / per_slice
    choice, steps = _choose(traits, choices, rows, max(free, 0) * _ACTIVATION_SHARE, model)
    return _modifiers(traits, shape, choice, steps)


def experts_sharded(
    traits: Traits,
    instance: Instance,
    *,
    max_model: int = 8,
    tile: tuple[int, int] = (1, 1),
) -> tuple[Config, ...]:
    """Returns modifiers for a model with experts: the mesh axis ``expert`` beside ``fsdp``.

    Either the weights of all experts travel to each device, or its tokens travel to the experts.
    Weights can travel beside compute, tokens are waited for: ``expert`` is the least power of two
    at which the weights of the layer at work fit, and arrive while the layer before computes. Often
    that is 1. Tensors are split (``model``) only as far as rows or widths need it to divide: an
    expert is narrow, and splitting it costs a sum of every token's result.

    What attention makes is saved where it fits, counted by the model's own widths (latent attention
    makes nine times the model's); otherwise everything is recomputed.

    Args:
        traits: The experiment's traits, of a model with experts.
        instance: The machine.
        max_model: Parts that tensors may be split into.
        tile: As for :func:`fully_sharded`.

    Example:
        >>> traits = Traits(batch_size=8, seq_len=128, num_experts=4)
        >>> chip = Instance(name="a", family="a", platform="cpu", num_hosts=1, devices_per_host=4,
        ...                 hbm_bytes=2**30)
        >>> experts_sharded(traits, chip)[0].mesh_shape.expert
        1
    """
    per_slice = instance.num_devices // instance.num_slices
    model = _model_parts(traits, instance, per_slice, 1, max_model)
    batch = traits.batch_size or instance.num_devices
    split = math.gcd(traits.tensor_parts, per_slice)
    while batch % (instance.num_devices // model) and model * 2 <= max_model:
        if split % (model * 2):
            break
        model *= 2
    rows = _rows_per_shard(traits, instance.num_devices // model)
    features = traits.head_features / max(traits.embed_dim, 1)
    choices = (
        RematChoice(Remat("sites", save=("qkv_proj", "attn_out")), whole=2, split=features),
        RematChoice(Remat("full"), whole=1),
    )
    choice, steps, expert = choices[-1], rows, 1
    # Fewest microbatches first: with more of them weights travel more often.
    for choice, steps in ((c, n) for n in range(1, rows + 1) if rows % n == 0 for c in choices):
        expert = _expert_parts(traits, instance, model, rows // steps)
        needed = _needed(traits, instance, choice, model, expert, rows // steps, steps)
        needed += _padding(traits, per_slice // model // expert, per_slice, tile[1])
        if needed <= _USABLE * instance.hbm_bytes:
            break
    data = _replicas(traits, instance, per_slice // model // expert, tile[0])
    shape = MeshShape(data=data, expert=expert, fsdp=-1, model=model, across_slices={"data": -1})
    return _modifiers(traits, shape, choice, steps)


def _modifiers(
    traits: Traits, shape: MeshShape, choice: RematChoice, steps: int
) -> tuple[Config, ...]:
    """Returns what a rule yields: the mesh, what is kept, and the microbatches."""
    modifiers: list[Config] = [MeshShapeModifier.Config(mesh_shape=shape)]
    if traits.rematerializes:
        modifiers.append(RematModifier.Config(remat=choice.remat))
    if steps > 1:
        modifiers.append(SetModifier.Config(values={"accumulation_steps": steps}))
    return tuple(modifiers)


def _replicas(traits: Traits, instance: Instance, shards: int, tile: int) -> int:
    """Returns the replicas at which shards of the width are whole tiles; 1 if none or too large.

    Shards of less than a tile are gathered and scattered as sums of whole arrays by compilers for
    TPUs, which is twice the traffic.
    """
    per_slice = instance.num_devices // instance.num_slices
    width, replicas = traits.embed_dim, 1
    while width and width % (shards // replicas * tile):
        replicas *= 2
        state = _STATE_FACTOR * traits.parameter_bytes * replicas / per_slice
        if shards % replicas or state > _REPLICATED_SHARE * instance.hbm_bytes:
            return 1
    return replicas


def _expert_parts(traits: Traits, instance: Instance, model: int, rows: int) -> int:
    """Returns the groups of experts; see :func:`experts_sharded`."""
    per_slice = instance.num_devices // instance.num_slices // model
    layers = max(traits.num_layers, 1)
    whole = traits.expert_bytes / 2 / layers / model  # float32 parameters, bfloat16 weights
    active = (
        traits.parameter_bytes
        - traits.expert_bytes
        + (traits.expert_bytes * traits.experts_per_token / max(traits.num_experts, 1))
    ) / 4
    # Forward, twice that backward, and what is recomputed.
    flops = 8 * active / layers * rows * (traits.seq_len or 1) / model
    compute = flops / _EXPERT_EFFICIENCY / max(instance.peak_flops.get("bfloat16", 0.0), 1.0)
    rate = _gather_bytes_per_second(instance)
    parts = 1
    while math.gcd(traits.num_experts, per_slice) % (parts * 2) == 0:
        fits = _GATHERED_LAYERS * whole / parts <= _GATHERED_SHARE * instance.hbm_bytes
        hides = _GATHERED_LAYERS * whole / parts / rate <= compute if rate else True
        divides = not traits.embed_dim or traits.embed_dim % (per_slice // parts) == 0
        if fits and hides and divides:
            break
        parts *= 2
    return parts


def _gather_bytes_per_second(instance: Instance) -> float:
    """Returns what a device gets from all others of its slice; 0 where nobody says."""
    per_slice = instance.num_devices // instance.num_slices
    domain = min(instance.ici_domain_devices or per_slice, per_slice)
    fast, slow = instance.ici_bandwidth_bytes or 0.0, instance.dcn_bandwidth_bytes or 0.0
    if domain >= per_slice or not slow:
        return fast
    # Each device of a host fetches its part from outside, and they share what they fetched.
    per_host = max(instance.num_devices // instance.num_hosts, 1)
    return min(fast, slow / per_host * domain) if fast else slow / per_host


def _needed(
    traits: Traits,
    instance: Instance,
    choice: RematChoice,
    model: int,
    groups: int,
    rows: int,
    steps: int,
) -> float:
    """Returns bytes on one device."""
    per_slice = instance.num_devices // instance.num_slices
    layers = max(traits.num_layers, 1)
    factor = _STATE_FACTOR if steps == 1 else _STATE_FACTOR_WITH_SUM
    # What is not of experts lies with all groups of them alike.
    rest = (traits.parameter_bytes - traits.expert_bytes) * groups
    state = factor * (traits.expert_bytes + rest) / per_slice
    gathered = _GATHERED_LAYERS * traits.expert_bytes / 2 / layers / groups / model
    tokens = rows * (traits.seq_len or 1)
    width = choice.whole + choice.split / model
    saved = 2 * tokens * layers * traits.embed_dim * width
    assigned = 2 * tokens * traits.embed_dim * traits.experts_per_token * groups
    # A layer at work has queries, keys, values, their gradients and attention's result.
    attention = 2 * tokens * 3 * traits.head_features / model
    return state + gathered + saved + _ASSIGNED_COPIES * assigned + attention


def _padding(traits: Traits, shards: int, per_slice: int, lanes: int) -> float:
    """Returns bytes that one device's gradients of experts take beside their own.

    The last matrix of three has the width as its last dim, of which a shard takes whole lanes. Its
    gradients are there twice: of a microbatch and summed, or of a layer and stacked.
    """
    if not traits.embed_dim:
        return 0.0
    shard = traits.embed_dim / shards
    padded = lanes * math.ceil(shard / lanes)
    return 2 * traits.expert_bytes / 3 / per_slice * (padded / shard - 1)


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
