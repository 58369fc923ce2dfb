"""What the forward pass keeps for the backward pass, by remat site, without a trace.

Each value is known by its dims for one token and their logical axes. The list is that of a layer as
it is written; a compiler may keep a little less (what it can recompute from a neighbour for free).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.layers import BaseAttention, CrossAttention, FeedForward, PipelinedTransformer
from axcore.layers.roles import BaseNorm, BaseTransformerLayer
from axcore.layers.stack import BaseStack
from axcore.module import Module, ParameterSpec, flatten_specs
from axcore.parallel.axes import axis_line
from axcore.parallel.cost._model import attention_dims, experts_per_token
from axcore.parallel.cost._recompute import site_of
from axcore.parallel.traits import expert_dim
from axcore.remat import Remat

__all__ = ["Kept", "StackValues", "Value", "kept", "stack_values"]

Axes = tuple[str | None, ...]
Product = Literal["none", "weights", "attention"]
Kept = Literal["device", "host", "recomputed"]


@dataclass(frozen=True)
class Value:
    """An activation of one layer, for one token.

    Attributes:
        name: Remat site, or what it is.
        dims: Dims after batch and positions.
        axes: Their logical axes.
        dtype: Dtype name.
        product: Whether it is the result of a matrix multiplication, and of which kind.
        site: Whether ``name`` is a remat site.
        copies: How many for each token, such as one per expert that it goes to.
        of_source: Whether there is one for each token of the source, not of the target.
        is_residual: Whether a derivative reads it; what is only added to something is not read.
    """

    name: str
    dims: tuple[int, ...]
    axes: Axes
    dtype: str
    product: Product = "none"
    site: bool = False
    copies: float = 1.0
    of_source: bool = False
    is_residual: bool = True


@dataclass(frozen=True)
class StackValues:
    """The layers of one stack that are alike.

    Attributes:
        path: Path of the layer, ``decoder/layer/0:32:1``.
        num_layers: How many it stands for.
        remat: The stack's policy.
        values: Activations of one layer.
        pipeline: Microbatches and repeats of a stack that runs as a pipeline where there are
            stages; None for another.
    """

    path: str
    num_layers: int
    remat: Remat
    values: tuple[Value, ...]
    pipeline: tuple[int, int] | None = None


def kept(value: Value, remat: Remat) -> Kept:
    """Returns where a value is between forward and backward.

    The layer's input is always kept: it is what a layer is recomputed from.
    """
    if value.site and value.name in remat.offload:
        return "host"
    if value.name == "block_in" or (value.site and value.name in remat.save):
        return "device"
    if remat.policy == "none":
        return "device" if value.is_residual else "recomputed"
    if remat.policy == "dots":
        return "recomputed" if value.product == "none" else "device"
    if remat.policy in ("dots_no_batch", "offload_dots"):
        where: Kept = "host" if remat.policy == "offload_dots" else "device"
        return where if value.product == "weights" else "recomputed"
    return "recomputed"


def stack_values(model: Module, attention: Literal["kernel", "reference"]) -> list[StackValues]:
    """Returns the activations of all layers in stacks.

    Args:
        model: The model.
        attention: ``kernel`` keeps a statistic per query; ``reference`` the weights of all keys.
    """
    found: list[StackValues] = []
    for path, stack in model.walk():
        if not isinstance(stack, BaseStack):
            continue
        for name, layer in stack.children.items():
            if isinstance(layer, BaseTransformerLayer):
                count = len(layer.layers) if isinstance(layer.layers, range) else 1
                values = tuple(_layer_values(layer, attention))
                pipeline = None
                if isinstance(stack, PipelinedTransformer):
                    pipeline = (stack.cfg.num_microbatches, stack.cfg.num_repeats)
                remat = stack.cfg.remat
                found.append(StackValues(f"{path}/{name}", count, remat, values, pipeline))
    return found


def _layer_values(layer: Module, attention: Literal["kernel", "reference"]) -> Iterator[Value]:
    dtype = getattr(layer, "compute_dtype", "float32")
    dim = layer.cfg.input_dim
    yield Value("block_in", (dim,), ("embed",), dtype, site=True)
    modules = dict(layer.walk())
    for path, module in modules.items():
        if isinstance(module, BaseNorm):
            yield from _norm_values(path.split("/")[-1], module, dim, dtype)
        elif isinstance(module, BaseAttention):
            yield from _attention_values(module, attention)
    specs = flatten_specs(layer.parameter_specs())
    for path, spec in specs.items():
        line = _line(path, modules)
        if spec.kind == "parameter" and spec.fan_out_dims and spec.fan_in_dims:
            yield from _product_values(path, spec, line)


def _norm_values(name: str, norm: Any, dim: int, dtype: str) -> Iterator[Value]:
    """A norm keeps its input, unless somebody else does, and its output feeds a product."""
    if norm.cfg.input_dim != dim:  # of queries and keys: those are kept after it
        return
    if name.endswith("_out_norm"):
        return
    if name != "attention_norm":
        yield Value(f"{name} input", (dim,), ("embed",), dtype)
    yield Value(f"{name} output", (dim,), ("embed",), dtype)


def _attention_values(module: Any, attention: str) -> Iterator[Value]:
    dims = attention_dims(module)
    if dims is None:
        return
    num_heads, _, value_dim = dims
    dtype = module.compute_dtype
    axes = ("heads", "head_dim")
    yield Value("attn_context", (num_heads, value_dim), axes, dtype, "attention", True)
    if attention == "reference":
        # -1 stands for the keys, whose number the caller knows.
        yield Value("attention weights", (num_heads, -1), ("heads", None), "float32", "attention")
    else:
        yield Value("attention statistics", (num_heads,), ("heads",), "float32")


def _product_values(path: str, spec: ParameterSpec, line: Any) -> Iterator[Value]:
    """The result of a weight's product; of a feed-forward layer, its activation too."""
    dims = tuple(spec.shape[d] for d in spec.fan_out_dims)
    # A router's scores of one token: of all experts, wherever these are.
    axes: Axes = tuple(
        None if "experts" in {link.name for link in axis_line(a or "")} else a
        for a in (spec.axes[d] for d in spec.fan_out_dims)
    )
    site = site_of(line)
    if site == "ffn_out":  # only added to the rest: nobody needs it again
        return
    owner = line[0][1]
    dtype = getattr(owner, "compute_dtype", spec.dtype)
    copies = 1.0
    if expert_dim(spec) is not None:
        copies = experts_per_token(module for _, module in line) or 1.0
    of_source = any(
        isinstance(module, CrossAttention) and child.split("/")[-1] in ("key", "value")
        for (child, _), (_, module) in pairwise(line)
    )
    name = site or path.rsplit("/", 1)[0]
    has_norm = any("attention_out_norm" in module.children for _, module in line)
    yield Value(
        *(name, dims, axes, dtype, "weights", site is not None, copies, of_source),
        is_residual=site != "attn_out" or has_norm,
    )
    if site == "ffn_hidden":
        feed_forward = next(module for _, module in line if isinstance(module, FeedForward))
        copies = _activation_residuals(feed_forward.cfg.activation, feed_forward.gate is not None)
        yield Value("ffn activation", dims, axes, dtype, copies=copies)


@functools.cache
def _activation_residuals(name: str, is_gated: bool) -> int:
    """Returns how many arrays an activation keeps beside its inputs; its result is one of them."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def derivative(*inputs: Any) -> Any:
        if is_gated:
            return jax.vjp(lambda gate, up: ops.gated_activation(gate, up, name), *inputs)[1]
        return jax.vjp(ops.activation(name), *inputs)[1]

    inputs = (x, x) if is_gated else (x,)
    leaves = jax.tree.leaves(jax.eval_shape(derivative, *inputs))
    return max(sum(leaf.shape == x.shape for leaf in leaves) + 1 - len(inputs), 1)


def _line(path: str, modules: dict[str, Module]) -> list[tuple[str, Module]]:
    parts = path.split("/")
    paths = ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]
    return [(p, modules[p]) for p in paths if p in modules]
