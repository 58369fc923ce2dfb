"""Modifiers: configured functions from a config to a config."""

from __future__ import annotations

from typing import Any, TypeVar

from axcore.config import _store
from axcore.config._config import Config, Configurable
from axcore.config._provenance import Kind, author
from axcore.config._tree import error
from axcore.config._types import describe

C = TypeVar("C", bound=Config)


class Modifier(Configurable):
    """Base of modifiers; subclasses define ``__call__`` and their own ``Config``.

    Example:
        >>> class WiderModel(Modifier):
        ...     class Config(Modifier.Config):
        ...         factor: int = 2
        ...
        ...     def __call__(self, cfg):
        ...         return cfg.set_path("model.dim", cfg.model.dim * self.cfg.factor)
    """

    class Config(Configurable.Config):
        """A modifier's settings."""

    def __call__(self, cfg: Any) -> Any:
        """Returns the modified config; ``cfg`` is a private copy that may be edited in place."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")


def apply_modifier(
    cfg: C,
    modifier: Config,
    *,
    kind: Kind = "modifier",
    name: str | None = None,
    plugin: str | None = None,
) -> C:
    """Returns what a modifier makes of a copy of ``cfg``; ``cfg`` itself stays as it is.

    Args:
        cfg: The config to modify.
        modifier: Config of a :class:`Modifier`, or ``config_for`` of what makes one.
        kind: Under which kind its edits are recorded.
        name: Under which name; the modifier's class by default.
        plugin: Distribution the modifier comes from, if any.

    Raises:
        ConfigError: It returned None or something that is not a config.
    """
    label = name or _store.label(modifier)
    with author(kind, label, plugin):
        made = modifier.instantiate()
        result = made(cfg.copy())
    if not isinstance(result, Config):
        message = f"the modifier {label} returned {describe(result)}, expected a config"
        raise error("AX113", message, hint="end its __call__ with `return cfg`")
    if not isinstance(result, type(cfg)):
        message = f"the modifier {label} returned {describe(result)}, expected {describe(cfg)}"
        raise error("AX113", message, hint="edit the config it is given and return that")
    return result
