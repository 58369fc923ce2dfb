"""Public names that a package loads on first use, so that importing it stays light."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_attributes"]


def lazy_attributes(
    namespace: dict[str, Any], homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Type checkers learn the names from imports under ``TYPE_CHECKING`` beside it.

    Args:
        namespace: The package's ``globals()``; what was loaded is kept in it.
        homes: Public name -> the module that defines it. A submodule's home is the submodule.

    Returns:
        The two functions, in this order.

    Example:
        ```python
        __getattr__, __dir__ = lazy_attributes(globals(), {"Sketch": "acme._sketch"})
        ```
    """
    package = namespace["__name__"]

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        namespace[name] = value
        return value

    return load, lambda: sorted({*namespace, *homes})
