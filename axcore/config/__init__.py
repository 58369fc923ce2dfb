"""Typed configurations: values that are checked, copied, written down and read back.

A :class:`Configurable` class states its settings in a nested class ``Config``; the pair is found
both ways (``Linear.Config``, ``cfg.target``)::

    class Linear(Module):
        class Config(Module.Config):
            input_dim: Required[int] = REQUIRED
            output_dim: Required[int] = REQUIRED
            bias: bool = True

    cfg = Linear.Config(output_dim=8).set(bias=False)
    linear = cfg.instantiate(name="m")

What a field can hold: bool, int, float, str, None, enums, tuples, ``Mapping[str, X]``, frozen
dataclasses, configs, functions and classes with a public path, and unions of these. Wrong types,
unknown fields and missing values raise :class:`axcore.errors.ConfigError` with the full path.
Assignment copies. Third-party callables need no wrapper: ``config_for(optax.adamw, ...)``.

``to_text``/``from_text`` write and read a complete, ordered, line-per-path text that equality,
fingerprints and pickles go through; ``history(path)`` says who set a value. This package imports
no JAX.
"""

from axcore.config._call import CallConfig, PartialConfig, config_for, partial_for
from axcore.config._config import Config, Configurable
from axcore.config._edit import Selection, matches
from axcore.config._fields import REQUIRED, Dim, FieldInfo, Required, scaled
from axcore.config._modifier import Modifier, apply_modifier
from axcore.config._names import public_path, resolve
from axcore.config._provenance import Event, author
from axcore.config._replace import ConfigWarning, LostEdit, Replacement
from axcore.config._store import UnknownFieldError
from axcore.config._text import parse_value
from axcore.config._tree import FrozenMapping
from axcore.config._types import Scaled
from axcore.config._write import diff

__all__ = [
    "REQUIRED",
    "CallConfig",
    "Config",
    "ConfigWarning",
    "Configurable",
    "Dim",
    "Event",
    "FieldInfo",
    "FrozenMapping",
    "LostEdit",
    "Modifier",
    "PartialConfig",
    "Replacement",
    "Required",
    "Scaled",
    "Selection",
    "UnknownFieldError",
    "apply_modifier",
    "author",
    "config_for",
    "diff",
    "matches",
    "parse_value",
    "partial_for",
    "public_path",
    "resolve",
    "scaled",
]
