"""Adapters on the disk: merging a model directory, exporting adapters, attaching them to a base.

An adapter directory is small and stands alone::

    DIR/adapter.json   which layers, with which adapter; dtypes, shapes, the base's digest
    DIR/adapter.npz    what training changed, one array per layer: the trained parameters, and
                       state that steps set, such as the balance of a router
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.checkpoint import check_new, new_directory, stack_form
from axcore.config import Config
from axcore.errors import CheckpointError, ConfigError
from axcore.inference import LoadedModel, compare_logits, load_model, write_model
from axcore.layers import PipelinedTransformer, RepeatedTransformer, StackedTransformer
from axcore.layers.lora import LowRankAdapter
from axcore.peft._attach import attach, linear_paths
from axcore.peft._merge import merge_state, plain_config
from axcore.plugins import host

__all__ = ["attach_adapter", "export_adapter", "merge_adapter"]

_log = logging.getLogger("axcore.peft")

_FORMAT = "axcore-adapter"
_VERSION = 1
_RECORD, _ARRAYS = "adapter.json", "adapter.npz"
_ZIP_OVERHEAD = 4096  # the header of one array in the archive


def merge_adapter(
    directory: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    trusted: Iterable[str] = (),
) -> dict[str, Any]:
    """Writes a plain model directory that computes what the adapted model does.

    Args:
        directory: The ``--out`` directory of a run with adapters.
        out: The directory to make.
        step: Another checkpoint than the newest.
        trusted: Further packages that ``config.txt`` may name.

    Returns:
        ``adapters`` (their number, one per layer), ``max_abs_logit_difference`` on a fixed
        sequence (None for a model without ``logits``), ``step`` and ``out``.

    Raises:
        CheckpointError: The model has no adapters (AX660), or ``out`` exists or cannot be written.
    """
    out = Path(out)
    check_new(out)
    loaded = load_model(directory, step=step, trusted=trusted)
    cfg = plain_config(loaded.cfg)
    plain = cfg.instantiate(name="trainer").model
    state = merge_state(loaded.model, loaded.state, plain)
    compared = compare_logits((loaded.model, loaded.state), (plain, state))
    write_model(out, cfg, state, like=loaded)
    return {
        "adapters": len(_adapters(loaded)),
        "max_abs_logit_difference": compared["max_abs_logit_difference"],
        "step": loaded.step,
        "out": str(out),
    }


def export_adapter(
    directory: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    trusted: Iterable[str] = (),
) -> dict[str, Any]:
    """Writes what a run with adapters has trained, and nothing of its base.

    Args:
        directory: The ``--out`` directory of a run with adapters.
        out: The directory to make.
        step: Another checkpoint than the newest.
        trusted: Further packages that ``config.txt`` may name.

    Returns:
        ``adapters``, ``tensors``, ``size_bytes``, ``step`` and ``out``.

    Raises:
        CheckpointError: The model has no adapters (AX660), or ``out`` exists or cannot be written.
    """
    out = Path(out)
    check_new(out)
    loaded = load_model(directory, step=step, trusted=trusted)
    adapters = _adapters(loaded)
    if not adapters:
        raise CheckpointError(
            "the model has no adapters to export",
            code="AX660",
            where=str(directory),
            hint="train it with --modifier lora or --modifier dora first",
        )
    specs = loaded.model.parameter_specs()
    changed = set(_changed_shapes(loaded.trainer.learner, specs))
    leaves = _by_layer(loaded.state)
    arrays = {path: np.asarray(x) for path, x in leaves.items() if path in changed}
    kinds: dict[str, list[str]] = {}
    for path, text in adapters.items():
        kinds.setdefault(text, []).append(path)
    record = {
        "format": _FORMAT,
        "version": _VERSION,
        "adapters": [{"config": text, "layers": paths} for text, paths in kinds.items()],
        "frozen_params": list(loaded.cfg.learner.frozen_params),
        "base": _digest({path: x for path, x in leaves.items() if path not in changed}),
        "tensors": {p: {"dtype": x.dtype.name, "shape": x.shape} for p, x in arrays.items()},
        "step": loaded.step,
    }
    size = sum(x.nbytes for x in arrays.values())
    with new_directory(out, size_bytes=size) as partial:
        (partial / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        with (partial / _ARRAYS).open("wb") as file:
            named: dict[str, Any] = {p.replace("/", "."): _plain(x) for p, x in arrays.items()}
            np.savez(file, **named)
    return {
        "adapters": len(adapters),
        "tensors": len(arrays),
        "size_bytes": size,
        "step": loaded.step,
        "out": str(out),
    }


def attach_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    allow_other_base: bool = False,
    trusted: Iterable[str] = (),
) -> dict[str, Any]:
    """Writes the model directory of a base with exported adapters.

    Args:
        base: A model directory without adapters.
        adapter: What :func:`export_adapter` has written.
        out: The directory to make.
        allow_other_base: Whether the base's weights may be others than those trained on.
        trusted: Further packages that the texts may name.

    Returns:
        ``adapters``, ``tensors``, ``same_base`` and ``out``.

    Raises:
        CheckpointError: No adapter directory, or a damaged one (AX661), it belongs to another model
            (AX662) or other weights (AX663), or ``out`` exists or cannot be written.
    """
    out, adapter = Path(out), Path(adapter)
    check_new(out)
    trusted = tuple(trusted)
    record = _read_record(adapter)
    loaded = load_model(base, trusted=trusted)
    cfg = loaded.cfg.copy()
    kinds = {
        layer: _adapter_config(kind["config"], adapter, trusted)
        for kind in record["adapters"]
        for layer in kind["layers"]
    }
    absent = [layer for layer in kinds if layer not in linear_paths(loaded.model)]
    if absent:
        raise _another_model(adapter, f"the base has no linear layer {absent[0]!r}")
    cfg = _with_adapters(cfg, kinds)
    cfg.learner.set(frozen_params=tuple(record["frozen_params"]))
    trainer: Any = cfg.instantiate(name="trainer")
    specs = trainer.model.parameter_specs()
    arrays = _read_arrays(adapter, record, _changed_shapes(trainer.learner, specs))
    state = _by_layer(loaded.state) | arrays
    restacked = _like(state, jax.tree.map(lambda spec: spec.struct(), specs), adapter)
    frozen = {path: x for path, x in _by_layer(restacked).items() if path not in arrays}
    same = _digest(frozen) == record["base"]
    if not (same or allow_other_base):
        raise CheckpointError(
            "the adapters were trained on other weights than the base has",
            code="AX663",
            where=str(adapter),
            hint="name the base they were trained on, or allow another with --allow-other-base",
        )
    write_model(out, cfg, restacked, like=loaded)
    return {
        "adapters": len(kinds),
        "tensors": len(arrays),
        "same_base": same,
        "out": str(out),
    }


def _with_adapters(cfg: Any, kinds: Mapping[str, LowRankAdapter.Config]) -> Any:
    """Returns the config with adapters, its layers unrolled when they come to differ."""
    scanned = cfg.copy()
    try:
        attach(scanned, kinds.get)
    except ConfigError as error:
        if error.code != "AX364":
            raise
        _log.info("the adapters differ by layer: the layers of the result run one by one")
        for scan in (RepeatedTransformer.Config, PipelinedTransformer.Config):
            cfg.replace(scan, StackedTransformer.Config(), allow_none=True)
        attach(cfg, kinds.get)
        return cfg
    return scanned


# -- what there is ---------------------------------------------------------------------------


def _adapters(loaded: LoadedModel) -> dict[str, str]:
    """Returns the text of each adapter by the path of the layer that it adapts."""
    found: dict[str, str] = {}
    for path, module in linear_paths(loaded.model).items():
        dot = module.children.get("dot")
        if isinstance(dot, LowRankAdapter):
            node: Any = loaded.cfg.get_path(f"{module.config_path}.dot")
            found[path] = node.to_text()
    return found


def _by_layer(tree: Any) -> dict[str, Any]:
    return stack_form.canonical(stack_form.flatten(tree))


def _changed_shapes(learner: Any, specs: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what training changes, by per-layer paths: parameters, and state that steps set."""
    trained = jax.tree.map(lambda spec: spec.struct(), dict(learner.trainable_specs(specs)))
    state = {
        path: spec.struct()
        for path, spec in stack_form.flatten(specs).items()
        if spec.kind == "state" and not spec.fixed
    }
    return _by_layer(trained) | stack_form.canonical(state)


def _digest(leaves: Mapping[str, Any]) -> str:
    """Returns a hash of all arrays by their per-layer paths."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(leaves):
        array = np.asarray(leaves[path])
        digest.update(f"{path} {array.dtype.name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).tobytes())
    return digest.hexdigest()


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns the bits of an array in a dtype that the archive format knows."""
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}")


# -- reading -------------------------------------------------------------------------------


def _damaged(adapter: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"this is no adapter directory: {reason}",
        code="AX661",
        where=str(adapter),
        hint="name a directory that `axcore peft export` has written",
    )


def _another_model(adapter: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the adapters are for another model: {reason}",
        code="AX662",
        where=str(adapter),
        hint="name the base that they were trained on",
    )


def _read_record(adapter: Path) -> dict[str, Any]:
    try:
        record = json.loads((adapter / _RECORD).read_text(encoding="utf-8"))
        complete = record["format"] == _FORMAT and isinstance(record["tensors"], dict)
        kinds = [(kind["config"], *kind["layers"]) for kind in record["adapters"]]
        strings = (*record["frozen_params"], record["base"], *(t for kind in kinds for t in kind))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(adapter, f"{_RECORD} cannot be read ({error})") from error
    if not complete or not all(isinstance(text, str) for text in strings):
        raise _damaged(adapter, f"{_RECORD} is of another format")
    if record.get("version") != _VERSION:
        raise _damaged(adapter, f"version {record.get('version')!r}, this reads {_VERSION}")
    return record


def _adapter_config(text: str, adapter: Path, trusted: Iterable[str]) -> LowRankAdapter.Config:
    try:
        cfg = Config.from_text(text, trusted=(*host().trusted_packages(), *trusted), fill_in=True)
    except ConfigError as error:
        raise _damaged(adapter, f"an adapter's config cannot be read: {error.message}") from error
    if not isinstance(cfg, LowRankAdapter.Config):
        raise _damaged(adapter, f"it names a {type(cfg).__qualname__} as an adapter")
    return cfg


def _read_arrays(
    adapter: Path, record: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
    """Reads what training changed, each of the shape that the model states."""
    if set(wanted) != set(record["tensors"]):
        different = sorted(set(wanted) ^ set(record["tensors"]))
        raise _another_model(adapter, f"they differ in {different[0]!r}")
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(adapter / _ARRAYS) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        # Without pickle, and nothing larger than what the model asks for.
        with np.load(adapter / _ARRAYS, allow_pickle=False) as archive:
            for path, want in wanted.items():
                name = path.replace("/", ".")
                dtype = jnp.dtype(record["tensors"][path]["dtype"])
                limit = math.prod(want.shape) * dtype.itemsize + _ZIP_OVERHEAD
                if sizes.get(f"{name}.npy", limit + 1) > limit:
                    raise _another_model(adapter, f"{path!r} is absent or too large")
                array = archive[name]
                if array.dtype != dtype:
                    array = array.view(dtype)
                if array.shape != want.shape:
                    reason = f"{path!r} is {list(array.shape)}, expected {list(want.shape)}"
                    raise _another_model(adapter, reason)
                arrays[path] = array.astype(want.dtype)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(adapter, f"{_ARRAYS} cannot be read ({error})") from error
    return arrays


def _like(state: Mapping[str, Any], target: Any, adapter: Path) -> Any:
    """Returns arrays by per-layer path as a tree like ``target``."""
    wanted = stack_form.flatten(target)
    found = stack_form.plan(state, wanted)
    for path in (*found.missing.values(), *found.reshaped, *found.unexpected):
        raise _another_model(adapter, f"they differ in {path!r}")
    made = [jnp.asarray(stack_form.assemble(found.recipes[path], state)) for path in wanted]
    return jax.tree.unflatten(jax.tree.structure(target), made)
