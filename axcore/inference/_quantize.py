"""Quantizing a model directory for serving: the same model with weights and caches of few bits.

The result is a model directory like any other, whose config names the quantized products, with
``quantization.json`` beside it: what was done, how large it was and is, and how far logits moved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.checkpoint import check_new, stack_form
from axcore.config import Config, apply_modifier
from axcore.errors import CheckpointError
from axcore.inference._comparison import compare_logits, logits_inputs
from axcore.inference._model_dir import LoadedModel, load_model, tree_bytes, write_model
from axcore.module import Module
from axcore.quantization import Site, StoredDot, calibrate, find_sites, quantize_weight

__all__ = ["QUANTIZATION_RECORD", "quantize_directory", "quantize_state", "text_batches"]

QUANTIZATION_RECORD = "quantization.json"
_CALIBRATION_BATCH = 4
_CALIBRATION_LEN = 128


def quantize_directory(
    directory: str | Path,
    recipes: Sequence[Config],
    out: str | Path,
    *,
    data: str | Path | None = None,
    num_batches: int = 16,
    percentile: float | None = None,
    step: int | None = None,
    use_ema: bool = False,
    trusted: Iterable[str] = (),
) -> dict[str, Any]:
    """Writes a model directory with weights, activations or caches in few bits.

    Args:
        directory: The ``--out`` directory of ``axcore train`` or ``axcore convert``.
        recipes: Recipes' configs, applied in order; see
            :meth:`axcore.quantization.QuantizeModifier.recipe_config`.
        out: The directory to make.
        data: A text file to calibrate with, for recipes with static scales of activations.
        num_batches: Batches of 4 x 128 tokens to calibrate with, at most.
        percentile: Of the activations' magnitudes, in percent; None takes the largest.
        step: Another checkpoint than the newest.
        use_ema: Whether to take the learner's moving average of the parameters.
        trusted: Further packages that ``config.txt`` may name.

    Returns:
        ``products`` (how many are quantized), ``bytes_before``, ``bytes_after``, ``dropped`` (state
        of training recipes that serving has no use of), ``max_abs_logit_difference`` and
        ``next_token_agreement`` on the data or a fixed sequence (None for a model without
        ``logits``), ``calibrated`` (products with a static scale), ``step`` and ``out``.

    Raises:
        ConfigError: A recipe does not apply.
        CheckpointError: A recipe needs data to calibrate with and there is none (AX440), or ``out``
            exists or cannot be written.
    """
    out = Path(out)
    check_new(out)
    loaded = load_model(directory, step=step, use_ema=use_ema, trusted=trusted)
    cfg: Any = loaded.cfg.copy()
    for recipe in recipes:
        cfg = apply_modifier(cfg, recipe)
    model: Module = cfg.copy().instantiate(name="trainer").model
    static = {p: s for p, s in find_sites(model).items() if _is_static(s)}
    batches = None if data is None else list(text_batches(loaded, data, num_batches))
    amax: dict[str, float] = {}
    if static:
        if not batches:
            raise CheckpointError(
                f"{len(static)} products have a static scale of their activations, which is "
                "measured on data, and there is none",
                code="AX440",
                where=None if data is None else str(data),
                hint="give a text of at least 128 tokens with --data FILE",
            )
        inputs = (logits_inputs(loaded.model, ids) for ids in batches)
        amax = calibrate(
            loaded.cfg, loaded.state, inputs, static, percentile=percentile, method="logits"
        )
    state, dropped = quantize_state(loaded.model, loaded.state, model, amax)
    record = {
        "products": sum(isinstance(s.module, StoredDot) for s in find_sites(model).values()),
        "recipes": [recipe.to_text() for recipe in recipes],
        "bytes_before": tree_bytes(loaded.state),
        "bytes_after": tree_bytes(state),
        "dropped": dropped,
        "calibrated": len(amax),
        **compare_logits(
            (loaded.model, loaded.state), (model, state), batches[0] if batches else None
        ),
        "step": loaded.step,
    }
    write_model(out, cfg, state, like=loaded, records={QUANTIZATION_RECORD: record})
    return {**record, "out": str(out)}


def quantize_state(
    model: Module,
    state: Mapping[str, Any],
    quantized: Module,
    amax: Mapping[str, float] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the state of a quantized model, and what of the old one it has no use of.

    Args:
        model: The model with plain weights.
        state: Its state.
        quantized: The same model with :class:`axcore.quantization.StoredDot` in place of products;
            those that were there before keep their weights.
        amax: Magnitudes for static scales of activations, by path of the product.

    Raises:
        CheckpointError: The models differ in more than their products (AX441), or a weight that is
            stored in few bits would have to be stored otherwise (AX952).
    """
    flat = stack_form.canonical(stack_form.flatten(dict(state)))
    made = dict(flat)
    sites = find_sites(quantized)
    stored = {p: s.module for p, s in find_sites(model).items() if isinstance(s.module, StoredDot)}
    for path, old in stored.items():
        if path in sites and sites[path].module.cfg != old.cfg:
            raise CheckpointError(
                f"the weight of {path} is stored in few bits already, as {old.cfg.dtype}, which "
                "does not hold the numbers that it was made of",
                code="AX952",
                hint="quantize the directory that this one was made of",
            )
    for path, site in sites.items():
        if path in stored or not isinstance(site.module, StoredDot):
            continue
        weight = f"{path}/weight"
        q = _quantized(site)(flat[weight])
        made[weight], made[f"{site.state_path}/scale"] = q.values, q.scale
        if site.module.cfg.static:
            value = jnp.float32((amax or {})[path])
            made[f"{site.state_path}/activation_amax"] = value
    target = jax.tree.map(lambda spec: spec.struct(), quantized.parameter_specs())
    wanted = stack_form.flatten(target)
    found = stack_form.plan(made, wanted)
    if wrong := [*found.missing.values(), *found.reshaped]:
        raise CheckpointError(
            f"the quantized model has {wrong[0]!r}, which the model does not",
            code="AX441",
            hint="let recipes change products only",
        )
    leaves = [jnp.asarray(stack_form.assemble(found.recipes[path], made)) for path in wanted]
    return jax.tree.unflatten(jax.tree.structure(target), leaves), sorted(found.unexpected)


def _quantized(site: Site) -> Any:
    """Returns the compiled function that quantizes a site's weight."""
    module: Any = site.module
    summed = site.owner._specs["weight"].fan_in_dims
    return _compiled(summed[0], len(summed), module.cfg.dtype, module.group)


@functools.cache
def _compiled(num_before: int, num_in: int, dtype: str, group: int | None) -> Any:
    def quantized(weight: jax.Array) -> Any:
        return quantize_weight(weight, num_in, dtype, group)

    for _ in range(num_before):  # dims of groups, each of which has a matrix
        quantized = jax.vmap(quantized)
    return jax.jit(quantized)


def text_batches(loaded: LoadedModel, path: str | Path, num: int) -> Iterator[jax.Array]:
    """Yields int32 (4, length) token ids of a text, at most ``num`` batches.

    Raises:
        CheckpointError: The file cannot be read as UTF-8 text (AX440).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the data cannot be read: {error}", code="AX440", where=str(path)
        ) from error
    limit = getattr(loaded.model.cfg, "max_seq_len", None) or _CALIBRATION_LEN
    length = min(_CALIBRATION_LEN, limit)
    ids = np.asarray(loaded.tokenizer.encode(text), np.int32)
    rows = ids[: len(ids) // length * length].reshape(-1, length)
    for start in range(0, len(rows) - _CALIBRATION_BATCH + 1, _CALIBRATION_BATCH):
        if start >= num * _CALIBRATION_BATCH:
            return
        yield jnp.asarray(rows[start : start + _CALIBRATION_BATCH])


def _is_static(site: Site) -> bool:
    return isinstance(site.module, StoredDot) and site.module.cfg.static
