"""What the ``config.json`` and the tensors of mixtures of experts have in common.

Hugging Face's files hold a tensor for each expert; here the experts of a layer are one array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axcore.checkpoint.convert import ModelFamily, Rule, Settings, Stacked, TensorRule, TorchLinear
from axcore.train import Trainer
from axlearn_models._export import layers_to_say, verified
from axlearn_models._hugging_face import (
    cannot_say,
    given,
    llama_like_from,
    llama_like_rules,
    llama_like_to,
)
from axlearn_models._llama_like import resized
from axlearn_models._mixture import balance_of, balanced, mixtures_of
from axlearn_moe import MoE, TopKRouter

__all__ = [
    "EXPERT_NAMES",
    "mixture_from",
    "mixture_rules",
    "mixture_to",
    "mixture_verified",
    "mixtures_to_say",
    "normalizes",
]

_LAYER, _OURS = "model.layers.{i}", "decoder/layer/{i}/feed_forward"
EXPERT_NAMES = {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}


def mixture_from(
    settings: Settings,
    cfg: Trainer.Config,
    *,
    width: str = "intermediate_size",
    normalize: str | None = None,
) -> Trainer.Config:
    """Gives an experiment with mixtures the dims of a ``config.json`` and returns it.

    Args:
        settings: The settings.
        cfg: An experiment of the family; its structure and recipe stay.
        width: The setting with the width of an expert.
        normalize: The setting that says whether a token's weights sum to 1; None: the family's way.

    Raises:
        CheckpointError: A setting is missing or not implemented (AX614).
    """
    settings.skip("output_router_logits")
    llama_like_from(settings, cfg)
    resized(cfg, hidden_dim=settings.require(width, int))
    count = "num_experts" if "num_experts" in settings else "num_local_experts"
    dims = {
        "num_experts": settings.require(count, int),
        "top_k": settings.require("num_experts_per_tok", int),
    }
    for moe in mixtures_of(cfg):
        moe.set(**dims)
        moe.router.set(weight_init=moe.up.weight_init)
        if normalize is not None:
            moe.router.set(normalize=given(settings, normalize, bool, False))
    return balanced(cfg, given(settings, "router_aux_loss_coef", float, 0.001))


def mixture_to(
    cfg: Trainer.Config,
    *,
    architecture: str,
    model_type: str,
    width: str = "intermediate_size",
    count: str = "num_experts",
    normalize: str | None = None,
) -> dict[str, Any]:
    """Returns the ``config.json`` of an experiment with mixtures: inverse of `mixture_from`.

    Raises:
        CheckpointError: The model is not made of the layers that the settings describe (AX622).
    """
    mixtures_to_say(cfg, architecture)
    out = llama_like_to(
        cfg, architecture=architecture, model_type=model_type, feed_forward=MoE.Config
    )
    (moe, *_) = mixtures_of(cfg)
    out |= {
        width: moe.hidden_dim,
        count: moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": balance_of(cfg),
    }
    if normalize is not None:
        out[normalize] = normalizes(moe)
    return out


def mixtures_to_say(cfg: Trainer.Config, architecture: str, *, periodic: bool = False) -> None:
    """Checks that a model is a decoder whose layers all have mixtures with learned scores.

    Args:
        cfg: The experiment.
        architecture: The foreign name, for messages.
        periodic: Whether the layers may differ.

    Raises:
        CheckpointError: It is not (AX622).
    """
    layers_to_say(cfg, architecture, periodic=periodic, feed_forward=MoE.Config)
    for moe in mixtures_of(cfg):
        if type(moe.router) is not TopKRouter.Config:
            raise cannot_say(f"a {type(moe.router).__qualname__} as router", architecture)


def mixture_verified(
    family: ModelFamily, cfg: Trainer.Config, settings: dict[str, Any]
) -> dict[str, Any]:
    """As ``verified``: routers may leave it to ``top_k`` whether a token's weights sum to 1."""
    return verified(family, cfg, settings, state_defaults=_state_normalize)


def _state_normalize(layer: Any) -> None:
    moe = layer.feed_forward
    if isinstance(moe, MoE.Config) and isinstance(moe.router, TopKRouter.Config):
        moe.router.normalize = normalizes(moe)


def normalizes(mixture: Any) -> bool:
    """Whether the weights of a token's experts sum to 1: what the router states, or its default."""
    stated = mixture.router.normalize
    return mixture.top_k > 1 if stated is None else stated


def mixture_rules(names: Mapping[str, str] = EXPERT_NAMES, *, block: str = "mlp") -> list[Rule]:
    """Returns the tensors of a Llama-like model with mixtures.

    Args:
        names: Our part of an expert -> its foreign name.
        block: Foreign name of a mixture.
    """
    foreign = f"{_LAYER}.{block}"
    rules: list[Rule] = [
        *llama_like_rules(),
        TensorRule(f"{foreign}.gate.weight", f"{_OURS}/router/weight", TorchLinear()),
    ]
    rules += [
        TensorRule(
            f"{foreign}.experts.{{j}}.{theirs}.weight", f"{_OURS}/experts/{ours}/weight", Stacked()
        )
        for ours, theirs in names.items()
    ]
    return rules
