"""A directory of the Hugging Face layout: ``config.json`` and safetensors, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from axcore.checkpoint.convert._safetensors import StoredTensor, read_header
from axcore.checkpoint.convert._source import (
    Digest,
    OpenFiles,
    TensorSource,
    bad_source,
    dtype_named,
    plain_file,
)

__all__ = ["SafetensorsSource", "contained", "is_pickle", "read_json", "refused_pickle"]

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_JSON_BYTES = 64_000_000


class SafetensorsSource(TensorSource):
    """Tensors of ``model.safetensors``, or of the shards of ``model.safetensors.index.json``.

    Args:
        path: The directory, or one safetensors file with ``config.json`` beside it.

    Raises:
        CheckpointError: There is no such model, or its files are damaged or unsafe (AX610-AX612).
    """

    format = "hf"

    def __init__(self, path: str | Path):
        super().__init__(Path(path))
        self.directory = self.path if self.path.is_dir() else self.path.parent
        config = self.directory / "config.json"
        if not config.exists():
            raise bad_source(
                "there is no config.json",
                self.directory,
                code="AX610",
                hint="name the model's directory, with config.json and *.safetensors",
            )
        self.config = read_json(contained(self.directory, "config.json"))
        if "quantization_config" in self.config:
            raise bad_source(
                "the weights are quantized (quantization_config)",
                config,
                code="AX614",
                hint="convert the unquantized model, or a GGUF file of it",
            )
        self._files = OpenFiles()
        try:
            self._tensors = self._read_headers()
        except BaseException:
            self._files.close()
            raise
        self.infos = {name: stored.info for name, stored in self._tensors.items()}
        self.metadata = {
            name.removesuffix(".json"): read_json(contained(self.directory, name))
            for name in ("generation_config.json",)
            if (self.directory / name).is_file()
        }

    @property
    def architecture(self) -> str | None:
        """The first of ``architectures`` in ``config.json``."""
        names = self.config.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        return None

    def read(self, name: str, digest: Digest | None = None) -> np.ndarray:
        """See :meth:`TensorSource.read`."""
        stored = self._tensors[name]
        data = self._files.read(stored.path, stored.offset, stored.info.size_bytes)
        if digest is not None:
            digest.update(data.data)
        return data.view(dtype_named(stored.info.dtype)).reshape(stored.info.shape)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def _read_headers(self) -> dict[str, StoredTensor]:
        if self.path.is_file():
            return dict(read_header(self._files, self.path).tensors)
        if (self.directory / _INDEX).exists():
            return self._read_shards(self.directory / _INDEX)
        found = sorted(p.name for p in self.directory.glob("*.safetensors"))
        if _WHOLE in found:
            found = [_WHOLE]
        if len(found) == 1:
            path = contained(self.directory, found[0])
            return dict(read_header(self._files, path).tensors)
        if found:
            raise bad_source(
                f"there are {len(found)} safetensors files and no {_INDEX} that says how they "
                "belong together",
                self.directory,
                code="AX610",
                hint="download the index too, or name one of the files",
            )
        pickled = sorted(p.name for p in self.directory.iterdir() if p.suffix in _PICKLED)
        if pickled:
            raise refused_pickle(self.directory / pickled[0])
        raise bad_source("there is no safetensors file", self.directory, code="AX610")

    def _read_shards(self, index: Path) -> dict[str, StoredTensor]:
        weight_map = read_json(contained(self.directory, index.name)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise bad_source("it has no weight_map", index)
        shards: dict[str, Mapping[str, StoredTensor]] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str):
                raise bad_source(f"weight_map[{name!r}] is {shard!r}, expected a file name", index)
            if shard in shards:
                continue
            _check_name(shard, index)
            if not (self.directory / shard).exists():
                raise bad_source(
                    f"the shard {shard} is missing",
                    self.directory,
                    code="AX610",
                    hint=f"{index.name} names it; download it again",
                )
            path = contained(self.directory, shard)
            shards[shard] = read_header(self._files, path).tensors
        tensors: dict[str, StoredTensor] = {}
        for shard, held in shards.items():
            for name, stored in held.items():
                if name in tensors:
                    other = tensors[name].path.name
                    raise bad_source(f"tensor {name!r} is in {other} and in {shard}", index)
                if weight_map.get(name) != shard:
                    raise bad_source(
                        f"tensor {name!r} of {shard} is in the index as {weight_map.get(name)!r}",
                        index,
                    )
                tensors[name] = stored
        for name, shard in weight_map.items():
            if name not in tensors:
                raise bad_source(f"tensor {name!r} is not in {shard}, where it should be", index)
        return tensors


def is_pickle(path: Path) -> bool:
    """Tells whether a file's name is one of weights that only unpickling could read."""
    return path.is_file() and path.suffix in _PICKLED


def refused_pickle(path: Path) -> Exception:
    """Returns the error for weights that only unpickling could read."""
    return bad_source(
        f"{path.name} is a pickle, which can run any code and is never read",
        path.parent,
        code="AX610",
        hint="save it as safetensors where you trust it: "
        "AutoModel.from_pretrained(DIR).save_pretrained(NEW, safe_serialization=True)",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: It cannot be read, or is none (AX610).
    """
    status = plain_file(path)
    if status.st_size > _MAX_JSON_BYTES:
        raise bad_source(f"has {status.st_size:,} bytes, too many", path, code="AX610")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise bad_source(f"cannot be read: {error.strerror}", path, code="AX610") from error
    except (ValueError, RecursionError) as error:
        raise bad_source(f"is no JSON: {error}", path, code="AX610") from error
    if not isinstance(value, dict):
        raise bad_source(
            f"is a JSON {type(value).__name__}, expected an object", path, code="AX610"
        )
    return value


def _check_name(name: str, index: Path) -> None:
    """A shard is a plain file name: a path could lead anywhere."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    plain = len(posix.parts) == 1 and len(windows.parts) == 1 and name not in ("", ".", "..")
    if not plain or "\0" in name:
        raise bad_source(
            f"the index names the shard {name!r}, expected a file name without a path",
            index,
            code="AX611",
            hint="do not trust this download",
        )


def contained(directory: Path, name: str) -> Path:
    """Returns the path of a file that really is in the directory.

    A link may lead to the ``blobs`` folder of the same repository: so the hub's cache stores files.

    Raises:
        CheckpointError: A symbolic link leads out of it (AX611).
    """
    path, root = directory / name, directory.resolve()
    real = path.resolve()
    places = [root]
    if root.parent.name == "snapshots":
        places.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in places):
        raise bad_source(
            f"{name} is a link that leads out of the directory",
            directory,
            code="AX611",
            hint="copy the file itself to there, if you trust it",
        )
    return path
