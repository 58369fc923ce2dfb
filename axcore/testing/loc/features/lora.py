"""LoRA: projections get a trained low-rank part, the rest is frozen."""
# requires: axcore.layers:LoRA
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% integration
from axcore.layers import Attention, Linear, LoRA


def integrate(cfg):
    """Adds a low-rank part to every projection of attention, and trains nothing else."""
    for attention in cfg.find(Attention.Config).values():
        for linear in attention.find(Linear.Config).values():
            linear.dot = LoRA.Config(rank=2)
    cfg.learner.set(frozen_params=("**/[!l]*",))  # all but lora_a and lora_b


# %% check
from axcore.layers import Attention, Linear, LoRA
from axcore.module import flatten_specs


def is_present(cfg, model):
    """Whether every projection of attention has it."""
    projections = [
        below
        for _, module in model.walk()
        if isinstance(module, Attention)
        for _, below in module.walk()
        if isinstance(below, Linear)
    ]
    return projections and all(isinstance(p.dot, LoRA) for p in projections)


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
