"""A new kernel: both norms computed by a third party's functions."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402

# %% plugin
from axcore.plugins import KernelSpec, hookimpl

FUNCTIONS = __name__.rpartition(".")[0] + ".feature"


@hookimpl
def axcore_kernels():
    """Two kernels, named for what is special about them."""
    return [
        KernelSpec(op=op, implementation="two_sums", platforms=("cpu",), target=f"{FUNCTIONS}:{op}")
        for op in ("rms_norm", "layer_norm")
    ]


# %% feature
import jax.numpy as jnp
from jax import lax


def rms_norm(x, scale=None, *, eps):
    """The root mean square from one dot product."""
    square = jnp.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1]
    y = x * lax.rsqrt(square + eps)
    return y if scale is None else y * scale


def layer_norm(x, scale=None, bias=None, *, eps):
    """Mean and variance from two sums."""
    size = x.shape[-1]
    mean = jnp.sum(x, -1, keepdims=True) / size
    variance = jnp.einsum("...d,...d->...", x, x)[..., None] / size - mean * mean
    y = (x - mean) * lax.rsqrt(variance + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


# %% integration
from axcore.ops import OpRule


def integrate(cfg):
    """Accepts the kernels of the plugin."""
    cfg.set(use=("acme-kernel",))
    for op in ("rms_norm", "layer_norm"):
        cfg.ops = {**cfg.ops, op: OpRule(implementations=("two_sums",))}


# %% check
from axcore.ops import record_choices
from axcore.parallel import resolve_instance
from axcore.plugins import host


def is_present(cfg, model):
    """Whether the plugin is active where the experiment runs."""
    kernels = host().active_for("cpu", cfg.use).kernels
    return "rms_norm.two_sums" in {kernel.name for kernel in kernels}


def check(probe):
    """All norms run it, none did before, and the result is the same."""
    target = probe.target(probe.after, resolve_instance("cpu"))
    with record_choices() as choices:
        logits = probe.logits(probe.after_model, probe.after_params, target=target)
    norms = [choice for choice in choices if choice.op in ("rms_norm", "layer_norm")]
    probe.require(norms, "the model has norms")
    probe.require(all(c.chosen == "two_sums" for c in norms), "every norm runs the new kernel")
    probe.same(logits, probe.before_logits, "the kernel computes what the reference does", 1e-3)
    rules = probe.before.ops
    probe.require(not rules["rms_norm"].implementations, "before, the reference ran")
