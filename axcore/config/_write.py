"""Values and configs as text: literals, ``config, config_for, partial_for, ref, enum, data``."""

from __future__ import annotations

import enum
from typing import Any, cast

from axcore.config import _names
from axcore.config._tree import (
    ATOMS,
    FrozenMapping,
    Node,
    error,
    is_record,
    join,
    parts,
    path_of,
    state,
    walk,
)
from axcore.config._types import Scaled, is_leaf


def quote(text: str) -> str:
    """Returns a Python string literal in double quotes."""
    body = repr("'" + text + '"')[3:-2]  # both kinds inside, so repr takes single quotes
    return '"' + body.replace("\\'", "'").replace('"', '\\"') + '"'


def _named(node: Node) -> Any:
    """Returns the callable or class that the text of a config names."""
    call = state(node).call
    if call is not None:
        return call.fn
    return type(node).__dict__.get("target") or type(node)


def inline(value: Any) -> str:
    """Returns a value on one line; of a config only its first line."""
    kind = cast(Any, type(value))
    if kind is str:
        return quote(value)
    if kind in ATOMS or kind is Scaled:
        return repr(value)
    if isinstance(value, Node):
        call = state(value).call
        return f"{call.word if call is not None else 'config'}({_path(_named(value))})"
    if isinstance(value, enum.Enum):
        return f"enum({quote(f'{_names.any_path(kind)}.{value.name}')})"
    if kind is tuple:
        inner = [inline(part) for part in value]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if kind is FrozenMapping:
        return f"{{{', '.join(f'{quote(key)}: {inline(part)}' for key, part in parts(value))}}}"
    if is_record(value):
        return f"data({', '.join([_path(kind), *(f'{n}={inline(v)}' for n, v in parts(value))])})"
    return f"ref({_path(value)})"


def _path(value: Any) -> str:
    return quote(_names.any_path(value))


def brief(value: Any) -> str:
    """Returns a value as text for events and reports, shortened."""
    if type(value) is int:
        return repr(value)
    line = inline(value)
    return line if len(line) <= 200 else line[:197] + "..."


def lines(value: Any) -> dict[str, str]:
    """Returns path -> text, of each config and leaf in declaration order; the top's path is ''."""
    out: dict[str, str] = {}
    _add_lines(value, "", out)
    return out


def _add_lines(value: Any, path: str, out: dict[str, str]) -> None:
    if type(value) in ATOMS or is_leaf(value):
        out[path] = inline(value)
        return
    inside = parts(value)
    if isinstance(value, Node):
        out[path], inside = inline(value), state(value).values.items()
    elif is_record(value):
        out[path] = f"data({_path(type(value))})"
    else:
        out[path] = "tuple" if isinstance(value, tuple) else "mapping"
    for name, part in inside:
        _add_lines(part, join(path, name), out)


def text(value: Any) -> str:
    """Returns the lines of a value as one text."""
    found = lines(value).items()
    return "".join(f"{path}: {line}\n" if path else f"{line}\n" for path, line in found)


def check_public(node: Node) -> None:
    """Raises ConfigError if a config class has no public path; values had to when they were set."""
    for path, each in walk(node):
        try:
            _names.public_path(_named(each))
        except _names.NotPublic as e:
            hint = "move the class to module level"
            raise error("AX107", str(e), join(path_of(node), path), hint) from None


def diff(a: Node, b: Node) -> dict[str, tuple[str | None, str | None]]:
    """Returns path -> (value in ``a``, value in ``b``), in text form, where they differ.

    None stands for a path that one of them does not have. The root's path is ``""``.

    Example:
        >>> diff(parent, child)
        {'model.dim': ('64', '128')}
    """
    old, new = lines(a), lines(b)
    paths = dict.fromkeys([*new, *old])
    return {p: (old.get(p), new.get(p)) for p in paths if old.get(p) != new.get(p)}
