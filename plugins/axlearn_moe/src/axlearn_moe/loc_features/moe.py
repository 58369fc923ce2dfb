"""MoE: several experts in place of every feed-forward layer."""
# requires: axlearn_moe:MoE
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% integration
from axcore.layers import FeedForward
from axlearn_moe import MoE


def integrate(cfg):
    """Makes every feed-forward layer an expert of four, of which each token has two."""
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, top_k=2))


# %% check
import jax

from axcore.layers import BaseTransformerLayer, FeedForward
from axlearn_moe import MoE


def is_present(cfg, model):
    """Whether every layer of the stack has experts, and no layer is dense."""
    layers = [m for _, m in model.walk() if isinstance(m, BaseTransformerLayer)]
    routed = [m for _, m in model.walk() if isinstance(m, MoE) and m.cfg.num_experts == 4]
    return layers and len(routed) == len(layers) and not cfg.find(FeedForward.Config)


def check(probe):
    """Equal experts make the router irrelevant; different ones do not."""
    probe.differ(probe.after_logits, probe.before_logits, "the result changes")
    params = dict(probe.after_params)

    def other_router(params):
        return probe.scaled(params, -1.0, lambda path: path.endswith("router/weight"))

    other = probe.logits(probe.after_model, other_router(params))
    probe.differ(other, probe.after_logits, "the router chooses between experts")

    def equal(tree):
        if "experts" in tree:
            alike = jax.tree.map(lambda x: x.at[:].set(x[0]), tree["experts"])
            return {**tree, "experts": alike}
        return {n: equal(t) if isinstance(t, dict) else t for n, t in tree.items()}

    alike = equal(params)
    probe.same(
        probe.logits(probe.after_model, other_router(alike)),
        probe.logits(probe.after_model, alike),
        "equal experts give the same result whatever the router says",
    )


# %% flat feed_forward
import jax
import jax.numpy as jnp


def flat(x, w_in, w_out, y, *, use_moe=False, num_experts=4, moe_scale=0.5):
    """The same, written into a feed-forward function; experts are scaled copies."""
    if use_moe:
        router = w_in[:, :num_experts]
        gates = jax.nn.softmax(x @ router)
        copies = jnp.stack([y * (1 + moe_scale * i) for i in range(num_experts)], -1)
        y = jnp.einsum("bsde,bse->bsd", copies, gates)
