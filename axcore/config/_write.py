"""Values and configs as text: literals, ``config, config_for, partial_for, ref, enum, data``."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from typing import Any, cast

from axcore.config import _names
from axcore.config._tree import (
    ATOMS,
    FrozenMapping,
    Node,
    is_record,
    join,
    parts,
    path_of,
    record_names,
    state,
)
from axcore.config._types import REQUIRED, Scaled, is_leaf
from axcore.errors import ConfigError

Namer = Callable[[Any], str]


def quote(text: str) -> str:
    """Returns a Python string literal in double quotes."""
    body = repr("'" + text + '"')[3:-2]  # both kinds inside, so repr takes single quotes
    return '"' + body.replace("\\'", "'").replace('"', '\\"') + '"'


def head(value: Any, namer: Namer) -> str:
    """Returns the first line of a value that takes several."""
    if isinstance(value, Node):
        call = state(value).call
        if call is not None:
            return f"{call.word}({quote(namer(call.fn))})"
        target = type(value).__dict__.get("target")
        return f"config({quote(namer(type(value) if target is None else target))})"
    if is_record(value):
        return f"data({quote(namer(type(value)))})"
    return "tuple" if isinstance(value, tuple) else "mapping"


def inline(value: Any, namer: Namer = _names.any_path) -> str:
    """Returns a value on one line; of a config only its head."""
    kind = cast(Any, type(value))
    if kind is str:
        return quote(value)
    if kind in ATOMS or kind is Scaled or value is REQUIRED:
        return repr(value)
    if isinstance(value, Node):
        return head(value, namer)
    if isinstance(value, enum.Enum):
        return f"enum({quote(f'{namer(kind)}.{value.name}')})"
    if kind is tuple:
        inner = [inline(part, namer) for _, part in parts(value)]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if kind is FrozenMapping:
        inner = [f"{quote(key)}: {inline(part, namer)}" for key, part in parts(value)]
        return f"{{{', '.join(inner)}}}"
    if is_record(value):
        inner = [quote(namer(kind))]
        inner += [f"{name}={inline(getattr(value, name), namer)}" for name in record_names(kind)]
        return f"data({', '.join(inner)})"
    return f"ref({quote(namer(value))})"


def brief(value: Any) -> str:
    """Returns a value as text for events and reports, shortened."""
    if type(value) is int:
        return repr(value)
    text = inline(value)
    return text if len(text) <= 200 else text[:197] + "..."


def lines(node: Node, strict: bool = True) -> dict[str, str]:
    """Returns path -> text of a config, each node and leaf in declaration order; the root is ''.

    Args:
        node: The config.
        strict: Whether a class or function without a public path is an error.
    """
    out: dict[str, str] = {}
    _lines(node, "", node, _names.public_path if strict else _names.any_path, out)
    return out


def _lines(value: Any, path: str, owner: Node | None, namer: Namer, out: dict[str, str]) -> None:
    kind = cast(Any, type(value))
    if kind in ATOMS or (not isinstance(value, Node) and is_leaf(value)):
        try:
            out[path] = inline(value, namer)
        except _names.NotPublic as e:
            raise ConfigError(str(e), code="AX107", where=path or None, hint=e.hint) from None
        return
    try:
        out[path] = head(value, namer)
    except _names.NotPublic as e:
        where = join(path_of(owner) if owner is not None else "", path) or None
        hint = "move the class to module level" if isinstance(value, Node) else e.hint
        raise ConfigError(str(e), code="AX107", where=where, hint=hint) from None
    pairs = state(value).values.items() if isinstance(value, Node) else parts(value)
    for name, part in pairs:
        _lines(part, join(path, name), owner, namer, out)


def flat(value: Any) -> dict[str, str]:
    """Returns path -> text of any value, the paths below it; never fails."""
    out: dict[str, str] = {}
    _lines(value, "", None, _names.any_path, out)
    return out


def to_text(node: Node) -> str:
    """See :meth:`Config.to_text`."""
    return _joined(lines(node))


def _joined(found: dict[str, str]) -> str:
    return "".join(f"{path}: {text}\n" if path else f"{text}\n" for path, text in found.items())


def fingerprint(node: Node) -> str:
    """See :meth:`Config.fingerprint`."""
    return hashlib.sha256(_joined(lines(node, strict=False)).encode()).hexdigest()
