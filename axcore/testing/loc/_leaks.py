"""Points in code that name a feature which that code must not know.

A *point* is a place where a feature leaks into a module that should not know it: an argument of a
signature, a field of a config or record, or a branch (the test of an ``if``, ``while``, ``assert``,
conditional expression, comprehension or ``match``). A docstring, a comment or a value handed on are
none: a catalog that sets ``query_key_transform=RoPE.Config()`` uses a feature and does not know how
it works.

Names are compared word by word, so ``property`` holds no ``rope``.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Leak", "find_leaks", "words"]

Kind = Literal["argument", "field", "branch"]
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@dataclass(frozen=True)
class Leak:
    """One point.

    Attributes:
        path: The file.
        line: Its line.
        kind: What names the feature.
        name: The identifier or text that does.
        scope: Dotted name of the class or function it is in; empty at module level.
    """

    path: Path
    line: int
    kind: Kind
    name: str
    scope: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind} {self.name!r} in {self.scope or 'the module'}"


def words(name: str) -> frozenset[str]:
    """Returns the lower-case words of an identifier, and each two neighbours as one word.

    So that ``use_RoPE`` and ``MoEConfig`` hold ``rope`` and ``moe``.
    """
    found: set[str] = set()
    for part in re.split(r"[^A-Za-z0-9]+", name):
        pieces = [piece.lower() for piece in _WORD.findall(part)]
        found.update(pieces)
        found.update(a + b for a, b in itertools.pairwise(pieces))
        found.add(part.lower())
    return frozenset(found - {""})


def find_leaks(paths: Iterable[Path], feature_words: Iterable[str]) -> list[Leak]:
    """Returns every point that names one of the words.

    Args:
        paths: Python files, or folders of them.
        feature_words: Lower-case words, such as ``rope``.

    Raises:
        SyntaxError: A file is no Python.
    """
    wanted = frozenset(feature_words)
    leaks: list[Leak] = []
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            tree = ast.parse(file.read_text("utf-8"), str(file))
            leaks += [
                Leak(file, line, kind, name, scope)
                for line, kind, name, scope in _points(tree, "")
                if _may_hold(name, wanted) and words(name) & wanted
            ]
    return leaks


def _may_hold(name: str, wanted: frozenset[str]) -> bool:
    """Tells quickly whether taking a name apart can find one of the words."""
    lowered = name.lower()
    return any(word in lowered for word in wanted)


def _points(node: ast.AST, scope: str) -> Iterator[tuple[int, Kind, str, str]]:
    """Yields (line, kind, name, scope) of all points below a node."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        if isinstance(child, ast.arg):
            yield child.lineno, "argument", child.arg, scope
        if isinstance(child, ast.ClassDef):
            for statement in child.body:
                for name in _fields(statement):
                    yield statement.lineno, "field", name, inner
        for test in _tests(child):
            for line, name in _names(test):
                yield line, "branch", name, scope
        yield from _points(child, inner)


def _fields(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    if isinstance(statement, ast.Assign):
        return [t.id for t in statement.targets if isinstance(t, ast.Name)]
    return []


def _tests(node: ast.AST) -> list[ast.AST]:
    """Returns what a node branches on."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return list(node.ifs)
    if isinstance(node, ast.Match):
        patterns = [part for case in node.cases for part in (case.pattern, case.guard) if part]
        return [node.subject, *patterns]
    return []


def _names(test: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the identifiers and texts in a test."""
    for node in ast.walk(test):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
