"""Reading text: a strict reader of the grammar that ``_write`` writes; it never evaluates code."""

from __future__ import annotations

import ast
import enum
import math
from contextvars import ContextVar
from typing import Any

from axcore.config import _edit, _names, _store, _write
from axcore.config._fields import REQUIRED
from axcore.config._provenance import Stamp
from axcore.config._tree import (
    FrozenMapping,
    Node,
    error,
    is_config_class,
    join,
    record_names,
    state,
)
from axcore.config._types import Scaled
from axcore.errors import AxcoreError, ConfigError, did_you_mean

_NAMES: dict[str, Any] = {"REQUIRED": REQUIRED, "nan": math.nan, "inf": math.inf}
_WORDS = ("config", "config_for", "partial_for", "ref", "enum", "data", "scaled")


_CASELESS = {"true": True, "false": False, "none": None, "null": None}


def _bad(message: str, number: int = 0, hint: str | None = None) -> ConfigError:
    """Returns the error for text that is not in the grammar."""
    return error("AX110", message, f"line {number}" if number else "", hint)


# One value --------------------------------------------------------------------------------------


def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        raise _bad(f"cannot read {text[:60]!r}: {getattr(e, 'msg', None) or e}") from None


def _value(node: ast.expr, trusted: tuple[str, ...] | None) -> Any:
    """Returns the value of an expression of the grammar."""
    match node:
        case ast.Constant(value=value) if type(value) in (bool, int, float, str, type(None)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, trusted)
            if type(value) in (int, float):
                return -value
        case ast.Tuple(elts=elts) | ast.List(elts=elts):
            return tuple(_value(e, trusted) for e in elts)
        case ast.Dict(keys=keys, values=values):
            return _mapping(keys, values, trusted)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Call(func=ast.Name(id=word)):
            return _call(word, node, trusted)
        case _:
            pass
    raise _bad(f"{ast.unparse(node)[:60]!r} is neither a literal nor one of {', '.join(_WORDS)}")


def _mapping(
    keys: list[ast.expr | None], values: list[ast.expr], trusted: tuple[str, ...] | None
) -> FrozenMapping[Any]:
    out: dict[str, Any] = {}
    for key, value in zip(keys, values, strict=True):
        if not isinstance(key, ast.Constant) or type(key.value) is not str or key.value in out:
            raise _bad("a mapping takes each key once, as a string literal")
        out[key.value] = _value(value, trusted)
    return FrozenMapping(out)


def _call(
    word: str, node: ast.Call, trusted: tuple[str, ...] | None, below: dict[str, Any] | None = None
) -> Any:
    """Returns what a constructor of the grammar makes; ``below`` are fields on their own lines."""
    if word not in _WORDS:
        raise _bad(f"{word!r} is none of {', '.join(_WORDS)}" + _suggest(word, _WORDS))
    if any(k.arg is None for k in node.keywords):
        raise _bad(f"{word}(**...) is not in the grammar")
    args = [_value(a, trusted) for a in node.args]
    kwargs = {str(k.arg): _value(k.value, trusted) for k in node.keywords} | (below or {})
    if word == "scaled":
        if len(args) != 1 or set(kwargs) - {"of", "multiple_of", "minimum"} or "of" not in kwargs:
            raise _bad('expected scaled(FACTOR, of="FIELD", multiple_of=N, minimum=N)')
        return Scaled(args[0], **kwargs)
    if len(args) != 1 or type(args[0]) is not str or (kwargs and word != "data"):
        raise _bad(f'expected {word}("PUBLIC.PATH"' + (", field=..." * (word == "data")) + ")")
    target = _names.resolve(args[0], trusted)
    if word == "enum" and not isinstance(target, enum.Enum):
        raise _bad(f"{args[0]!r} is no member of an enum")
    if word in ("ref", "enum"):
        return target
    return _record(target, kwargs) if word == "data" else _blank(word, args[0], target)


def _suggest(name: str, known: Any) -> str:
    hint = did_you_mean(name, known)
    return f"; {hint}" if hint else ""


def _record(kind: Any, values: dict[str, Any]) -> Any:
    """Returns a frozen dataclass made of all its fields."""
    params = getattr(kind, "__dataclass_params__", None)
    if not isinstance(kind, type) or params is None or not params.frozen:
        raise _bad(f"{kind!r} is no frozen dataclass")
    names = record_names(kind)
    for name in values:
        if name not in names:
            raise _bad(f"{kind.__name__} has no field {name!r}" + _suggest(name, names))
    for name in names:
        if name not in values and not _fill_in.get():
            raise _bad(f"{kind.__name__} lacks the field {name!r}")
    try:
        return kind(**values)
    except AxcoreError as e:  # its own words, code and hint: the text is well formed
        raise ConfigError(e.message, code=e.code, hint=e.hint) from e
    except (TypeError, ValueError) as e:
        raise _bad(f"{kind.__name__}: {e}") from e


def _blank(word: str, path: str, target: Any) -> Any:
    """Returns a config with nothing set."""
    from axcore.config import _call

    if word == "config":
        config = target if is_config_class(target) else getattr(target, "Config", None)
        if not isinstance(target, type) or not is_config_class(config):
            raise _bad(f"{path!r} has no config class")
        return config()
    if not callable(target):
        raise _bad(f"{path!r} cannot be called")
    return _call.config_for(target) if word == "config_for" else _call.partial_for(target)


def parse_value(text: str, trusted: tuple[str, ...] | None = ()) -> Any:
    """Returns the value that one line's text stands for. Raises ConfigError."""
    return _value(_tree(text), trusted)


# A whole config ---------------------------------------------------------------------------------


# Levels of a path; far beyond any model, and what keeps reading linear in the text's size.
_DEEPEST = 100


# Whether a field that the text does not state keeps its default instead of being an error.
_fill_in: ContextVar[bool] = ContextVar("axcore_config_text_fill_in", default=False)


class _Reader:
    """Lines by path, each used once."""

    def __init__(self, text: str, trusted: tuple[str, ...] | None):
        self.trusted = trusted
        self.lines: dict[str, tuple[int, str]] = {}
        self.used: set[str] = set()
        self.kids: dict[str, dict[str, None]] = {}
        for number, line in enumerate(text.split("\n"), 1):
            line = line.rstrip("\r")
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            path, value = ("", line) if not self.lines else self._split(number, line)
            if path in self.lines:
                raise _bad(f"{path!r} is given twice", number)
            self.lines[path] = (number, value)
            above, _, name = path.rpartition(".")
            while name:
                self.kids.setdefault(above, {})[name] = None
                above, _, name = above.rpartition(".")
        if not self.lines:
            raise _bad('the text is empty; it starts with config("...")', 1)

    def _split(self, number: int, line: str) -> tuple[str, str]:
        path, colon, value = line.partition(": ")
        if not colon or not path or path != path.strip():
            raise _bad(f"expected `path: value`, got {line[:60]!r}", number)
        if path.count(".") > _DEEPEST:
            raise _bad(f"a path of {path.count('.')} levels, expected {_DEEPEST} at most", number)
        return path, value

    def number(self, path: str) -> int:
        return self.lines[path][0]

    def read(self, path: str, above: str, default: Any) -> Any:
        """Returns the value at a path; ``default`` itself where that is all it says."""
        if path not in self.lines:
            if _fill_in.get() and above in self.used and default is not REQUIRED:
                return default
            close = did_you_mean(path, [p for p in self.lines if p and p not in self.used])
            raise _bad(f"the line for {path!r} is missing", self.number(above), close)
        self.used.add(path)
        number, text = self.lines[path]
        try:
            value = self._value(_tree(text), path)
        except ConfigError as e:
            e.where = e.where or f"line {number}"
            raise
        if isinstance(value, Node):
            same = isinstance(default, Node) and _write.inline(default) == _write.inline(value)
            value = default if same else value
            self.fill(value, path)
        return value

    def _value(self, expr: ast.expr, path: str) -> Any:
        match expr:
            case ast.Name(id="mapping"):
                return FrozenMapping(self._below(path))
            case ast.Name(id="tuple"):
                values = self._below(path)
                if list(values) != [str(i) for i in range(len(values))]:
                    raise _bad(f"the elements of {path!r} are not numbered 0, 1, 2, ... in order")
                return tuple(values.values())
            case ast.Call(func=ast.Name(id="data")):
                return _call("data", expr, self.trusted, self._below(path))
            case _:
                return _value(expr, self.trusted)

    def _below(self, path: str) -> dict[str, Any]:
        return {key: self.read(join(path, key), path, None) for key in self.kids.get(path, ())}

    def fill(self, node: Node, path: str) -> None:
        """Gives a config the values of its lines; only what is not the default counts as set."""
        stamp = Stamp()
        own = state(node)
        # A keyword that only **kwargs takes is known by its line alone.
        more = [n for n in self.kids.get(path, ()) if n not in own.values]
        for name in [*own.values, *(n for n in more if _store.field_of(node, n))]:
            at = join(path, name)
            default = own.values.get(name, REQUIRED)
            value = self.read(at, path, default)
            if value is default or _write.lines(value) == _write.lines(default):
                continue
            try:
                _store.assign(node, name, _store.check(node, name, value), stamp)
            except ConfigError as e:
                e.message, e.where = f"{e.message} (at {at!r})", f"line {self.number(at)}"
                raise

    def finish(self) -> None:
        for path, (number, _) in self.lines.items():
            if path not in self.used:
                above = path.rpartition(".")[0]
                known = [p for p in self.used if p.rpartition(".")[0] == above]
                hint = did_you_mean(path, known)
                raise _bad(f"{path!r} is no path of this config", number, hint)


def from_text(
    text: str, trusted: tuple[str, ...] | None, cls: type[Any], fill_in: bool = False
) -> Any:
    """See :meth:`Config.from_text`; ``trusted`` None trusts every package."""
    reader = _Reader(text, trusted)
    token = _fill_in.set(fill_in)
    try:
        node = reader.read("", "", None)
    finally:
        _fill_in.reset(token)
    if not isinstance(node, cls):
        raise _bad(f"got {_write.brief(node)}, expected a {cls.__qualname__}", 1)
    reader.finish()
    return node


# The command line -------------------------------------------------------------------------------


def set_path_text(root: Any, path: str, text: str, trusted: tuple[str, ...]) -> None:
    """See :meth:`Config.set_path_text`."""
    node, rest, _ = _edit.place(root, path)
    field = _store.field_of(node, rest.split(".")[0])
    assert field is not None
    word = text.strip()
    candidates: list[Any] = []
    errors: list[AxcoreError] = []
    try:
        candidates.append(parse_value(text, trusted))
    except ConfigError as e:
        if e.code != "AX110":  # it names something; the other readings do not explain its fault
            errors.append(e)
    if word.lower() in _CASELESS:
        candidates.append(_CASELESS[word.lower()])
    candidates += [kind[word] for kind in field.checker.enums if word in kind.__members__]
    for value in [*candidates, text]:
        try:
            _edit.set_path(root, path, value)
            return
        except AxcoreError as e:  # a value inside a record is checked by the record's own words
            errors.append(e)
    raise errors[0]
