"""Families: what a converter of one architecture states, and how it is found."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from axcore.checkpoint.convert._rules import Rule
from axcore.checkpoint.convert._source import TensorInfo, TensorSource
from axcore.errors import CheckpointError, PluginError, did_you_mean
from axcore.plugins import host

if TYPE_CHECKING:
    from axcore.data import BaseTokenizer
    from axcore.train import Trainer

__all__ = ["ModelFamily", "Oracle", "Settings", "family_of", "load_family"]

_MISSING: Any = object()
_log = logging.getLogger("axcore.convert")

Oracle = Callable[[np.ndarray], np.ndarray]


class Settings(Mapping[str, Any]):
    """Foreign settings that remember which of them were read.

    Behaves like the dict it wraps (nested dicts come as ``Settings``). What no one has read is
    listed in ``conversion.json``, so that nothing is ignored in silence.

    Args:
        values: The settings.
        where: The file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self._values = dict(values)
        self._where = where
        self._read: set[str] = set()
        self._nested: dict[str, Settings] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        self._read.add(key)
        if isinstance(value, Mapping):
            return self._nested.setdefault(key, Settings(value, f"{self._where}: {key}"))
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a setting, or ``default`` where it is absent."""
        return self[key] if key in self._values else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __repr__(self) -> str:
        return f"Settings({self._values!r})"

    def require(self, key: str, kind: type | tuple[type, ...] = object) -> Any:
        """Returns a setting that must be there.

        Args:
            key: Its name.
            kind: The type it must have; an int counts as a float, a bool as neither.

        Raises:
            CheckpointError: It is absent, or of another type (AX614).
        """
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if key not in self._values:
            raise CheckpointError(
                f"the setting {key!r} is missing",
                code="AX614",
                where=self._where or None,
                hint=did_you_mean(key, self._values) or None,
            )
        value = self[key]
        promoted = float in kinds and isinstance(value, int)
        as_bool = isinstance(value, bool) and bool not in kinds and object not in kinds
        if as_bool or not (promoted or isinstance(value, kinds)):
            names = " or ".join(k.__name__ for k in kinds)
            raise CheckpointError(
                f"the setting {key!r} is {value!r}, expected {names}",
                code="AX614",
                where=self._where or None,
            )
        return float(value) if promoted and not isinstance(value, kinds) else value

    def expect(self, key: str, *accepted: Any, default: Any = _MISSING) -> Any:
        """Returns a setting after checking that its value is one that the family implements.

        Args:
            key: Its name.
            accepted: The values that are implemented.
            default: What an absent setting means; without one it must be there.

        Raises:
            CheckpointError: It has another value (AX614).
        """
        value = self.require(key) if default is _MISSING else self.get(key, default)
        if value not in accepted:
            known = ", ".join(map(repr, accepted))
            raise CheckpointError(
                f"the setting {key!r} is {value!r}; implemented: {known}",
                code="AX614",
                where=self._where or None,
                hint="the converted model would compute something else, so it is refused",
            )
        return value

    def skip(self, *keys: str) -> None:
        """Marks settings that change nothing of the model, such as a library's version."""
        self._read.update(keys)

    def unread(self) -> tuple[str, ...]:
        """Returns the settings that no one has read, nested ones as ``a.b``."""
        names = [key for key in self._values if key not in self._read]
        for key, nested in self._nested.items():
            names += [f"{key}.{name}" for name in nested.unread()]
        return tuple(names)


class ModelFamily(abc.ABC):
    """What one architecture's converter states; a plugin registers one through
    ``axcore_converters``.

    The name of the registration is ``FORMAT:ARCHITECTURE``, such as ``hf:ToyForCausalLM``,
    ``gguf:toy`` or ``npz:toy``; its target is an instance or a class without arguments.

    Attributes:
        architecture: The architecture as foreign files name it; written on export.
        yields_to: Architectures of the same format that an export which names no family takes
            instead, where they can say the model too.
    """

    architecture: str
    yields_to: tuple[str, ...] = ()

    @abc.abstractmethod
    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """Returns the experiment of the foreign model.

        Args:
            foreign: Its settings; on conversion a :class:`Settings`, whose ``require`` and
                ``expect`` refuse what the family does not implement.
            infos: Its tensors, where the settings do not say (a head of its own, a bias); may be
                empty.

        Raises:
            CheckpointError: A setting is missing or not implemented (AX614).
        """

    @abc.abstractmethod
    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """Returns which tensors hold which parameters.

        Args:
            cfg: The experiment; frozen.
        """

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """Returns the foreign settings of an experiment: the inverse of :meth:`config`.

        Raises:
            CheckpointError: The family cannot be exported, or the config holds something that the
                foreign format cannot say (AX622).
        """
        del cfg
        raise CheckpointError(
            f"{self.architecture} cannot be exported",
            code="AX622",
            hint="its converter only reads; name another one with --family",
        )

    def tokenizer(self, source: TensorSource) -> BaseTokenizer | None:
        """Returns the source's tokenizer, or None when it has none.

        The default reads what the format usually carries.
        """
        from axcore.checkpoint.convert._tokenizer import default_tokenizer

        return default_tokenizer(source)

    def oracle(self, source: TensorSource) -> Oracle | None:
        """Returns the source's own model, or None when it cannot be run here.

        It is called with int32 ids (batch, seq) and returns what :meth:`outputs` returns. The
        default runs the file in ``transformers`` where that is installed and knows it.

        Raises:
            CheckpointError: With the reason why it cannot be run (AX623); recorded, not fatal.
        """
        from axcore.checkpoint.convert._evidence import transformers_oracle

        return transformers_oracle(source)

    def outputs(self, model: Any, state: Any, input_ids: np.ndarray) -> np.ndarray:
        """Returns our model's outputs for ids (batch, seq), to hold against the oracle's.

        The default calls the model's ``logits``: float32 (batch, seq, vocab_size).
        """
        from axcore.checkpoint.convert._evidence import model_logits

        return model_logits(model, state, input_ids)

    def matches(self, source: TensorSource) -> bool:
        """Tells whether a source that does not name its architecture is of this family."""
        del source
        return False


def load_family(name: str) -> ModelFamily:
    """Returns a registered family.

    Args:
        name: ``FORMAT:ARCHITECTURE``.

    Raises:
        PluginLookupError: No active plugin provides it.
        CheckpointError: What is registered is no family (AX621).
    """
    registry = host().converters
    found = registry.load(name)
    family = found() if isinstance(found, type) else found
    if not isinstance(family, ModelFamily):
        raise CheckpointError(
            f"converter {name!r} of {registry.owner(name)} is a {type(family).__name__}, "
            "expected a ModelFamily",
            code="AX621",
        )
    return family


def family_of(source: TensorSource, name: str | None = None) -> tuple[str, ModelFamily]:
    """Returns the name and the family of a source.

    Args:
        source: The source.
        name: The family to take: ``FORMAT:ARCHITECTURE``, or the architecture alone.

    Raises:
        CheckpointError: No registered family fits, or several do (AX613).
    """
    known = [n for n in host().converters.names() if n.startswith(f"{source.format}:")]
    architecture = name or source.architecture
    if architecture is None:
        matching = [n for n in known if _matches(n, source)]
        if len(matching) == 1:
            return matching[0], load_family(matching[0])
        what = f"{len(matching)} converters fit" if matching else "no converter fits"
        raise _unknown(f"the source does not say what it is, and {what}", source, "", known)
    full = architecture if ":" in architecture else f"{source.format}:{architecture}"
    if full not in known:
        said = "--family asks for" if name else "the source is"
        raise _unknown(f"{said} {architecture!r}, which no converter knows", source, full, known)
    return full, load_family(full)


def _matches(name: str, source: TensorSource) -> bool:
    """Whether a family says that a source is of its kind; one that is broken says nothing."""
    try:
        return load_family(name).matches(source)
    except (CheckpointError, PluginError) as error:
        _log.warning("converter %s is left out: %s", name, error.message)
        return False


def _unknown(
    message: str, source: TensorSource, name: str, known: Sequence[str]
) -> CheckpointError:
    inactive = [r for r in host().records if r.status not in ("active", "disabled")]
    hints = [did_you_mean(name, known) if name else "name one with --family"]
    hints += [f"plugin {r.label} is {r.status}: {r.reason}" for r in inactive]
    if not known:
        hints.append("install a plugin with converters; `axcore plugins list` shows what there is")
    return CheckpointError(
        f"{message}; known: {', '.join(known) or 'none'}",
        code="AX613",
        where=str(source.path),
        hint="; ".join(h for h in hints if h) or None,
    )
