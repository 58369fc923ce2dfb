"""Names of functions and classes: the shortest public path, and the object behind a path.

A config's text names code; it must read back everywhere, so only what is reachable by a public
path may be a value. ``trusted`` limits what reading a text may import.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from axcore.config._tree import error, short_name
from axcore.errors import did_you_mean

#: What text may name without being told to trust it: what computes, and touches nothing else.
TRUSTED = (
    *("axcore", "optax", "math", "operator"),
    *("jax.nn", "jax.numpy", "jax.lax", "jax.random", "jax.checkpoint_policies"),
    *(f"numpy.{name}{bits}" for name in ("int", "uint", "float") for bits in (8, 16, 32, 64)),
)
#: Where the objects at these paths may live, beside the packages trusted.
HOMES = {"jax": ("jax", "jaxlib"), "numpy": ("numpy",), "operator": ("_operator",)}
#: What runs programs or reads and writes files is never named by text, trusted or not.
DENIED = (
    *(f"axcore.{unit}" for unit in ("cli", "experiments", "inference", "plugins", "testing")),
    *("axcore.train.run", "axcore.train.train", "axcore.train.assemble"),
    *(f"jax.numpy.{name}" for name in ("load", "save", "savez", "fromfile", "frompyfunc")),
    "operator.methodcaller",
)
#: Builtins that text may name: they compute, and touch nothing.
SAFE_BUILTINS = frozenset(
    "abs bool complex dict divmod enumerate filter float frozenset int len list map max min pow "
    "range reversed round set slice sorted str sum tuple zip".split()
)

# By identity, since jnp.float32 == np.float32; the object is kept so that its id is not reused.
_known: dict[int, tuple[Any, str]] = {}


class NotPublic(Exception):
    """An object without a public path; ``hint`` says the way out."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


def public_path(value: Any) -> str:
    """Returns the shortest public dotted path that resolves to ``value``.

    Raises:
        NotPublic: It has none: a lambda, a local function, a closure, a private object.
    """
    found = _known.get(id(value))
    if found is None:
        found = (value, _search(value))
        if not isinstance(value, types.MethodType):  # made anew at each access
            _known[id(value)] = found
    return found[1]


def any_path(value: Any) -> str:
    """Returns the public path, or where there is none a private one that only names the object."""
    try:
        return public_path(value)
    except NotPublic:
        return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', repr(value))}"


def is_private(path: str) -> bool:
    """Whether any segment of a dotted path is private."""
    return any(s.startswith("_") and s != "__main__" for s in path.split("."))


def _search(value: Any) -> str:
    qualname = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    owner = getattr(value, "__self__", None)
    if module is None and isinstance(owner, type):
        module = owner.__module__  # a classmethod of a builtin class
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        why = "is bound to an object"
        hint = "give a function at module level, with its settings bound by partial_for"
    elif not isinstance(qualname, str) or not isinstance(module, str):
        why = "has no name"
        hint = "give the function or class that makes it: config_for(function, ...)"
    elif "<lambda>" in qualname:
        why, hint = "is a lambda", "define a function in a module"
    elif "<locals>" in qualname:
        why = "is local to a function"
        hint = "move it to module level, or configure what makes it: config_for(factory, ...)"
    else:
        for name, candidate in _candidates(module, qualname, value):
            if candidate == value if isinstance(owner, type) else candidate is value:
                return name
        why = f"is reachable only as {module}.{qualname}, which is private,"
        hint = "wrap it in a public function of your own module"
    raise NotPublic(f"{_brief(value)} {why} and cannot be written down", hint)


def _candidates(module: str, qualname: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (public path, object there): parents, the module itself, then the whole package."""
    segments = module.split(".")
    names = [".".join(segments[:i]) for i in range(1, len(segments) + 1)]
    public = [s for s in segments if not s.startswith("_")]
    names += [".".join(public[:i]) for i in range(1, len(public) + 1)]
    for name in dict.fromkeys(names):
        path = f"{name}.{qualname}"
        if name in sys.modules and not is_private(path):
            yield path, _get(sys.modules[name], qualname)
    root = segments[0] + "."
    rest = [n for n in list(sys.modules) if n.startswith(root) and not is_private(n)]
    rest.sort(key=lambda n: (n.count("."), len(n), n))
    for name in rest:
        if not is_private(qualname):
            yield f"{name}.{qualname}", _get(sys.modules[name], qualname)
    for name in rest:  # under another name than its own
        for key, other in list(vars(sys.modules[name]).items()):
            if other is value and not key.startswith("_"):
                yield f"{name}.{key}", other


def _get(module: types.ModuleType, qualname: str) -> Any:
    """Returns an attribute of a module, without waking lazy attributes it does not announce."""
    found: Any = module
    for segment in qualname.split("."):
        announced = found is module and segment in getattr(module, "__all__", ())
        if found is module and segment not in vars(module) and not announced:
            return None
        found = getattr(found, segment, None)
    return found


def _brief(value: Any) -> str:
    kind = "class" if isinstance(value, type) else "function"
    name = getattr(value, "__qualname__", None)
    return f"{kind} {short_name(value)}" if name else f"an object of type {type(value).__name__}"


def resolve(path: str, trusted: Iterable[str] | None) -> Any:
    """Returns the object at a public path.

    Args:
        path: Dotted path, such as ``"optax.adamw"``.
        trusted: Packages that may be named besides :data:`TRUSTED`; None trusts all.

    Raises:
        ConfigError: The path is private, not trusted, or names nothing.
    """
    segments = path.split(".")
    if not all(s.isidentifier() for s in segments) or len(segments) < 2 or is_private(path):
        raise error("AX107", f"{path!r} is not a public dotted path")
    known = None if trusted is None else (*TRUSTED, *(t.replace("-", "_") for t in trusted))
    _check_trusted(path, path, known)
    if known is not None:
        known += HOMES.get(segments[0], ())
    found: Any = None
    used = 0
    while used < len(segments) - 1:
        module = _import(".".join(segments[: used + 1]), path)
        if module is None:
            break
        found, used = module, used + 1
    if found is None:
        message = f"{path!r} cannot be resolved: there is no package {segments[0]!r}"
        raise error("AX115", message, hint=f"install the package that provides {segments[0]!r}")
    for segment in segments[used:]:
        try:
            found = getattr(found, segment)
        except AttributeError:
            where = getattr(found, "__qualname__", None) or getattr(found, "__name__", "?")
            message = f"{path!r} cannot be resolved: no {segment!r} in {where}"
            hint = did_you_mean(segment, (n for n in dir(found) if not n.startswith("_")))
            raise error("AX115", message, hint=hint) from None
        _check_trusted(path, _home(found), known)
    return found


def _home(value: Any) -> str | None:
    """Returns where an object is defined; None for a plain value or a namespace on the way."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    module = getattr(value, "__module__", None)
    return f"{module}.{getattr(value, '__name__', '')}" if isinstance(module, str) else None


def _check_trusted(path: str, home: str | None, trusted: tuple[str, ...] | None) -> None:
    """Raises unless ``home``, where ``path`` leads, is of a trusted package (numpy.os is not)."""
    if trusted is None or home is None:
        return
    if any(f"{home}.".startswith(f"{name}.") for name in DENIED):
        raise error("AX111", f"{path!r} does more than a config may name: it runs or reads things")
    root, _, rest = home.partition(".")
    if root == "builtins" and rest.split(".")[0] in SAFE_BUILTINS:
        return
    if not any(f"{home}.".startswith(f"{known}.") for known in trusted):
        message = f"{path!r} names code of {root!r}, which is not a trusted package"
        raise error(
            "AX111", message, hint=f"--trust {root} (or trusted=({root!r},)) if you trust it"
        )


def _import(name: str, path: str) -> types.ModuleType | None:
    """Imports a module; None if there is no such module, an error if importing it fails."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, last = name.rpartition(".")
    if parent and hasattr(sys.modules.get(parent), last):
        return None  # an attribute, not a submodule
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(e.name + ".")):
            return None
        message = f"{path!r} cannot be imported: it needs {e.name!r}, which is not installed"
        hint = f"install the package that provides {e.name!r}"
        raise error("AX115", message, hint=hint) from e
    except Exception as e:
        raise error("AX115", f"{path!r} cannot be imported: {e!r}") from e
