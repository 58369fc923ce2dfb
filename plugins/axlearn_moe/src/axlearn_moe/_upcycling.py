"""Upcycling: a mixture of experts whose experts start as a trained dense model's layers."""

from __future__ import annotations

import dataclasses
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axcore.checkpoint import check_new, stack_form
from axcore.collection import expand_path
from axcore.config import Config, apply_modifier
from axcore.errors import CheckpointError, ConfigError
from axcore.inference import compare_logits, load_model, write_model
from axcore.module import Module, flatten_specs
from axlearn_moe._moe import MoE

__all__ = ["UPCYCLING_RECORD", "Upcycled", "upcycle_directory", "upcycle_state"]

UPCYCLING_RECORD = "upcycling.json"
# Below core's name, so that the command line shows it.
_log = logging.getLogger("axcore.moe")
# Sums of experts in bfloat16 move logits by less than this share of the largest one.
_ROUNDING = 1e-2


@dataclasses.dataclass(frozen=True)
class Upcycled:
    """What has become of a dense model's state.

    Attributes:
        state: The mixture's state.
        copied: Paths, one for each layer, of arrays that were made of a dense layer's.
        initialized: Those that the dense model has no counterpart of: routers, shared experts.
    """

    state: dict[str, Any]
    copied: tuple[str, ...]
    initialized: tuple[str, ...]


def upcycle_state(
    state: Mapping[str, Any],
    mixture: Module,
    key: jax.Array,
    *,
    noise: float = 0.0,
    drop_ratio: float = 0.0,
) -> Upcycled:
    r"""Makes a mixture's state of a dense model's.

    Every expert starts as a copy of the layer that it stands for (Komatsuzaki et al.,
    arXiv:2212.05055), changed by

    - ``noise`` s: weights W become :math:`W + s\,\sigma_W\,\epsilon` with normal :math:`\epsilon`,
      of each expert's own;
    - ``drop_ratio`` r: in each expert the share r of the hidden units, chosen at random, begins
      anew: their columns of ``up`` and ``gate`` and their rows of ``down`` are drawn from a normal
      distribution with the mean and deviation of those that they replace (drop-upcycling, Nakamura
      et al., arXiv:2502.19261, section 3). Biases stay.

    Args:
        state: Parameters of the dense model, in either form of stacks.
        mixture: The same model with :class:`MoE` in place of feed-forward layers.
        key: For routers, noise and the choice of units; results do not depend on the stacks' form.
        noise: Relative to the deviation of each weight, at least 0.
        drop_ratio: From 0 to 1.

    Raises:
        ConfigError: ``noise`` or ``drop_ratio`` is out of range (AX930), or set for weights in few
            bits (AX972); or the model has no mixture (AX931).
        CheckpointError: An expert has no dense counterpart, or one of another shape or kind of
            number (AX932).
    """
    _check_amounts(noise, drop_ratio)
    dense = stack_form.canonical(stack_form.flatten(dict(state)))
    target = jax.tree.map(lambda spec: spec.struct(), mixture.parameter_specs())
    wanted = stack_form.flatten(target)
    structs = stack_form.canonical(wanted)
    layers = dict(_mixtures(mixture))
    if not layers:
        raise ConfigError(
            "there is no mixture of experts in the model",
            code="AX931",
            hint="place some with the modifier axlearn-moe:moe",
        )
    made = dict(dense)
    copied: list[str] = []
    for path in layers:
        of_experts = {p: s for p, s in structs.items() if p.startswith(f"{path}/experts/")}
        units = None
        for name, struct in of_experts.items():
            source = name.replace(f"{path}/experts/", f"{path}/")
            made[name] = _copies(dense, source, struct)
            made.pop(source, None)
            if (noise or drop_ratio) and name.endswith("/weight"):
                _check_drawable(made[name].dtype, source)
            draw = jax.random.fold_in(key, zlib.crc32(name.encode()))
            if drop_ratio and name.endswith("/weight"):
                if units is None:
                    chosen = jax.random.fold_in(key, zlib.crc32(path.encode()))
                    units = _dropped(chosen, layers[path], drop_ratio)
                axis = 1 if name.endswith("/down/weight") else 2
                made[name] = _redrawn(made[name], draw, units, axis)
            if noise and name.endswith("/weight"):
                made[name] = _noisy(made[name], jax.random.fold_in(draw, 1), noise)
            copied.append(name)
    found = stack_form.plan(made, wanted)
    fresh = frozenset(found.missing)
    names = [n for p in fresh for n in stack_form.canonical({p: wanted[p]})]
    alien = [n for n in names if not any(n.startswith(f"{path}/") for path in layers)]
    if alien := [*alien, *found.reshaped, *found.unexpected]:
        raise CheckpointError(
            f"the mixture and the dense model differ in {alien[0]!r} too, which is of no expert",
            code="AX932",
            hint="upcycle with the config of the dense model and a modifier that places mixtures",
        )
    anew = _initial(mixture, key, fresh)
    leaves = [
        anew[p] if p in fresh else jnp.asarray(stack_form.assemble(found.recipes[p], made))
        for p in wanted
    ]
    tree = jax.tree.unflatten(jax.tree.structure(target), leaves)
    return Upcycled(tree, tuple(copied), tuple(sorted(names)))


def upcycle_directory(
    directory: str | Path,
    modifiers: Config | Sequence[Config],
    out: str | Path,
    *,
    noise: float = 0.0,
    drop_ratio: float = 0.0,
    seed: int = 0,
    step: int | None = None,
    use_ema: bool = False,
    trusted: Iterable[str] = (),
) -> dict[str, Any]:
    """Writes the model directory of a mixture, made of a dense model's.

    ``train --init-from``, ``eval`` and ``generate`` read it like any other.

    Args:
        directory: The ``--out`` directory of ``axcore train`` or ``axcore convert``.
        modifiers: What places the mixtures, in order: a :class:`MoEModifier`'s config, or
            another's.
        out: The directory to make.
        noise: See :func:`upcycle_state`; so is the next.
        drop_ratio: Share of each expert's hidden units that begin anew.
        seed: For routers, noise and the choice of units.
        step: Another checkpoint than the newest.
        use_ema: Whether to take the learner's moving average of the parameters.
        trusted: Further packages that ``config.txt`` may name.

    Returns:
        ``mixtures`` (layers), ``copied`` and ``initialized`` (paths), ``parameters_before`` and
        ``parameters_after``, what :func:`axcore.inference.compare_logits` says of it and the dense
        model, ``equal`` (whether the mixture computes
        what the dense model does; None where it is not known), ``frozen`` (those of
        ``initialized`` that the config's learner does not train), ``noise``, ``drop_ratio``,
        ``seed``, ``step`` and ``out``. The same stands in ``upcycling.json``.

    Raises:
        ConfigError: See :func:`upcycle_state`; the model has mixtures already (AX931); or ``seed``
            is out of range (AX970).
        CheckpointError: See there; the dense model or the mixture computes what is not finite
            (AX971); or ``out`` exists or cannot be written.
    """
    _check_amounts(noise, drop_ratio)
    if not 0 <= seed < 2**32:
        raise ConfigError(
            f"seed is {seed}, expected 0 to {2**32 - 1:,}",
            code="AX970",
            hint="keys have 32 bits: further ones would repeat those of smaller seeds",
        )
    out = Path(out)
    check_new(out)
    loaded = load_model(directory, step=step, use_ema=use_ema, trusted=trusted)
    _check_finite(loaded.state, "the dense model", str(directory), "take another --step")
    if there := next(_mixtures(loaded.model), None):
        raise ConfigError(
            f"the model has a mixture of experts already, {there[0]}",
            code="AX931",
            where=str(directory),
            hint="upcycle a dense model",
        )
    modifiers = (modifiers,) if isinstance(modifiers, Config) else modifiers
    cfg: Any = loaded.cfg.copy()
    for modifier in modifiers:
        cfg = apply_modifier(cfg, modifier)
    trainer: Any = cfg.copy().instantiate(name="trainer")
    mixture: Module = trainer.model
    key = jax.random.key(seed)
    made = upcycle_state(loaded.state, mixture, key, noise=noise, drop_ratio=drop_ratio)
    what, way_out = "the mixture", "lower the noise, or look at router.scale"
    _check_finite(made.state, what, str(out), way_out)
    compared = compare_logits((loaded.model, loaded.state), (mixture, made.state))
    if not math.isfinite(compared["max_abs_logit_difference"] or 0.0):
        raise CheckpointError(
            "the mixture's logits, or the dense model's, are not finite; nothing was written",
            code="AX971",
            where=str(out),
            hint=f"{way_out}, or take another --step",
        )
    record = {
        "modifiers": [modifier.to_text() for modifier in modifiers],
        "noise": noise,
        "drop_ratio": drop_ratio,
        "seed": seed,
        "mixtures": len(list(_mixtures(mixture))),
        "copied": list(made.copied),
        "initialized": list(made.initialized),
        "parameters_before": sum(x.size for x in jax.tree.leaves(loaded.state)),
        "parameters_after": sum(x.size for x in jax.tree.leaves(made.state)),
        **compared,
        "equal": _is_equal(compared),
        "frozen": _frozen(trainer, made.initialized),
        "step": loaded.step,
    }
    _warn(record)
    write_model(out, cfg, made.state, like=loaded, records={UPCYCLING_RECORD: record})
    return {**record, "out": str(out)}


def _warn(record: Mapping[str, Any]) -> None:
    """Says what of a mixture is hardly what was meant."""
    if record["equal"] is False and not record["noise"] and not record["drop_ratio"]:
        _log.warning(
            "the experts are copies, yet logits move by up to %.3g: the weights of a token's "
            "experts do not sum to 1, or a capacity drops tokens, or there are shared experts "
            "(router.normalize=True and router.scale=1 make copies equal the dense layer)",
            record["max_abs_logit_difference"],
        )
    if record["frozen"]:
        _log.warning(
            "%d arrays that begin anew, such as %s, stay as they were drawn when this config "
            "trains: learner.frozen_params leaves them out (state it anew, or merge adapters "
            "before upcycling: axcore peft merge)",
            len(record["frozen"]),
            record["frozen"][0],
        )


def _check_amounts(noise: float, drop_ratio: float) -> None:
    if not 0 <= noise <= float(jnp.finfo(jnp.float32).max):
        raise ConfigError(
            f"noise is {noise}, expected a finite float32 number of at least 0",
            code="AX930",
            hint="0.01 is a hundredth of each weight's own deviation",
        )
    if not 0 <= drop_ratio <= 1:
        raise ConfigError(
            f"drop_ratio is {drop_ratio}, expected 0 to 1",
            code="AX930",
            hint="0.5 is what arXiv:2502.19261 recommends",
        )


def _check_finite(state: Any, what: str, where: str, hint: str) -> None:
    for path, value in stack_form.flatten(state).items():
        if jnp.issubdtype(value.dtype, jnp.inexact) and not jnp.all(jnp.isfinite(value)):
            raise CheckpointError(
                f"{what} has weights that are not finite, in {path!r}; nothing was written",
                code="AX971",
                where=where,
                hint=hint,
            )


def _frozen(trainer: Any, paths: Iterable[str]) -> list[str]:
    """Returns those parameters that the learner leaves as they are."""
    if not hasattr(trainer.learner, "split"):
        return []
    specs = trainer.model.parameter_specs()
    structs = jax.tree.map(lambda spec: spec.struct(), specs)
    _, frozen = jax.eval_shape(lambda p: trainer.learner.split(p, specs), structs)
    meant = {p: s.struct() for p, s in flatten_specs(specs).items() if s.kind == "parameter"}
    stay = stack_form.canonical(stack_form.flatten(frozen)).keys()
    return [p for p in paths if p in stay & stack_form.canonical(meant).keys()]


def _mixtures(model: Module) -> Iterator[tuple[str, MoE]]:
    """Yields the mixtures of a model, one for each layer of a stack, by path."""
    for path, module in model.walk():
        if isinstance(module, MoE):
            for name, _ in expand_path(path):
                yield name, module


def _copies(dense: Mapping[str, jax.Array], source: str, struct: Any) -> jax.Array:
    """Returns as many copies of a dense array as ``struct`` has experts."""
    if source not in dense:
        raise CheckpointError(
            f"the dense model has no {source!r} to make experts of",
            code="AX932",
            hint="an expert's biases, gate and names must be those of the layer it replaces",
        )
    value = dense[source]
    if tuple(value.shape) != tuple(struct.shape[1:]):
        raise CheckpointError(
            f"{source!r} has shape {list(value.shape)}, an expert's is {list(struct.shape[1:])}",
            code="AX932",
            hint="experts are copies: leave hidden_dim of the mixture as the dense layer has it",
        )
    if jnp.issubdtype(value.dtype, jnp.inexact) != jnp.issubdtype(struct.dtype, jnp.inexact):
        raise CheckpointError(
            f"{source!r} is {value.dtype}, an expert's is {struct.dtype}",
            code="AX932",
            hint="experts are copies: set a floating-point param_dtype, or upcycle the model from "
            "before it was quantized",
        )
    return jnp.broadcast_to(value.astype(struct.dtype), struct.shape)


def _check_drawable(dtype: Any, source: str) -> None:
    if jnp.dtype(dtype).itemsize < 2:
        raise ConfigError(
            f"{source!r} is stored as {dtype}, which takes neither noise nor units that begin anew",
            code="AX972",
            hint="upcycle the model from before it was quantized, then quantize the mixture; "
            "or make exact copies, with noise and drop_ratio 0",
        )


def _dropped(key: jax.Array, mixture: MoE, ratio: float) -> jax.Array:
    """Returns bool (experts, hidden): which hidden units of each expert begin anew."""
    experts: Any = mixture.experts.cfg
    hidden = experts.hidden_dim
    count = round(ratio * hidden)
    keys = jax.random.split(key, experts.num_experts)
    order = jax.vmap(lambda k: jax.random.permutation(k, hidden))(keys)
    return order < count


def _redrawn(weight: jax.Array, key: jax.Array, units: jax.Array, axis: int) -> jax.Array:
    """Returns (experts, in, out) weights with the parts of ``units`` on ``axis`` drawn anew."""
    mask = jnp.expand_dims(units, 3 - axis)
    value = weight.astype(jnp.float32)
    count = jnp.maximum(jnp.sum(units, axis=1) * weight.shape[3 - axis], 1)[:, None, None]
    mean = jnp.sum(jnp.where(mask, value, 0), axis=(1, 2), keepdims=True) / count
    spread = jnp.sum(jnp.where(mask, (value - mean) ** 2, 0), axis=(1, 2), keepdims=True) / count
    drawn = mean + jnp.sqrt(spread) * jax.random.normal(key, weight.shape)
    return jnp.where(mask, drawn, value).astype(weight.dtype)


def _noisy(weight: jax.Array, key: jax.Array, noise: float) -> jax.Array:
    """Returns (experts, in, out) weights with noise relative to each expert's deviation."""
    value = weight.astype(jnp.float32)
    deviation = jnp.std(value, axis=(1, 2), keepdims=True)
    return (value + noise * deviation * jax.random.normal(key, value.shape)).astype(weight.dtype)


def _initial(mixture: Module, key: jax.Array, paths: frozenset[str]) -> dict[str, jax.Array]:
    """Returns initial values at some paths alone."""

    def some(key: jax.Array) -> dict[str, jax.Array]:
        return {p: x for p, x in stack_form.flatten(mixture.initialize(key)).items() if p in paths}

    return jax.jit(some)(key)


def _is_equal(compared: Mapping[str, float | None]) -> bool | None:
    difference, largest = compared["max_abs_logit_difference"], compared["max_abs_logit"]
    if difference is None or largest is None:
        return None
    return difference <= _ROUNDING * largest
