"""LoRA: projections get a trained low-rank part, the rest is frozen."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% feature
import jax.numpy as jnp

from axcore.layers import Linear, VarianceScaling, Zeros


class LoRALinear(Linear):
    """``y = x W + (x A) B`` with A: inputs x rank, and B: rank x outputs, which starts at 0."""

    class Config(Linear.Config):
        """``rank`` of the added part."""

        rank: int = 2

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        into, out, axes = self._in, self._out, cfg.axes
        self._add_weight(
            "lora_a", (*into, cfg.rank), (*axes[: len(into)], None), VarianceScaling(),
            fan_in_dims=tuple(range(len(into))), fan_out_dims=(len(into),),
        )  # fmt: skip
        self._add_weight("lora_b", (cfg.rank, *out), (None, *axes[len(into) :]), Zeros())

    def forward(self, x):
        """(..., *input_dim) -> (..., *output_dim)."""
        low = jnp.tensordot(x.astype(self.compute_dtype), self._param("lora_a"), len(self._in))
        return super().forward(x) + jnp.tensordot(low, self._param("lora_b"), 1)


# %% integration
from axcore.layers import Attention, Linear

from .feature import LoRALinear


def integrate(cfg):
    """Adds a low-rank part to every projection of attention, and trains nothing else."""
    for attention in cfg.find(Attention.Config).values():
        attention.replace(Linear.Config, LoRALinear.Config(rank=2))
    cfg.learner.set(frozen_params=("**/[!l]*",))  # all but lora_a and lora_b


# %% check
from axcore.layers import Attention, Linear
from axcore.module import flatten_specs

from .feature import LoRALinear


def is_present(cfg, model):
    """Whether every projection of attention has it."""
    projections = [
        below
        for _, module in model.walk()
        if isinstance(module, Attention)
        for _, below in module.walk()
        if isinstance(below, Linear)
    ]
    return projections and all(isinstance(p, LoRALinear) for p in projections)


def check(probe):
    """With B = 0 nothing changes, otherwise it does; only A and B are trained."""
    start = probe.scaled(probe.after_params, 0.0, lambda path: path.endswith("lora_b"))
    logits = probe.logits(probe.after_model, start)
    probe.same(logits, probe.before_logits, "at the start nothing has changed")
    probe.differ(probe.after_logits, probe.before_logits, "B changes the result")
    learner = probe.after.learner.instantiate(name="learner")
    trained = learner.trainable_specs(probe.after_model.parameter_specs())
    names = {path.rpartition("/")[2] for path in flatten_specs(trained)}
    probe.require(names == {"lora_a", "lora_b"}, f"only A and B are trained, got {names}")
