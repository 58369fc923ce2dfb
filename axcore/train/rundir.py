"""The directory of a run, which is also the model directory that other commands read.

::

    OUT/config.txt  provenance.json  checkpoints/STEP/  tokenizer/  metrics.jsonl
    OUT/plots/loss.png  tensorboard/  report.json  conversion.json (if converted)

``config.txt`` is written first and decides what the directory is. A run resumes when its config
text equals the stored one. What may differ:

* *hardware* (mesh, sharding rules, kernels, compiler options, remat, accumulation) and *watching*
  (checkpointer, writers, evalers, callbacks, logging): noted, and the run resumes, since neither
  changes what is learned;
* the *horizon* ``max_step``: it may be raised when asked for (``--extend``), since learning-rate
  schedules that follow it continue on the new, longer curve and the run is then no longer the one
  that was first configured;
* anything else makes it another experiment: an error that shows the differences.

Where a start ended before its first step there is nothing to lose: any config takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axcore._files import atomic_write, locked
from axcore.config import Config
from axcore.errors import ConfigError, TrainError
from axcore.plugins import host

if TYPE_CHECKING:
    from axcore.data import BaseTokenizer

__all__ = ["Change", "RunDir", "text_changes"]

_HARDWARE = (
    "accumulation_steps",
    "compiler_options",
    "mesh_rules",
    "mesh_shape",
    "ops",
    "sharding_rules",
    "use",
)
_WATCHING = (
    "callbacks",
    "checkpointer",
    "evalers",
    "log_every_n_steps",
    "sample_prompt",
    "writers",
)
# How a stack runs its layers; any of them restores what another one saved.
_STACKS = tuple(
    f'config("axcore.layers.{name}")'
    for name in ("StackedTransformer", "RepeatedTransformer", "PipelinedTransformer")
)
_STACK_FIELDS = ("num_microbatches", "num_repeats", "unroll")
_HORIZON = "max_step"
_LOCK = ".lock"
_PARTIAL_TOKENIZER = ".tokenizer.partial"
_SHOWN = 10
_WIDTH = 60


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between the stored config text and the new one; None is an absent line."""

    path: str
    old: str | None
    new: str | None

    @property
    def kind(self) -> str:
        """``hardware``, ``watching``, ``horizon`` or ``training``."""
        segments = self.path.split(".")
        if segments[0] in _HARDWARE or "remat" in segments or self._is_of_execution(segments):
            return "hardware"
        if segments[0] in _WATCHING:
            return "watching"
        return "horizon" if self.path == _HORIZON else "training"

    def _is_of_execution(self, segments: list[str]) -> bool:
        if segments[-1] == "stack":
            return self.old in _STACKS and self.new in _STACKS
        return segments[-2:-1] == ["stack"] and segments[-1] in _STACK_FIELDS

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.path}: {_short(self.new)} (new)"
        if self.new is None:
            return f"{self.path}: {_short(self.old)} (gone)"
        return f"{self.path}: {_short(self.old)} -> {_short(self.new)}"


class RunDir:
    """Places below a run's directory, and the checks on it.

    Args:
        root: The directory; nothing is touched until :meth:`prepare`.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.config = self.root / "config.txt"
        self.provenance = self.root / "provenance.json"
        self.checkpoints = self.root / "checkpoints"
        self.tokenizer = self.root / "tokenizer"
        self.metrics = self.root / "metrics.jsonl"
        self.loss_plot = self.root / "plots" / "loss.png"
        self.tensorboard = self.root / "tensorboard"
        self.report = self.root / "report.json"
        self.conversion = self.root / "conversion.json"

    @property
    def config_text(self) -> str | None:
        """The stored config text; None when the directory holds no run of ours."""
        try:
            text = self.config.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None
        except OSError as error:
            raise TrainError(
                f"config.txt cannot be read: {error.strerror or error}",
                code="AX744",
                where=str(self.root),
                hint="check the permissions, or choose another directory",
            ) from error
        return text if text.startswith("config(") else None

    def changes(self, config_text: str) -> tuple[Change, ...]:
        """Differences of a config text to the stored one; empty when there is none stored.

        A field that is newer than the stored text counts as stored at its default, so that a run
        goes on after an upgrade that added one.
        """
        stored = self.config_text
        return () if stored is None else text_changes(_completed(stored), config_text)

    @property
    def is_mere_start(self) -> bool:
        """Whether a run was started here and left no step: no metrics, no checkpoint, no more.

        Whatever a start does not write, such as notes of the user's, counts as something to lose.
        """
        names = {path.name for path in self._entries() if not _is_leftover(path.name)}
        try:
            unused = {self.config.name, self.provenance.name}
            if not unused <= names:  # a config that was put there, say
                return False
            if self.tokenizer.is_dir() and not self.tokenizer.is_symlink():
                unused.add(self.tokenizer.name)
            if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
                unused.add(self.checkpoints.name)
            if self.metrics.is_file() and not self.metrics.stat().st_size:
                # Without the lines of JSON, nobody could tell an event file that has no metrics.
                unused |= {self.metrics.name, self.tensorboard.name}
        except OSError:
            return False
        return names <= unused

    def is_replaced_by(self, config_text: str) -> bool:
        """Whether a run of this config takes the place of another one's mere start."""
        return self.is_mere_start and any(
            change.kind in ("training", "horizon") for change in self.changes(config_text)
        )

    def check(self, config_text: str, *, extend: bool = False) -> tuple[Change, ...]:
        """Whether a run of this config may use the directory; changes nothing.

        Args:
            config_text: The run's config as text.
            extend: Whether ``max_step`` may be higher than before.

        Returns:
            The differences to the stored config that are allowed, for a notice; none to that of a
            mere start, which the run replaces.

        Raises:
            TrainError: It is a file (AX740), holds files that are not ours (AX741), another
                experiment's run (AX742), or the same run with another horizon (AX743).
        """
        where = str(self.root)
        if self.root.exists() and not self.root.is_dir():
            raise TrainError(
                "the output directory is a file",
                code="AX740",
                where=where,
                hint="name a directory for --out; it is made where it is not there",
            )
        if self.config_text is None:
            foreign = sorted(p.name for p in self._entries() if not _is_leftover(p.name))
            if foreign:
                names = ", ".join(foreign[:_SHOWN])
                more = len(foreign) - _SHOWN
                raise TrainError(
                    "the output directory holds files that are no run of axcore: "
                    + (f"{names}, and {more} more" if more > 0 else names),
                    code="AX741",
                    where=where,
                    hint="choose an empty or new directory for --out; these files were left alone",
                )
            return ()
        if self.is_replaced_by(config_text):
            return ()
        changes = self.changes(config_text)
        other = [change for change in changes if change.kind == "training"]
        if other:
            if self.provenance.exists():
                hint = "choose another --out, or go back to the stored config "
                hint += f"(`axcore train {self.config} --out {self.root}`)"
            else:  # a model that was converted, say
                hint = "choose another --out; there, --init-from "
                hint += f"{self.root} starts with the parameters of this one"
            raise TrainError(
                f"the output directory holds another experiment's run: {_listed(other)}",
                code="AX742",
                where=where,
                hint=hint,
            )
        for change in changes:
            if change.kind == "horizon":
                self._check_horizon(change, extend)
        return changes

    def prepare(
        self,
        config_text: str,
        *,
        provenance: Mapping[str, Any] | None = None,
        tokenizer: BaseTokenizer | None = None,
        extend: bool = False,
    ) -> tuple[Change, ...]:
        """Makes the directory ready for a run, new or resumed; see :meth:`check`.

        Args:
            config_text: The run's config as text, written to ``config.txt``.
            provenance: Who set each field, written beside it.
            tokenizer: The run's tokenizer, saved to ``tokenizer/``.
            extend: Whether ``max_step`` may be higher than before.

        Returns:
            The differences to the stored config that are allowed.

        Raises:
            TrainError: As :meth:`check`; or the directory cannot be written (AX744).
        """
        changes = self.check(config_text, extend=extend)
        replaces = self.is_replaced_by(config_text)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if replaces:  # first: while the old config stands, a kill in between costs nothing
                self._replace_tokenizer(tokenizer)
            if changes or replaces or self.config_text is None:
                atomic_write(self.config, config_text)
            if provenance is not None:
                self.write_json(self.provenance, provenance)
            if tokenizer is not None and not replaces:
                tokenizer.save(self.tokenizer)
        except OSError as error:
            raise self._unwritable(error) from error
        return changes

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes from training in the directory meanwhile.

        Raises:
            TrainError: One does (AX746), or the directory cannot be written (AX744).
        """
        with contextlib.ExitStack() as held:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                got = held.enter_context(locked(self.root / _LOCK))
            except OSError as error:
                raise self._unwritable(error) from error
            if not got:
                raise TrainError(
                    "another process is training in the output directory",
                    code="AX746",
                    where=str(self.root),
                    hint="wait for it or stop it, or choose another --out",
                )
            yield

    def require_model(self) -> str:
        """Returns the config text of a model directory, for commands that read one.

        Raises:
            TrainError: The directory is absent, or no model directory (AX745).
        """
        text = self.config_text
        missing = None
        if not self.root.exists():
            missing = "does not exist"
        elif not self.root.is_dir():
            missing = "is a file"
        elif text is None:
            missing = "has no config.txt of a run"
        elif not self.checkpoints.is_dir():
            missing = "has no checkpoints yet"
        if missing is not None or text is None:
            raise TrainError(
                f"this is no model directory: it {missing}",
                code="AX745",
                where=str(self.root),
                hint="name the --out directory of `axcore train` or `axcore convert`",
            )
        return text

    def write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        """Writes a JSON file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(value, indent=2) + "\n")

    def _replace_tokenizer(self, tokenizer: BaseTokenizer | None) -> None:
        """Saves the tokenizer in place of another one, which it may have been read from."""
        partial = self.root / _PARTIAL_TOKENIZER
        shutil.rmtree(partial, ignore_errors=True)
        if tokenizer is not None:
            tokenizer.save(partial)
        if self.tokenizer.exists():
            shutil.rmtree(self.tokenizer)
        if tokenizer is not None:
            partial.rename(self.tokenizer)

    def _check_horizon(self, change: Change, extend: bool) -> None:
        old, new = (int(v) if v and v.isdecimal() else None for v in (change.old, change.new))
        raised = old is not None and new is not None and new > old
        if extend and raised:
            return
        hint = f"choose another --out, or --max-step {change.old} to finish this run"
        if raised:
            hint += "; --extend goes on to the new end, with schedules that follow max_step changed"
        raise TrainError(
            f"the output directory holds this run with another end: {change}",
            code="AX743",
            where=str(self.root),
            hint=hint,
        )

    def _unwritable(self, error: OSError) -> TrainError:
        return TrainError(
            f"the output directory cannot be written: {error.strerror or error}",
            code="AX744",
            where=str(self.root),
            hint="check the permissions and the free space, or choose another --out",
        )

    def _entries(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def text_changes(old: str, new: str) -> tuple[Change, ...]:
    """Compares two config texts line by line (``path: value``), in the order of the paths.

    Works on text alone, so a stored config is shown even when its plugins are gone.
    """
    before, after = _lines(old), _lines(new)
    paths = [*before, *(path for path in after if path not in before)]
    changed = (Change(path, before.get(path), after.get(path)) for path in paths)
    return tuple(change for change in changed if change.old != change.new)


def _completed(text: str) -> str:
    """A config text with the fields it does not state; as it is when it cannot be read any more."""
    packages = host().trusted_packages()
    try:
        return Config.from_text(text, trusted=tuple(packages), fill_in=True).to_text()
    except ConfigError:
        return text


def _lines(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.strip()]
    # The first line is the root's type, without a path.
    pairs = (line.partition(": ") for line in lines[1:])
    return {"(type)": lines[0] if lines else "", **{path: value for path, _, value in pairs}}


def _short(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _listed(changes: list[Change]) -> str:
    more = len(changes) - _SHOWN
    shown = "; ".join(map(str, changes[:_SHOWN]))
    return f"{shown}; and {more} more" if more > 0 else shown


def _is_leftover(name: str) -> bool:
    """Whether a kill can have left this file of ours before a run has begun."""
    return name in (_LOCK, _PARTIAL_TOKENIZER) or (
        name.startswith((".config.txt", ".provenance.json")) and name.endswith(".partial")
    )
