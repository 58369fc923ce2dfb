"""Commands run in this process; one small model is trained once and read by all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from axcore.cli import main

MICRO = (
    "--set model.model_dim=8 --set model.decoder.num_layers=1"
    " --set model.decoder.layer.attention.num_heads=2 --set batch_size=2 --set seq_len=16"
    " --set evalers.heldout.max_documents=1 --set evalers.heldout.every_n_steps=3"
    " --set checkpointer.save_every_n_steps=3 --set max_step=3"
).split()


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)


def run_command(*argv: object) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture
def cli() -> Callable[..., Done]:
    """Runs ``axcore`` with these arguments."""
    return run_command


@pytest.fixture
def train(cli) -> Callable[..., Done]:
    """Runs ``axcore train`` on a model of 3,128 parameters for 3 steps, on ``cpu`` unless told."""

    def run(out: object, *flags: object, experiment: str = "tiny-lm") -> Done:
        instance = () if "--instance" in flags else ("--instance", "cpu")
        return cli("train", experiment, "--out", out, *instance, *MICRO, *flags)

    return run


@dataclass(frozen=True)
class Trained:
    """A finished run, for reading only."""

    out: Path
    done: Done


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    out = tmp_path_factory.mktemp("trained") / "run"
    done = run_command("train", "tiny-lm", "--out", out, "--instance", "cpu", *MICRO, "--json")
    assert done.code == 0, done.err
    return Trained(out, done)


@pytest.fixture
def contents() -> Callable[[Path], dict[str, str]]:
    """Relative path -> digest of every file below a directory."""

    def digests(root: Path) -> dict[str, str]:
        return {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    return digests


@pytest.fixture(scope="module")
def quick_compiles(tmp_path_factory):
    """A cache directory of the module's own, and programs that compile in a third of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXCORE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def module(tmp_path, monkeypatch) -> Callable[..., str]:
    """Writes a module of the user's and returns its name."""
    folder = tmp_path / "users"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, source: str) -> str:
        (folder / f"{name}.py").write_text(source)
        return name

    return write
