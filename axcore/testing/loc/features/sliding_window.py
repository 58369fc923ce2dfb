"""Sliding window: a token attends to the last few only."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% integration
from axcore.layers import Attention
from axcore.ops.masks import SlidingWindow


def integrate(cfg):
    """Lets every attention layer look back two tokens."""
    for attention in cfg.find(Attention.Config).values():
        attention.mask = attention.mask & SlidingWindow(left=2)


# %% check
from axcore.layers import Attention
from axcore.ops.masks import SlidingWindow


def is_present(cfg, model):
    """Whether every attention layer has the window."""
    layers = [m for _, m in model.walk() if isinstance(m, Attention)]
    return layers and all(SlidingWindow(left=2) in m.cfg.mask.parts() for m in layers)


def check(probe):
    """The first token reaches the third in one layer, and no longer the last."""
    ids = probe.input_ids.copy()
    ids[:, 0] += 1
    before = probe.logits(probe.before_model, probe.before_params, input_ids=ids)
    after = probe.logits(probe.after_model, probe.after_params, input_ids=ids)
    last = (slice(None), -1)
    probe.differ(before[last], probe.before_logits[last], "without it the first token counts")
    probe.same(after[last], probe.after_logits[last], "with it the first token is out of sight")
    third = (slice(None), 2)
    probe.differ(after[third], probe.after_logits[third], "the window reaches two tokens back")


# %% flat mask
def flat(mask, positions, *, window=None):
    """The same, written into an attention function."""
    if window is not None:
        mask = mask & (positions[:, :, None] - positions[:, None, :] <= window)
