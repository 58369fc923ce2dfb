"""From a foreign model to a model directory, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np

import axcore
from axcore.checkpoint import check_new, new_directory
from axcore.checkpoint._stream import CheckpointWriter
from axcore.checkpoint.convert._evidence import compare
from axcore.checkpoint.convert._family import Settings, family_of
from axcore.checkpoint.convert._model import Parameter, check_count, initial_value, parameters
from axcore.checkpoint.convert._open import open_source
from axcore.checkpoint.convert._report import ConversionReport, MappedTensor, plain
from axcore.checkpoint.convert._rules import (
    Application,
    Matching,
    Rule,
    applications,
    match_tensors,
)
from axcore.checkpoint.convert._source import TensorSource, dtype_named
from axcore.errors import CheckpointError
from axcore.plugins import host

if TYPE_CHECKING:
    from axcore.data import BaseTokenizer

__all__ = ["Progress", "convert"]

_log = logging.getLogger("axcore.convert")

# Called with the bytes done, the bytes in all and the name of the tensor under way.
Progress = Callable[[int, int, str], None]
Verify = Literal["auto", "always", "never"]

_STEP = 0


def convert(
    source: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    family: str | None = None,
    dtype: str | None = None,
    tokenizer: BaseTokenizer | None = None,
    allow: Sequence[str] = (),
    allow_nan: bool = False,
    verify: Verify = "auto",
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes a foreign model as a model directory.

    Holds one tensor at a time. ``OUT`` appears when all is done, or not at all.

    Args:
        source: The model: see :func:`open_source`.
        out: The directory to write; it must not exist.
        format: ``hf``, ``gguf`` or ``npz``; None goes by the name.
        family: The converter; None goes by the architecture that the source states.
        dtype: Dtype of the parameters; ``"source"`` takes the one that most of the source's values
            have; None takes the family's, which is float32 unless it says otherwise.
        tokenizer: Takes the place of the source's.
        allow: Patterns of foreign tensors that may stay unused, and of parameters that may be
            missing.
        allow_nan: Whether values may be NaN or infinite.
        verify: Whether to run the source for comparison: ``auto`` does if the model has up to half
            a billion parameters.
        progress: Told of each tensor.

    Returns:
        What ``conversion.json`` holds.

    Raises:
        CheckpointError: The source is damaged, unknown or unsafe; tensors are left over or of other
            shapes; values are not finite; the outputs differ; or ``out`` cannot be written.
    """
    out = Path(out)
    check_new(out)
    with open_source(source, format) as opened:
        name, found = family_of(opened, family)
        settings = Settings(opened.config, str(opened.path))
        cfg = found.config(settings, opened.infos)
        chosen = _dtype(dtype, opened)
        if chosen is not None:
            cfg.model.set(param_dtype=chosen)
        made = found.tokenizer(opened) if tokenizer is None else tokenizer
        _place_tokenizer(cfg, made, out)
        trainer = cfg.instantiate(name="trainer")
        check_count(trainer, len(opened.infos), str(opened.path))
        params = parameters(trainer)
        matching = _matched(found.rules(trainer.cfg), params, opened, allow)
        size = sum(int(np.prod(p.shape)) * dtype_named(p.dtype).itemsize for p in params.values())
        _log.info("converting %d tensors as %s", len(opened.infos), name)
        with new_directory(out, size_bytes=size) as partial:
            work = _Import(opened, params, matching, allow_nan, progress)
            work.run(partial / "checkpoints", cfg.to_text())
            (partial / "config.txt").write_text(cfg.to_text(), encoding="utf-8")
            if made is not None:
                made.save(partial / "tokenizer")
            else:
                _log.warning(
                    "the source has no tokenizer that could be read: none was written, and text "
                    "cannot be generated (--tokenizer gives one)"
                )
            comparison = compare(
                found,
                opened,
                trainer,
                partial / "checkpoints",
                step=_STEP,
                tokenizer=made,
                verify=verify,
            )
            report = ConversionReport(
                direction="import",
                source=_described(opened),
                out=str(out),
                family={"name": name, "distribution": host().converters.owner(name)},
                dtype=chosen,
                mapped=tuple(work.mapped),
                initialized=work.initialized,
                unmapped=matching.unmapped,
                unused=matching.unused,
                tied=matching.tied,
                ignored=matching.ignored,
                not_finite=tuple(work.not_finite),
                allow=tuple(allow),
                settings=dict(opened.config),
                settings_unread=settings.unread(),
                generation_config=opened.metadata.get("generation_config"),
                tokenizer=_tokenizer_facts(made),
                comparison=comparison,
            )
            _write_reports(partial, report, trainer)
    return report


def _matched(
    rules: Sequence[Rule],
    params: Mapping[str, Parameter],
    source: TensorSource,
    allow: Sequence[str],
) -> Matching:
    shapes = {path: parameter.spec.valid_shape for path, parameter in params.items()}
    # States that no rule names keep their initial values.
    named = {path for item in applications(rules, shapes) for path in item.paths}
    return match_tensors(
        rules,
        {p: s for p, s in shapes.items() if p in named or params[p].spec.kind == "parameter"},
        source.infos,
        allow=allow,
        where=str(source.path),
    )


class _Import:
    """Writes the checkpoint of one conversion."""

    def __init__(
        self,
        source: TensorSource,
        params: dict[str, Parameter],
        matching: Matching,
        allow_nan: bool,
        progress: Progress | None,
    ):
        self._source, self._params, self._matching = source, params, matching
        self._allow_nan, self._progress = allow_nan, progress
        self.mapped: list[MappedTensor] = []
        self.initialized: dict[str, str] = {}
        self.not_finite: dict[str, None] = {}

    def run(self, root: Path, config_text: str) -> None:
        """Writes all arrays."""
        arrays = {
            f"model/{path}": jax.ShapeDtypeStruct(p.shape, dtype_named(p.dtype))
            for path, p in self._params.items()
        }
        extra = {"converted": str(self._source.path), "config": config_text}
        writer = CheckpointWriter(root, _STEP, arrays, extra)
        self._check_tied()
        total, done = self._source.size_bytes, 0
        for item in self._matching.applications:
            if self._progress is not None:
                self._progress(done, total, ", ".join(item.foreign or item.paths))
            self._apply(item, writer)
            done += sum(self._source.infos[name].size_bytes for name in item.foreign)
        made = {path for item in self._matching.applications for path in item.paths}
        for path, parameter in self._params.items():
            if path not in made:
                writer.write(f"model/{path}", initial_value(path, parameter))
                is_state = parameter.spec.kind == "state"
                self.initialized[path] = (
                    "a state of the model" if is_state else "allowed to be missing"
                )
        writer.commit()
        if self._progress is not None:
            self._progress(total, total, "")

    def _apply(self, item: Application, writer: CheckpointWriter) -> None:
        foreign = _Foreign(self._source, item.foreign, lambda n, d: self._check_kind(n, d, item))
        if item.foreign:
            ours = item.transform.to_ours(foreign, item.shapes)
        else:
            fill = np.float32(item.rule.default)
            ours = [np.broadcast_to(fill, shape) for shape in item.shapes]
        sums: list[str] = []
        for path in item.paths:
            array = self._params[path].padded(ours.pop(0))
            check = _Finite(self, path, item.foreign, self._params[path].dtype)
            sums.append(writer.write(f"model/{path}", array, check))
            del array
        infos = [self._source.infos[name] for name in item.foreign]
        self.mapped.append(
            MappedTensor(
                foreign=item.foreign,
                path=item.paths,
                transform=repr(item.transform) if item.foreign else f"all {item.rule.default}",
                foreign_shapes=tuple(info.shape for info in infos),
                foreign_dtypes=tuple(info.dtype for info in infos),
                foreign_sha256=foreign.sha256(),
                shapes=item.shapes,
                dtypes=tuple(self._params[path].dtype for path in item.paths),
                sha256=tuple(sums),
            )
        )

    def _check_kind(self, name: str, dtype: np.dtype, item: Application) -> None:
        """Whole numbers and booleans in a parameter's place are codes of something else."""
        wanted = self._params[item.paths[0]].dtype
        if dtype.kind in "biu" and dtype_named(wanted).kind not in "biu":
            raise CheckpointError(
                f"tensor {name!r} holds {dtype.name}, expected floating-point numbers for "
                f"{item.paths[0]}",
                code="AX624",
                where=str(self._source.path),
                hint="quantized weights need a converter that knows their scales",
            )

    def _check_tied(self) -> None:
        """Tensors that are said to repeat others must do so."""
        for name, other in self._matching.tied.items():
            sums = []
            for each in (name, other):
                digest = hashlib.sha256()
                self._source.read(each, digest)
                sums.append(digest.hexdigest())
            if sums[0] != sums[1]:
                raise CheckpointError(
                    f"{name} should repeat {other} (the settings tie them), and does not",
                    code="AX615",
                    where=str(self._source.path),
                    hint="the settings are of another model",
                )

    def found_not_finite(self, path: str, foreign: Iterable[str], dtype: str) -> None:
        """Records a parameter with a value that is not finite; raises unless that is allowed."""
        if not self._allow_nan:
            raise CheckpointError(
                f"{', '.join(foreign) or path} has values that are NaN or infinite"
                + (f", as {dtype}" if dtype in ("float16", "float8_e4m3fn") else ""),
                code="AX617",
                where=str(self._source.path),
                hint="the file is damaged, or the dtype too narrow; --allow-nan takes them as "
                "they are",
            )
        self.not_finite[path] = None


class _Foreign(Sequence[np.ndarray]):
    """A rule's foreign arrays, each read when a transform asks for it and then let go.

    The experts of a layer are many of them, and the array that they become is there as well.
    """

    def __init__(
        self,
        source: TensorSource,
        names: tuple[str, ...],
        check: Callable[[str, np.dtype[Any]], None],
    ):
        self._source, self._names, self._check = source, names, check
        self._sums: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        name = self._names[index]
        digest = hashlib.sha256()
        array = self._source.read(name, digest)
        self._sums[name] = digest.hexdigest()
        self._check(name, array.dtype)
        return array

    def sha256(self) -> tuple[str, ...]:
        """Returns the sha256 of each array as it is stored, in hexadecimal."""
        for index, name in enumerate(self._names):
            if name not in self._sums:  # the transform does without it
                self[index]
        return tuple(self._sums[name] for name in self._names)


class _Finite:
    """Looks for values that are not finite, part by part."""

    def __init__(self, work: _Import, path: str, foreign: tuple[str, ...], dtype: str):
        self._work, self._path, self._foreign, self._dtype = work, path, foreign, dtype
        self._skip = np.dtype(dtype_named(dtype)).kind in "iub"

    def __call__(self, values: np.ndarray) -> None:
        if not self._skip and not np.isfinite(values).all():
            self._work.found_not_finite(self._path, self._foreign, self._dtype)


def _dtype(asked: str | None, source: TensorSource) -> str | None:
    """The dtype of the parameters, or None for the family's own."""
    if asked == "source":
        counts: dict[str, int] = {}
        for info in source.infos.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.num_values
        most = max(counts, key=lambda name: counts[name], default="float32")
        most = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(most, most)
        return most if most in ("float32", "float16", "bfloat16") else "float32"
    if asked is not None and asked not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(
            f"the dtype {asked!r} is not known; known: float32, float16, bfloat16, source",
            code="AX614",
        )
    return asked


def _place_tokenizer(cfg: Any, tokenizer: BaseTokenizer | None, out: Path) -> None:
    """Lets the experiment's input use the tokenizer, from where it will be saved."""
    if tokenizer is None or "tokenizer" not in cfg.input.fields():
        return
    stated = tokenizer.cfg.copy()
    if "path" in stated.fields():
        stated.set(path=str((out / "tokenizer").absolute()))
    cfg.input.set(tokenizer=stated)


def _described(source: TensorSource) -> dict[str, Any]:
    root = source.path if source.path.is_dir() else source.path.parent
    return {
        "path": str(source.path),
        "format": source.format,
        "architecture": source.architecture,
        "files": [{"name": n, "size_bytes": (root / n).stat().st_size} for n in source.files],
        "tensors": len(source.infos),
        "size_bytes": source.size_bytes,
    }


def _tokenizer_facts(tokenizer: BaseTokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    return {
        "class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
    }


def _write_reports(partial: Path, report: ConversionReport, trainer: Any) -> None:
    cfg = trainer.cfg
    summary = {
        "step": _STEP,
        "loss": None,
        "converted_from": report.source,
        "family": dict(report.family),
        "num_parameters": sum(int(np.prod(s)) for m in report.mapped for s in m.shapes),
        "max_abs_logit_difference": report.comparison.max_abs_difference,
        "seq_len": cfg.seq_len,
        "axcore": axcore.__version__,
        "plugins": {r.distribution: r.version for r in host().active_records()},
    }
    for name, value in (("conversion", report.to_json()), ("report", summary)):
        text = json.dumps(plain(value), indent=1) + "\n"
        (partial / f"{name}.json").write_text(text, encoding="utf-8")
