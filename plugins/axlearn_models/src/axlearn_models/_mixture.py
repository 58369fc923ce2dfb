"""What the families with mixtures of experts share, on the layer of axlearn-moe.

Imported by those families alone: the other members need no axlearn-moe.
"""

from __future__ import annotations

from typing import Any

from axcore.train import Trainer
from axlearn_models._llama_like import layers_of, resized, shrunk

try:
    from axlearn_moe import LoadBalanceLoss, MoE, TopKRouter
except ModuleNotFoundError as error:
    if error.name != "axlearn_moe":
        raise
    raise ImportError(
        "models with mixtures of experts need the package axlearn-moe; install it: "
        'pip install "axlearn-models[moe]"'
    ) from error

__all__ = ["balance_of", "balanced", "mixed", "mixtures_of", "shrunk_mixture"]


def mixed(
    cfg: Trainer.Config,
    *,
    count: int,
    top_k: int,
    hidden_dim: int,
    balance: float,
    normalize: bool = True,
) -> Trainer.Config:
    """Puts a mixture in place of every feed-forward layer and returns the config.

    An expert is as that layer was but for its width. No token is dropped.

    Args:
        cfg: A config of a Llama-like family.
        count: Experts of a layer.
        top_k: Experts of each token.
        hidden_dim: Width inside an expert.
        balance: See :func:`balanced`.
        normalize: Whether the weights of a token's experts are made to sum to 1.
    """
    for layer in layers_of(cfg):
        dense = layer.feed_forward
        layer.set(
            feed_forward=MoE.Config(
                num_experts=count,
                top_k=top_k,
                hidden_dim=hidden_dim,
                activation=dense.activation,
                up=dense.up,
                gate=dense.gate,
                down=dense.down,
                router=TopKRouter.Config(normalize=normalize, weight_init=dense.up.weight_init),
                losses=(),
            )
        )
    return balanced(cfg, balance)


def mixtures_of(cfg: Trainer.Config) -> tuple[Any, ...]:
    """Returns the nodes of the mixtures, in the order of the layers' period."""
    return tuple(cfg.model.find(MoE.Config).values())


def balanced(cfg: Trainer.Config, coefficient: float) -> Trainer.Config:
    """Sets the weight of the load-balance losses and returns the config.

    Args:
        cfg: Its dims are the final ones.
        coefficient: The ``router_aux_loss_coef`` that is published with weights: of one loss for
            all layers together, in which each of a token's choices counts. Here every layer has a
            loss of its own, of the mean over the choices.
    """
    model: Any = cfg.model
    for moe in mixtures_of(cfg):
        others = tuple(loss for loss in moe.losses if type(loss) is not LoadBalanceLoss)
        weight = coefficient * moe.top_k / model.decoder.num_layers
        moe.set(losses=(LoadBalanceLoss(weight), *others) if coefficient else others)
    return cfg


def balance_of(cfg: Trainer.Config) -> float:
    """Returns the coefficient that :func:`balanced` sets, of the first mixture; 0 without one."""
    model: Any = cfg.model
    moe = mixtures_of(cfg)[0]
    weight = sum(loss.weight for loss in moe.losses if type(loss) is LoadBalanceLoss)
    return weight * model.decoder.num_layers / moe.top_k


def shrunk_mixture(
    cfg: Trainer.Config, *, num_kv_heads: int | None = None, head_dim: int | None = None
) -> Trainer.Config:
    """Makes a family's test member: 8 experts of width 44, 2 for each token, else as `shrunk`."""
    shrunk(cfg, num_kv_heads=num_kv_heads)
    for moe in mixtures_of(cfg):
        moe.set(num_experts=8, top_k=2)
    return balanced(resized(cfg, hidden_dim=44, head_dim=head_dim), 0.01)
