"""RoPE: rotary position embeddings in place of learned ones."""
# requires: axlearn_rope:RoPE
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% integration
from axcore.layers import Attention
from axlearn_rope import RoPE


def integrate(cfg):
    """Turns queries and keys of every attention layer, and adds no positions to embeddings."""
    cfg.model.set(position=None)
    for attention in cfg.find(Attention.Config).values():
        attention.query_key_transform = RoPE.Config()


# %% check
import numpy as np

from axcore.layers import Attention
from axlearn_rope import RoPE


def is_present(cfg, model):
    """Whether every attention layer has it, and embeddings carry no position."""
    layers = [m for _, m in model.walk() if isinstance(m, Attention)]
    rotated = all(isinstance(m.query_key_transform, RoPE) for m in layers)
    return layers and rotated and cfg.model.position is None


def check(probe):
    """Distances count and places do not."""
    probe.differ(probe.after_logits, probe.before_logits, "the result changes")
    row = np.arange(probe.input_ids.shape[1])

    def at(positions):
        places = np.broadcast_to(positions, probe.input_ids.shape)
        return probe.logits(probe.after_model, probe.after_params, positions=places)

    probe.same(at(row + 17), probe.after_logits, "moving all tokens alike changes nothing")
    probe.differ(at(row * 2), probe.after_logits, "other distances change the result")


# %% flat query_key
import jax.numpy as jnp


def flat(q, k, v, positions, *, use_rope=False, rope_base=10000.0):
    """The same, written into an attention function."""
    if use_rope:
        half = q.shape[-1] // 2
        angles = positions[:, :, None, None] * rope_base ** (-jnp.arange(half) / half)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        q1, q2, k1, k2 = q[..., :half], q[..., half:], k[..., :half], k[..., half:]
        q = jnp.concatenate([q1 * cos - q2 * sin, q2 * cos + q1 * sin], -1)
        k = jnp.concatenate([k1 * cos - k2 * sin, k2 * cos + k1 * sin], -1)
