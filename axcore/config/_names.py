"""Names of functions and classes: the shortest public path, and the object behind a path.

A config's text names code; it must read back everywhere, so only what is reachable by a public
path may be a value. ``trusted`` limits what reading a text may import.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

from axcore.errors import ConfigError, did_you_mean

#: Packages that text may name without being told to trust them.
TRUSTED = ("axcore", "jax", "optax", "numpy", "math", "operator")
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
        raise NotPublic(
            f"{_brief(value)} is bound to an object and cannot be written down",
            "give a function at module level, with its settings bound by partial_for",
        )
    if not isinstance(qualname, str) or not isinstance(module, str):
        raise NotPublic(
            f"{_brief(value)} has no name that could be written down",
            "give the function or class that makes it: config_for(function, ...)",
        )
    if "<lambda>" in qualname:
        raise NotPublic("a lambda cannot be written down", "define a function in a module")
    if "<locals>" in qualname:
        raise NotPublic(
            f"{_brief(value)} is local to a function and cannot be written down",
            "move it to module level, or configure what makes it: config_for(factory, ...)",
        )
    for name, candidate in _candidates(module, qualname, value):
        if candidate == value if isinstance(owner, type) else candidate is value:
            return name
    raise NotPublic(
        f"{_brief(value)} is reachable only as {module}.{qualname}, which is private",
        "wrap it in a public function of your own module",
    )


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
    return f"{kind} {name}" if name else f"an object of type {type(value).__name__}"


def resolve(path: str, trusted: Iterable[str] | None) -> Any:
    """Returns the object at a public path.

    Args:
        path: Dotted path, such as ``"optax.adamw"``.
        trusted: Packages that may be imported besides :data:`TRUSTED`; None trusts all.

    Raises:
        ConfigError: The path is private, not trusted, or names nothing.
    """
    segments = path.split(".")
    if not all(s.isidentifier() for s in segments) or len(segments) < 2 or is_private(path):
        raise ConfigError(f"{path!r} is not a public dotted path", code="AX107")
    if trusted is not None and not _is_trusted(path, (*TRUSTED, *trusted)):
        raise _untrusted(path, segments[0])
    module: Any = None
    for i in range(1, len(segments)):
        name = ".".join(segments[:i])
        module_here = _import(name, path)
        if module_here is None:
            break
        module, used = module_here, i
    if module is None:
        raise ConfigError(
            f"{path!r} cannot be resolved: there is no package {segments[0]!r}",
            code="AX115",
            hint=f"install the package that provides {segments[0]!r}",
        )
    found: Any = module
    for segment in segments[used:]:  # pyright: ignore[reportPossiblyUnboundVariable]
        try:
            found = getattr(found, segment)
        except AttributeError:
            raise ConfigError(
                f"{path!r} cannot be resolved: no {segment!r} in {_label(found)}",
                code="AX115",
                hint=did_you_mean(segment, (n for n in dir(found) if not n.startswith("_")))
                or None,
            ) from None
        if trusted is not None and not _is_home_trusted(found, (*TRUSTED, *trusted)):
            raise _untrusted(path, getattr(found, "__module__", None) or _label(found))
    return found


def _untrusted(path: str, home: str) -> ConfigError:
    package = home.split(".")[0]
    return ConfigError(
        f"{path!r} names code of {package!r}, which is not a trusted package",
        code="AX111",
        hint=f"--trust {package} (or trusted=({package!r},)) if you trust it",
    )


def _is_home_trusted(value: Any, trusted: Iterable[str]) -> bool:
    """Whether an object reached through a trusted package also belongs to one (not numpy.os)."""
    if isinstance(value, types.ModuleType):
        home = value.__name__
    else:
        home = getattr(value, "__module__", None)
    if not isinstance(home, str):
        return True  # a plain value, or a namespace on the way
    root = home.split(".")[0]
    if root == "builtins":
        return getattr(value, "__name__", "") in SAFE_BUILTINS
    roots = {"jaxlib", "_operator", *(t.split(".")[0].replace("-", "_") for t in trusted)}
    return root in roots


def _label(value: Any) -> str:
    return cast(str, getattr(value, "__qualname__", None) or getattr(value, "__name__", "?"))


def _is_trusted(path: str, trusted: Iterable[str]) -> bool:
    if path.startswith("builtins."):
        return path.removeprefix("builtins.").split(".")[0] in SAFE_BUILTINS
    return any(path == t or path.startswith(t.replace("-", "_") + ".") for t in trusted)


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
        raise ConfigError(
            f"{path!r} cannot be imported: it needs {e.name!r}, which is not installed",
            code="AX115",
            hint=f"install the package that provides {e.name!r}",
        ) from e
    except Exception as e:
        raise ConfigError(f"{path!r} cannot be imported: {e!r}", code="AX115") from e
