"""What tokenizers that live in files have in common: reading, saving, special ids, chat.

A tokenizer is its files' bytes: they are read once (with a bound on their size), copied as they are
into a model directory, and hashed into the data's position. Nothing is ever unpickled or executed;
chat templates run in jinja's sandbox.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from axcore._files import atomic_write
from axcore.data._chat import guard, render_chat, unguarded
from axcore.data._source import digest_of
from axcore.data._tokenizers import BaseTokenizer
from axcore.errors import DataError

__all__ = ["Backend", "Conventions", "FileTokenizer", "parse_json", "require"]

# The largest published tokenizer files are about 35 MB.
_MAX_MAIN_BYTES = 256 * 2**20
_MAX_BESIDE_BYTES = 4 * 2**20


class Backend(Protocol):
    """A tokenizer library's object, seen as what we need of it."""

    vocab_size: int
    # Names of the special tokens and their ids.
    special: Mapping[str, int]

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which no special token is looked for."""
        ...

    def encode_markup(self, text: str) -> list[int]:
        """Ids of a text in which names of special tokens stand for them."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids that are all in the vocabulary, special ones left out."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a whole token's name."""
        ...

    def name_of(self, token_id: int) -> str:
        """The name of an id."""
        ...


@dataclasses.dataclass(frozen=True)
class Conventions:
    """How a tokenizer's files say it is used.

    Attributes:
        bos_id: Id that opens a document.
        eos_id: Id that closes it.
        pad_id: Id that fills up.
        stop_ids: Ids besides ``eos_id`` that end an answer.
        add_bos: Whether a prompt opens with bos.
        opening: Id that the files put before every text: if it is bos, a prompt opens with it.
        chat_template: A jinja template.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    add_bos: bool = False
    opening: int | None = None
    chat_template: str | None = None


class FileTokenizer(BaseTokenizer):
    """A tokenizer made of files.

    Making it reads nothing; the first use does. A subclass says which files there are and makes the
    library's object of them.
    """

    class Config(BaseTokenizer.Config):
        """Where the files are, and what they do not say themselves.

        ``path`` is the main file or the directory that has it; None after saving: the files lie
        beside the saved configuration. Files of the same directory are read with it
        (``tokenizer_config.json``, ``chat_template.jinja``, ...).
        """

        path: str | None = None
        # Names of the special tokens; None: as the files say.
        bos_token: str | None = None
        eos_token: str | None = None
        pad_token: str | None = None
        # Whether prompts open with bos; None: as the files say.
        add_bos: bool | None = None

    # Names under which the main file is looked for in a directory; it is saved under the first.
    main_files: ClassVar[tuple[str, ...]]
    beside_files: ClassVar[tuple[str, ...]] = (
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
    )

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.cfg: FileTokenizer.Config = cfg
        self._loaded_from: Path | None = None
        # The files themselves, when they were never on disk.
        self._given: Mapping[str, bytes] | None = None

    # -- what a subclass says ----------------------------------------------------------------

    @abc.abstractmethod
    def _make_backend(self, files: Mapping[str, bytes]) -> Backend:
        """Makes the library's object of the files' bytes.

        Raises:
            Exception: Of any kind; it is reported with the file's name.
        """

    def _conventions_of(self, files: Mapping[str, bytes], backend: Backend) -> Conventions:
        """Reads special ids and the chat template from the files beside the main one."""
        return conventions_beside(files, backend)

    # -- files -------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return str(self._loaded_from or self.cfg.path)

    @functools.cached_property
    def _files(self) -> Mapping[str, bytes]:
        if self._given is not None:
            return self._given
        root = self._loaded_from or (None if self.cfg.path is None else Path(self.cfg.path))
        if root is None:
            raise DataError(
                f"{type(self).__name__} has no path",
                code="AX533",
                where="input.tokenizer.path",
                hint=f"set it to a file ({self.main_files[0]}) or the directory that has one",
            )
        root = root.expanduser()
        main = self._main_file(root)
        files = {self._saved_name(main): self._read_main(main)}
        for name in self.beside_files:
            path = main.parent / name
            if path.is_file() and path != main:
                files[name] = _read(path, _MAX_BESIDE_BYTES)
        return files

    def _main_file(self, root: Path) -> Path:
        if root.is_file():
            return root
        for name in self.main_files:
            if (root / name).is_file():
                return root / name
        names = ", ".join(self.main_files)
        raise DataError(
            f"no {names} here" if root.is_dir() else "no such file or directory",
            code="AX533",
            where=str(root),
            hint=f"{type(self).__name__} reads {names}; name the file or its directory",
        )

    def _read_main(self, path: Path) -> bytes:
        return _read(path, _MAX_MAIN_BYTES)

    def _saved_name(self, main: Path) -> str:
        return main.name if main.name in self.main_files else self.main_files[0]

    @functools.cached_property
    def _backend(self) -> Backend:
        files = self._files
        try:
            return self._make_backend(files)
        except DataError:
            raise
        except Exception as e:
            raise DataError(
                f"the tokenizer's file cannot be read: {e}",
                code="AX534",
                where=self._where,
                hint=f"expected what {type(self).__name__} reads; copy the file again",
            ) from e

    @functools.cached_property
    def _conventions(self) -> Conventions:
        cfg, backend = self.cfg, self._backend
        said = self._conventions_of(self._files, backend)
        changes: dict[str, Any] = {}
        for name in ("bos", "eos", "pad"):
            token = getattr(cfg, f"{name}_token")
            if token is not None:
                found = backend.id_of(token)
                if found is None:
                    raise DataError(
                        f"the vocabulary has no token {token!r}",
                        code="AX535",
                        where=f"input.tokenizer.{name}_token",
                        hint=f"special tokens: {', '.join(list(backend.special)[:20])}",
                    )
                changes[f"{name}_id"] = found
        said = dataclasses.replace(said, **changes)
        opens = said.add_bos or (said.opening is not None and said.opening == said.bos_id)
        return dataclasses.replace(said, add_bos=opens if cfg.add_bos is None else cfg.add_bos)

    # -- the role ----------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest plus one."""
        return self._backend.vocab_size

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Names and ids of the special tokens."""
        return self._backend.special

    @property
    def bos_id(self) -> int | None:
        """As the files or the configuration say."""
        return self._conventions.bos_id

    @property
    def eos_id(self) -> int | None:
        """As the files or the configuration say."""
        return self._conventions.eos_id

    @property
    def pad_id(self) -> int:
        """The files' padding token, else eos, else bos, else 0: a filler that is never a target."""
        said = self._conventions
        return next((i for i in (said.pad_id, said.eos_id, said.bos_id) if i is not None), 0)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Eos and the other ids that end an answer."""
        said = self._conventions
        first = () if said.eos_id is None else (said.eos_id,)
        return tuple(dict.fromkeys((*first, *said.stop_ids)))

    @property
    def chat_template(self) -> str | None:
        """The files' chat template."""
        return self._conventions.chat_template

    def encode(self, text: str) -> np.ndarray:
        """See :meth:`BaseTokenizer.encode`."""
        return _ids(self._backend.encode(_checked(text)))

    def encode_markup(self, text: str) -> np.ndarray:
        """See :meth:`BaseTokenizer.encode_markup`."""
        return _ids(self._backend.encode_markup(_checked(text)))

    def encode_prompt(self, text: str) -> np.ndarray:
        """See :meth:`BaseTokenizer.encode_prompt`."""
        said, ids = self._conventions, self.encode(text)
        if said.add_bos and said.bos_id is not None:
            ids = np.concatenate([np.array([said.bos_id], np.int32), ids])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """See :meth:`BaseTokenizer.decode`."""
        size = self.vocab_size
        return self._backend.decode([i for i in map(int, ids) if 0 <= i < size])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> np.ndarray:
        """See :meth:`BaseTokenizer.encode_chat`.

        Only the template's own special tokens become such: the name of one inside a message is
        text, so that a user cannot end the turn or speak as the system.
        """
        said, backend = self._conventions, self._backend
        if said.chat_template is None:
            return super().encode_chat(messages)
        names = {
            f"{name}_token": "" if token is None else backend.name_of(token)
            for name, token in (("bos", said.bos_id), ("eos", said.eos_id), ("pad", said.pad_id))
        }
        guarded, marks = guard(messages, backend.special)
        text = render_chat(
            said.chat_template,
            guarded,
            where=self._where,
            add_generation_prompt=add_generation_prompt,
            **{**names, **variables},
        )
        ids: list[int] = []
        for piece, is_text in unguarded(text, marks):
            ids += (backend.encode if is_text else backend.encode_markup)(_checked(piece))
        return _ids(ids)

    def fingerprint(self) -> str:
        """Digest of the files and of what the configuration adds to them."""
        parts = [part for item in sorted(self._files.items()) for part in item]
        return digest_of(type(self).__name__, self._saved_config().to_text(), *parts)

    def save(self, directory: str | Path) -> None:
        """Writes the files, as they were read, and the configuration."""
        files = self._files  # read before anything is written
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        for name in {*self.main_files, *self.beside_files} - set(files):
            (path / name).unlink(missing_ok=True)
        for name, content in files.items():
            atomic_write(path / name, content)
        super().save(path)

    def foreign_files(self) -> Mapping[str, bytes]:
        """Returns the files as they were read."""
        return dict(self._files)

    def _saved_config(self) -> BaseTokenizer.Config:
        return self.cfg.copy().set(path=None)

    def load(self, directory: Path) -> None:
        """Takes the files of this directory."""
        self._loaded_from = directory


def conventions_beside(files: Mapping[str, bytes], backend: Backend) -> Conventions:
    """Reads ``tokenizer_config.json`` and its neighbours as their publishers write them.

    A classification token opens and a separator closes a text where there is no bos or eos.
    """
    said: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            said |= {k: v for k, v in parse_json(files[name], name).items() if v is not None}

    def find(*keys: str) -> int | None:
        for key in keys:
            token = said.get(key)
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                found = backend.id_of(token)
                if found is not None:
                    return found
        return None

    stops: Any = ()
    if "generation_config.json" in files:
        stops = parse_json(files["generation_config.json"], "").get("eos_token_id") or ()
    stops = [stops] if isinstance(stops, int) else stops
    template = said.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    if "chat_template.jinja" in files:
        template = files["chat_template.jinja"].decode("utf-8")
    return Conventions(
        bos_id=find("bos_token", "cls_token"),
        eos_id=find("eos_token", "sep_token"),
        pad_id=find("pad_token"),
        stop_ids=tuple(i for i in stops if isinstance(i, int)),
        add_bos=said.get("add_bos_token") is True,
        chat_template=template if isinstance(template, str) else None,
    )


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        DataError: It is none.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise DataError(f"no JSON: {e}", code="AX534", where=name) from e
    if not isinstance(value, dict):
        raise DataError(
            f"got a JSON {type(value).__name__}, expected an object", code="AX534", where=name
        )
    return value


def require(module: str, purpose: str) -> Any:
    """Imports an optional package.

    Raises:
        DataError: It is not installed; the hint names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise DataError(
            f"{purpose} needs the package {module.partition('.')[0]!r}: {e}",
            code="AX536",
            hint='pip install "axcore[tokenizers]"',
        ) from e


def _read(path: Path, limit: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise DataError(
                f"the file has {size:,} bytes, more than the {limit:,} of any tokenizer",
                code="AX534",
                where=str(path),
                hint="is it a tokenizer's file?",
            )
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as e:
        raise DataError(f"cannot be read: {e.strerror or e}", code="AX533", where=str(path)) from e


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise DataError(
            f"character {e.start} is half a surrogate pair, which has no UTF-8 bytes",
            code="AX532",
            where=repr(text[max(0, e.start - 10) : e.end + 10]),
            hint="leave it out, or write the whole character",
        ) from e
    return text


def _ids(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
