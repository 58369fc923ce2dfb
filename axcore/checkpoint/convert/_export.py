"""From a model directory to a foreign model, tensor by tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from axcore.checkpoint import check_new, new_directory
from axcore.checkpoint._stream import cast
from axcore.checkpoint.convert._engine import Progress
from axcore.checkpoint.convert._evidence import compare
from axcore.checkpoint.convert._family import ModelFamily, load_family
from axcore.checkpoint.convert._huggingface import SafetensorsSource
from axcore.checkpoint.convert._model import Parameter, SavedModel, parameters
from axcore.checkpoint.convert._report import ConversionReport, MappedTensor, plain
from axcore.checkpoint.convert._rules import Application, applications
from axcore.checkpoint.convert._safetensors import header_bytes
from axcore.checkpoint.convert._source import dtype_named
from axcore.config import Config, author
from axcore.errors import CheckpointError
from axcore.plugins import host
from axcore.quantization import StoredDot, find_sites

if TYPE_CHECKING:
    from axcore.data import BaseTokenizer
    from axcore.train import RunDir, Trainer

__all__ = ["export"]

_BLOCK_BYTES = 1 << 25
# What other libraries read of a tokenizer's directory besides what the tokenizer says itself.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


@dataclasses.dataclass(frozen=True)
class _Target:
    """One foreign tensor to write: where it stands."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int


def export(
    directory: str | Path,
    out: str | Path,
    *,
    format: str = "hf",
    family: str | None = None,
    dtype: str | None = None,
    step: int | None = None,
    max_shard_bytes: int = 5_000_000_000,
    verify: str = "auto",
    trusted: Iterable[str] = (),
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes a model directory in the Hugging Face layout.

    Holds one tensor at a time. ``OUT`` appears when all is done, or not at all.

    Args:
        directory: The model directory.
        out: The directory to write; it must not exist.
        format: ``hf``.
        family: The converter; None takes the one the directory was converted with, or the only one
            whose ``foreign_config`` accepts the config.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None keeps what is stored.
        step: The checkpoint; None takes the newest good one.
        max_shard_bytes: Size from which the tensors are split over several files.
        verify: As for :func:`~axcore.checkpoint.convert.convert`.
        trusted: Further packages that ``config.txt`` may name.
        progress: Told of each tensor.

    Returns:
        What ``conversion.json`` holds.

    Raises:
        CheckpointError: No converter can export it (AX622), its weights are stored in few bits
            (AX975), or ``out`` cannot be written.
        TrainError: It is no model directory.
    """
    from axcore.train import RunDir

    if format != "hf":
        raise CheckpointError(f"cannot export {format!r}; known: hf", code="AX622")
    out = Path(out)
    check_new(out)
    run = RunDir(directory)
    text = run.require_model()
    with author("file", str(run.config)):
        cfg: Any = Config.from_text(text, trusted=(*host().trusted_packages(), *trusted))
    trainer = cfg.instantiate(name="trainer")
    earlier = _earlier(run.conversion)
    name, found, settings = _family(trainer.cfg, family, earlier, format, str(run.root))
    _check_plain(trainer.model, str(run.root))
    params = parameters(trainer)
    items = applications(
        found.rules(trainer.cfg), {p: x.spec.valid_shape for p, x in params.items()}
    )
    _check_complete(items, params, str(run.root))
    targets, heads = _layout(items, params, dtype, max_shard_bytes)
    size = sum(math.prod(t.shape) * dtype_named(t.dtype).itemsize for t in targets.values())
    with (
        _saved(trainer, run, params, step) as saved,
        new_directory(out, size_bytes=size) as partial,
    ):
        mapped = _write_tensors(partial, items, targets, heads, saved, params, progress)
        stored = next(iter(targets.values())).dtype if targets else "float32"
        tokenizer = _tokenizer(run.tokenizer, tuple(trusted))
        files, generation = _write_tokenizer(partial, run.tokenizer, tokenizer, earlier)
        _write_settings(partial, found, settings, stored, generation or {})
        with SafetensorsSource(partial) as written:
            comparison = compare(
                found,
                written,
                trainer,
                run.checkpoints,
                step=saved.step,
                tokenizer=tokenizer,
                verify=verify,
            )
        report = ConversionReport(
            direction="export",
            source={"path": str(run.root), "format": "axcore", "step": saved.step},
            out=str(out),
            family={"name": name, "distribution": host().converters.owner(name)},
            dtype=dtype,
            mapped=tuple(mapped),
            initialized={},
            unmapped=(),
            unused=(),
            tied={},
            ignored={},
            not_finite=(),
            allow=(),
            settings=settings,
            settings_unread=(),
            generation_config=generation,
            tokenizer={"files": files} if files else None,
            comparison=comparison,
        )
        _write_json(partial / "conversion.json", report.to_json())
    return report


@contextlib.contextmanager
def _saved(
    trainer: Trainer, run: RunDir, params: dict[str, Parameter], step: int | None
) -> Iterator[SavedModel]:
    """The checkpoint of a step, open; None is the newest good one."""
    checkpointer = trainer.cfg.checkpointer.instantiate()
    checkpointer.open(run.checkpoints)
    try:
        chosen = checkpointer.latest_good() if step is None else step
        if chosen is None:
            raise CheckpointError(
                "there is no good checkpoint", code="AX605", where=str(run.checkpoints)
            )
        yield SavedModel(checkpointer, chosen, params, str(run.root))
    finally:
        checkpointer.close()


def _family(
    cfg: Any, asked: str | None, earlier: Mapping[str, Any], format: str, where: str
) -> tuple[str, ModelFamily, dict[str, Any]]:
    """The converter and the foreign settings of a config."""
    known = [n for n in host().converters.names() if n.startswith(f"{format}:")]
    before = earlier.get("family", {}).get("name", "")
    names = known
    if asked is not None:
        full = asked if ":" in asked else f"{format}:{asked}"
        family = load_family(full)
        return full, family, family.foreign_config(cfg)
    if before in known:
        names = [before]
    refusals: list[str] = []
    fitting: list[tuple[str, ModelFamily, dict[str, Any]]] = []
    for name in names:
        family = load_family(name)
        try:
            fitting.append((name, family, family.foreign_config(cfg)))
        except CheckpointError as error:
            refusals.append(f"{name}: {error.message}")
    able = {family.architecture for _, family, _ in fitting}
    fitting = [item for item in fitting if able.isdisjoint(item[1].yields_to)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CheckpointError(
            f"several converters can export it: {', '.join(n for n, _, _ in fitting)}",
            code="AX622",
            where=where,
            hint="name one with --family",
        )
    raise CheckpointError(
        "no converter can export it: " + ("; ".join(refusals) or "there is none for " + format),
        code="AX622",
        where=where,
        hint="name one with --family",
    )


def _check_plain(model: Any, where: str) -> None:
    """Weights in few bits mean nothing without their scales, which have no foreign name."""
    stored = [p for p, site in find_sites(model).items() if isinstance(site.module, StoredDot)]
    if stored:
        raise CheckpointError(
            f"{len(stored)} weights are stored in few bits, such as that of {stored[0]}",
            code="AX975",
            where=where,
            hint="export the directory that it was quantized from",
        )


def _check_complete(
    items: Sequence[Application], params: Mapping[str, Parameter], where: str
) -> None:
    """Every parameter must have a foreign name, and every foreign name one origin."""
    made = {path for item in items for path in item.paths}
    left = [p for p, x in params.items() if p not in made and x.spec.kind == "parameter"]
    if left:
        raise CheckpointError(
            f"the foreign format has no place for {len(left)} parameters: {', '.join(left[:8])}",
            code="AX615",
            where=where,
            hint="merge the adapters first: axcore peft merge"
            if all("/lora_" in path for path in left)
            else "the model has something that its family does not",
        )
    seen: dict[str, Application] = {}
    for item in items:
        for name in item.foreign:
            if name in seen:
                raise CheckpointError(
                    f"{name} would be made twice, of {seen[name].paths[0]} and {item.paths[0]}",
                    code="AX621",
                    where=where,
                )
            seen[name] = item


def _layout(
    items: Sequence[Application],
    params: Mapping[str, Parameter],
    dtype: str | None,
    max_shard_bytes: int,
) -> tuple[dict[str, _Target], dict[str, bytes]]:
    """Where every foreign tensor will stand, and the header of every file."""
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"the dtype {dtype!r} is not known; known: float32, bfloat16, float16", code="AX614"
        )
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for item in items:
        stored = params[item.paths[0]].dtype
        shapes = item.transform.foreign_shapes(item.shapes)
        tensors += [(n, dtype or stored, s) for n, s in zip(item.foreign, shapes, strict=True)]
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor[2]) * dtype_named(tensor[1]).itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    count = len(shards)
    targets: dict[str, _Target] = {}
    heads: dict[str, bytes] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if count > 1:
            file = f"model-{number:05}-of-{count:05}.safetensors"
        heads[file], offsets = header_bytes(shard)
        for (name, kind, shape), offset in zip(shard, offsets, strict=True):
            targets[name] = _Target(name, shape, kind, file, offset)
    return targets, heads


def _write_tensors(
    root: Path,
    items: Sequence[Application],
    targets: Mapping[str, _Target],
    heads: Mapping[str, bytes],
    saved: SavedModel,
    params: Mapping[str, Parameter],
    progress: Progress | None,
) -> list[MappedTensor]:
    mapped: list[MappedTensor] = []
    total, done = len(items), 0
    files: dict[str, BinaryIO] = {}
    try:
        for name, head in heads.items():
            files[name] = open(root / name, "wb")
            files[name].write(head)
        for item in items:
            if progress is not None:
                progress(done, total, ", ".join(item.foreign))
            ours = [params[path].stripped(saved.read(path)) for path in item.paths]
            sums = [_digest(array) for array in ours]
            foreign = item.transform.to_foreign(ours)
            del ours
            hashes = []
            for name in item.foreign:
                target = targets[name]
                hashes.append(_write_tensor(files[target.file], target, foreign.pop(0)))
            mapped.append(
                MappedTensor(
                    foreign=item.foreign,
                    path=item.paths,
                    transform=repr(item.transform),
                    foreign_shapes=tuple(targets[n].shape for n in item.foreign),
                    foreign_dtypes=tuple(targets[n].dtype for n in item.foreign),
                    foreign_sha256=tuple(hashes),
                    shapes=item.shapes,
                    dtypes=tuple(params[p].dtype for p in item.paths),
                    sha256=tuple(sums),
                )
            )
            done += 1
        if progress is not None:
            progress(total, total, "")
    finally:
        for file in files.values():
            file.close()
    if len(heads) > 1:
        size = sum(math.prod(t.shape) * dtype_named(t.dtype).itemsize for t in targets.values())
        index = {
            "metadata": {"total_size": size},
            "weight_map": {name: target.file for name, target in sorted(targets.items())},
        }
        _write_json(root / "model.safetensors.index.json", index)
    return mapped


def _write_tensor(file: BinaryIO, target: _Target, array: np.ndarray) -> str:
    """Writes a tensor at its place, block by block; returns the sha256 of its bytes."""
    file.seek(target.offset)
    digest = hashlib.sha256()
    for data in _blocks(array, dtype_named(target.dtype), target.name):
        digest.update(data)
        file.write(data)
    return digest.hexdigest()


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256()
    for data in _blocks(array, array.dtype, ""):
        digest.update(data)
    return digest.hexdigest()


def _blocks(array: np.ndarray, dtype: np.dtype[Any], name: str) -> Iterable[memoryview]:
    """The bytes of an array in C order, converted, some rows at a time."""
    rows = array if array.ndim else array.reshape(1)
    row_bytes = max(1, math.prod(rows.shape[1:]) * dtype.itemsize)
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        values = cast(part, dtype)
        narrower = values.dtype != array.dtype and dtype.kind not in "iub"
        if narrower and np.isfinite(part).all() and not np.isfinite(values).all():
            raise CheckpointError(
                f"{name} has values that {dtype.name} cannot hold",
                code="AX617",
                hint="export with --dtype float32 or bfloat16",
            )
        yield values.reshape(-1).view(np.uint8).data


def _write_settings(
    root: Path,
    family: ModelFamily,
    settings: Mapping[str, Any],
    dtype: str,
    generation: Mapping[str, Any],
) -> None:
    made = {"architectures": [family.architecture], **settings}
    if generation:
        # Left out, the ids would be the defaults of the foreign class.
        for name in ("bos_token_id", "eos_token_id"):
            made.setdefault(name, generation.get(name))
    # Older versions of transformers know the first name only, newer ones prefer the second.
    made.setdefault("torch_dtype", dtype)
    _write_json(root / "config.json", made)


def _write_tokenizer(
    root: Path, directory: Path, tokenizer: BaseTokenizer | None, earlier: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any] | None]:
    """Writes what other libraries read; returns the names and the generation settings."""
    found = {} if tokenizer is None else dict(tokenizer.foreign_files())
    found.pop("generation_config.json", None)
    for name in _TOKENIZER_FILES:
        if name not in found and (directory / name).is_file():
            found[name] = (directory / name).read_bytes()
    for name, content in found.items():
        (root / name).write_bytes(content)
    generation = earlier.get("generation_config")
    if generation is None and (directory / "generation_config.json").is_file():
        generation = json.loads((directory / "generation_config.json").read_text("utf-8"))
    if generation is None and (directory / "axcore_tokenizer.json").is_file():
        record = json.loads((directory / "axcore_tokenizer.json").read_text("utf-8"))
        ids = {f"{n}_token_id": record.get(f"{n}_id") for n in ("bos", "eos", "pad")}
        generation = {key: value for key, value in ids.items() if value is not None}
    if generation:
        _write_json(root / "generation_config.json", generation)
    return sorted(found), generation


def _tokenizer(directory: Path, trusted: tuple[str, ...]) -> Any:
    from axcore.data import load_tokenizer

    if not directory.is_dir():
        return None
    return load_tokenizer(directory, trusted=(*host().trusted_packages(), *trusted))


def _earlier(path: Path) -> dict[str, Any]:
    """What the directory's own ``conversion.json`` says; empty when it was trained."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", code="AX610", where=str(path)) from error
    return value if isinstance(value, dict) else {}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(plain(value), indent=2) + "\n", encoding="utf-8")
