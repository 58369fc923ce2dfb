"""QK-norm: queries and keys are normalized before their product."""
# requires: axcore.layers:QKNorm
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% integration
from axcore.layers import Attention, QKNorm


def integrate(cfg):
    """Normalizes queries and keys of every attention layer."""
    for attention in cfg.find(Attention.Config).values():
        attention.query_key_transform = QKNorm.Config()


# %% check
from axcore.layers import Attention, QKNorm


def is_present(cfg, model):
    """Whether every attention layer has it."""
    layers = [m for _, m in model.walk() if isinstance(m, Attention)]
    return layers and all(isinstance(m.query_key_transform, QKNorm) for m in layers)


def check(probe):
    """Larger queries leave the result as it is, which they do not without the norm."""

    def larger(params):
        return probe.scaled(params, 100.0, lambda path: "qkv/query/" in path)

    before = probe.logits(probe.before_model, larger(probe.before_params))
    after = probe.logits(probe.after_model, larger(probe.after_params))
    probe.differ(before, probe.before_logits, "without it, larger queries change the result")
    probe.same(after, probe.after_logits, "with it, larger queries change nothing")


# %% flat query_key
import jax.numpy as jnp


def flat(q, k, v, positions, *, use_qk_norm=False, qk_norm_eps=1e-6):
    """The same, written into an attention function."""
    if use_qk_norm:
        q = q / jnp.sqrt(jnp.mean(q * q, -1, keepdims=True) + qk_norm_eps)
        k = k / jnp.sqrt(jnp.mean(k * k, -1, keepdims=True) + qk_norm_eps)
