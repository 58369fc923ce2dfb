"""What counts as a line: code without its layout, and how many lines differ.

A Python file is parsed and written out again: one line per statement or header, whatever its
layout. Comments, blank lines, docstrings and the order of imports are gone. Other files count line
by line, blank lines left out.
"""

from __future__ import annotations

import ast
import difflib
import functools
import io
import tokenize
from collections.abc import Mapping

__all__ = ["Files", "changed_lines", "code_lines", "normalized"]

#: Path below the root of a code base -> text.
Files = Mapping[str, str]

_BLANK = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


@functools.lru_cache(maxsize=4096)
def normalized(source: str) -> tuple[str, ...]:
    """Returns the logical lines of Python source.

    Args:
        source: Text of a module.

    Raises:
        SyntaxError: It is no Python.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                setattr(node, name, _sorted_imports(body))
    return tuple(line for line in ast.unparse(tree).splitlines() if line.strip())


def changed_lines(before: Files, after: Files) -> int:
    """Counts the lines of files in ``before`` that are different, or gone, in ``after``.

    New files do not count. A run of lines replaced by another counts the longer of the two.

    Args:
        before: The code base without the feature.
        after: With it.
    """
    total = 0
    for path, old in before.items():
        new = after.get(path)
        if new == old:
            continue
        lines = _lines(path, old)
        total += len(lines) if new is None else _difference(lines, _lines(path, new))
    return total


def code_lines(source: str) -> int:
    """Counts the lines of Python source, as laid out, that hold code: no comment, no docstring."""
    tree = ast.parse(source)
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                docs.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def _lines(path: str, text: str) -> tuple[str, ...]:
    if path.endswith(".py"):
        return normalized(text)
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())


@functools.lru_cache(maxsize=4096)
def _difference(old: tuple[str, ...], new: tuple[str, ...]) -> int:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


def _drop_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> None:
    if node.body and ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
        if not node.body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]


def _sorted_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements with each run of imports split into single names and sorted."""
    result: list[ast.stmt] = []
    run: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            run += _single_imports(statement)
            continue
        result += sorted(run, key=ast.unparse)
        run = []
        result.append(statement)
    return result + sorted(run, key=ast.unparse)


def _single_imports(statement: ast.Import | ast.ImportFrom) -> list[ast.stmt]:
    if isinstance(statement, ast.Import):
        return [ast.Import(names=[alias]) for alias in statement.names]
    module, level = statement.module, statement.level
    return [ast.ImportFrom(module=module, names=[alias], level=level) for alias in statement.names]
