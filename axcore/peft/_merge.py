"""Adapters folded into the weights beside them: a plain model that computes the same."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from axcore.checkpoint import stack_form
from axcore.config import Config
from axcore.context import functional
from axcore.errors import CheckpointError
from axcore.layers.lora import LowRankAdapter
from axcore.module import Module
from axcore.peft._attach import detach

__all__ = ["merge_state", "plain_config"]


def plain_config(cfg: Config) -> Config:
    """Returns a copy of a config without adapters, whose learner trains everything again."""
    plain: Any = cfg.copy()
    detach(plain)
    if "learner" in plain.fields():
        plain.learner.set(frozen_params=())
    return plain


def merge_state(model: Module, state: Mapping[str, Any], plain: Module) -> dict[str, Any]:
    """Returns the state of the plain model that computes what the adapted one does.

    Weights are merged in float32 and stored in their own dtype.

    Args:
        model: The adapted model.
        state: Its state.
        plain: The model of :func:`plain_config`, whose stack form the result has.

    Raises:
        CheckpointError: The model has no adapters.
    """
    adapters = {p: m for p, m in model.walk() if isinstance(m, LowRankAdapter)}
    if not adapters:
        raise CheckpointError(
            "the model has no adapters to merge",
            code="AX660",
            hint="train it with --modifier lora or --modifier dora first",
        )
    merged = _copied(state)
    for path, adapter in adapters.items():
        owner, name = _at(merged, path.split("/")[:-1]), path.rsplit("/", 1)[-1]
        own = owner.pop(name)
        if "base" in own:  # what a replaced product keeps, such as scales
            owner[name] = own["base"]
        owner["weight"] = _merged(adapter, path.count(":") // 2, own, owner["weight"])
    return stack_form.restack(merged, _structs(plain.parameter_specs()))


def _merged(adapter: LowRankAdapter, stacked: int, state: Any, weight: jax.Array) -> jax.Array:
    def one(state: Any, weight: jax.Array) -> jax.Array:
        made, _ = functional(
            adapter, state=state, inputs=(weight,), is_training=False, method="merge"
        )
        return made.astype(weight.dtype)

    fn = one
    for _ in range(stacked):
        fn = jax.vmap(fn)
    return jax.jit(fn)(state, weight)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in state.items()}


def _at(state: dict[str, Any], path: list[str]) -> dict[str, Any]:
    return functools.reduce(lambda node, key: node[key], path, state)


def _structs(specs: Mapping[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda spec: spec.struct(), dict(specs))
