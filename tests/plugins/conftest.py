"""A folder of made-up distributions, and hosts that see only those."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable

import pytest

from axcore.plugins import Candidate, PluginHost, find_candidates
from axcore.testing import write_distribution

_serial = itertools.count()


class Site:
    """A folder on ``sys.path``; every distribution in it gets a module of its own name."""

    def __init__(self, path):
        self.path = path

    def add(self, name: str, hooks: str = "", *, entry: str | None = None, **kwargs) -> str:
        """Adds a distribution whose plugin module holds ``hooks``, with all specs in scope."""
        module = f"zoo{next(_serial)}_{name.replace('-', '_')}"
        if entry is not None:
            kwargs["entry_points"] = {entry: module}
        source = "from axcore.plugins import *\n" + hooks
        return write_distribution(self.path, name, source, module=module, **kwargs)

    def candidates(self) -> tuple[Candidate, ...]:
        return find_candidates([str(self.path)])

    def host(self, **kwargs) -> PluginHost:
        return PluginHost(self.candidates(), **kwargs)


@pytest.fixture
def site(tmp_path, monkeypatch):
    path = tmp_path / "site"
    path.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(path))
    yield Site(path)
    for name in set(sys.modules) - before:
        if name.startswith("zoo"):
            del sys.modules[name]


@pytest.fixture
def hook() -> Callable[..., str]:
    """Source of one hook function returning the given specs."""

    def source(name: str, *specs: str) -> str:
        return f"@hookimpl\ndef axcore_{name}():\n    return [{', '.join(specs)}]\n"

    return source


@pytest.fixture
def status() -> Callable[[PluginHost], dict[str, str]]:
    """Entry point -> status, core left out."""

    def by_name(host: PluginHost, names: Iterable[str] | None = None) -> dict[str, str]:
        return {r.name: r.status for r in host.records if r.distribution != "axcore"}

    return by_name
