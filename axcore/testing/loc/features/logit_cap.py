"""Logit cap: attention logits are squashed by a tanh."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% integration
from axcore.layers import Attention


def integrate(cfg):
    """Caps the logits of every attention layer."""
    for attention in cfg.find(Attention.Config).values():
        attention.logit_cap = 0.5


# %% check
from axcore.layers import Attention


def is_present(cfg, model):
    """Whether every attention layer has the cap."""
    layers = [m for _, m in model.walk() if isinstance(m, Attention)]
    return layers and all(m.cfg.logit_cap == 0.5 for m in layers)


def check(probe):
    """It changes the result; a cap far above all logits would not."""
    probe.differ(probe.after_logits, probe.before_logits, "the cap changes the result")
    loose = probe.after.copy()
    for attention in loose.find(Attention.Config).values():
        attention.logit_cap = 1e6
    logits = probe.logits(probe.build(loose), probe.after_params)
    probe.same(logits, probe.before_logits, "a cap above all logits changes nothing", 1e-3)


# %% flat logits
import jax.numpy as jnp


def flat(logits, *, logit_cap=None):
    """The same, written into an attention function."""
    if logit_cap is not None:
        logits = logit_cap * jnp.tanh(logits / logit_cap)
