"""Checkpoints on orbax: asynchronous, sharded, verified.

A step is written into ``STEP.partial`` and renamed to ``STEP`` once orbax has committed the arrays
and the manifest stands, so a directory with a step's name was complete at one time; the manifest
says whether it still is. Arrays go to uncompressed zarr chunks without OCDBT: compressing float
weights costs several times what it saves, and plain chunk files are written in parallel.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from axcore._files import sync_directory
from axcore.checkpoint import _failure, _manifest, _match, stack_form
from axcore.checkpoint._stored import read_stored
from axcore.checkpoint.base import BaseCheckpointer
from axcore.errors import CheckpointError

__all__ = ["ARRAYS", "EXTRA", "OrbaxCheckpointer", "orbax_quiet", "stored_name"]

ARRAYS = "arrays"
EXTRA = "extra.json"
_PARTIAL = ".partial"
_DISCARDED = ".discarded"
_NAME_BYTES = 200  # file names may have 255; orbax and the atomic rename append to them

_log = logging.getLogger("axcore.checkpoint")

_open: weakref.WeakSet[OrbaxCheckpointer] = weakref.WeakSet()


def _finish_saves() -> None:
    """Waits for the saves under way; a process that ends without ``close`` runs it."""
    for checkpointer in list(_open):
        try:
            checkpointer.wait()
        except CheckpointError as error:
            _log.error("the last save failed: %s", error)


@functools.cache
def _finish_saves_at_exit() -> None:
    """Has :func:`_finish_saves` run once the main thread ends, before executors are closed.

    After that orbax's save thread fails, and the threads that wait for its signal keep the process
    for ever. ``atexit`` runs too late; the hook that the executors themselves use does not, and has
    no public name (Python 3.9 to 3.14 have it). The last one registered runs first.
    """
    import concurrent.futures.thread  # noqa: F401  (registers first)

    register = getattr(threading, "_register_atexit", lambda function: None)
    register(_finish_saves)


class OrbaxCheckpointer(BaseCheckpointer):
    """Saves through ``orbax.checkpoint``; see :class:`BaseCheckpointer` for the calls.

    Attributes:
        skipped: Steps that :meth:`latest_good` passed over, with the reason.
    """

    class Config(BaseCheckpointer.Config):
        """How to write.

        Attributes:
            async_: Whether writing goes on in the background while training continues.
            checksums: Whether contents are hashed at the save and compared at the restore. Sizes
                and presence of files always are. The first process hashes all files.
        """

        async_: bool = True
        checksums: bool = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.skipped: dict[int, str] = {}
        self._directory: Path | None = None
        self._orbax: Any = None
        self._filter: logging.Filter | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._good: dict[int, _manifest.Manifest] = {}
        # Steps of this run's own history, equal in all processes (what a process has verified
        # is not): saving one again is not needed.
        self._settled: set[int] = set()
        # Steps of a history that went on from before the restored step and is now left.
        self._abandoned: set[int] = set()

    def open(self, directory: str | Path) -> None:
        """See :meth:`BaseCheckpointer.open`."""
        self._directory = Path(directory).absolute()
        _open.add(self)
        _finish_saves_at_exit()

    def save(self, step: int, arrays: Any, extra: Mapping[str, Any] | None = None) -> None:
        """See :meth:`BaseCheckpointer.save`. A step just saved or restored stays as it is."""
        self.wait()
        if step in self._settled:
            return
        text = _to_json(extra or {}, step)
        stored: dict[str, Any] = {}
        records: dict[str, _manifest.ArrayRecord] = {}
        for path, leaf in stack_form.flatten(arrays).items():
            array, key_impl = _match.store_form(leaf)
            name = stored_name(path)
            records[path] = _manifest.ArrayRecord(name, array.shape, array.dtype.name, key_impl)
            if array.size:  # orbax refuses arrays without elements; the record is enough
                stored[name] = array
        partial = self._root() / f"{step}{_PARTIAL}"
        size = sum(array.nbytes for array in stored.values())
        try:
            if _is_primary():
                shutil.rmtree(partial, ignore_errors=True)
                if size > _failure.free_bytes(self._root()):  # say so before filling the disk
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                partial.mkdir(parents=True)
                (partial / EXTRA).write_text(text, encoding="utf-8")
            if stored:
                args = _orbax_module().args.PyTreeSave(stored)
                self._checkpointer().save(partial / ARRAYS, args=args)
        except Exception as error:
            raise self._failed(step, partial, size, error) from error
        if self.cfg.async_:
            self._thread = threading.Thread(
                target=self._commit, args=(step, partial, records, size), name="axcore-checkpoint"
            )
            self._thread.start()
        else:
            self._commit(step, partial, records, size)
            self.wait()

    def steps(self) -> list[int]:
        """See :meth:`BaseCheckpointer.steps`."""
        return sorted(int(p.name) for p in self._entries() if _is_step(p.name))

    def latest_good(self) -> int | None:
        """See :meth:`BaseCheckpointer.latest_good`. Contents are compared with checksums."""
        self.wait()
        found = -1
        if _is_primary():
            found = next((s for s in self._candidates() if self._verify(s) is None), -1)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        return None if found < 0 else found

    def describe(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a step's arrays by path, as stored, without reading them."""
        arrays = self._manifest(step).arrays
        return {p: jax.ShapeDtypeStruct(r.shape, np.dtype(r.dtype)) for p, r in arrays.items()}

    def read(self, step: int, path: str, index: tuple[int, ...] = ()) -> np.ndarray:
        """One stored array, or one layer of it, without reading the rest.

        Args:
            step: A step that is whole.
            path: Path of an array as stored (see :meth:`describe`).
            index: Position on its leading (layer) axes.

        Returns:
            The values; typed PRNG keys as their data.
        """
        record = self._manifest(step).arrays[path]
        if 0 in record.shape:
            return np.zeros(record.shape[len(index) :], np.dtype(record.dtype))
        return read_stored(self._path(step) / ARRAYS / record.name, index)

    def extra(self, step: int) -> dict[str, Any]:
        """The JSON part of a step, without reading its arrays."""
        self._manifest(step)
        return json.loads((self._path(step) / EXTRA).read_text(encoding="utf-8"))

    def restore(
        self, step: int, abstract: Any, *, allow_unexpected: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """See :meth:`BaseCheckpointer.restore`."""
        self.wait()
        manifest = self._manifest(step)
        target = {path: _match.wanted(x) for path, x in stack_form.flatten(abstract).items()}
        recipes = _match.match(
            manifest.arrays,
            target,
            where=str(self._path(step)),
            allow_unexpected=allow_unexpected,
        )
        leaves = self._read(step, manifest, recipes, target)
        made = []
        for path, want in target.items():
            leaf = stack_form.assemble(recipes[path], leaves, sharding=want.sharding)
            if want.key_dtype is not None:
                record = manifest.arrays[recipes[path].sources[0].path]
                leaf = jax.random.wrap_key_data(leaf, impl=record.key_impl)
            made.append(leaf)
        tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(abstract), made)
        self._settled = {other for other in self._settled if other < step} | {step}
        self._abandoned = {other for other in self.steps() if other > step}
        return tree, self.extra(step)

    def check(self) -> None:
        """See :meth:`BaseCheckpointer.check`."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """See :meth:`BaseCheckpointer.wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """See :meth:`BaseCheckpointer.close`."""
        try:
            self.wait()
        finally:
            _open.discard(self)
            checkpointer, self._orbax = self._orbax, None
            if checkpointer is not None and self._filter is not None:
                checkpointer.close()
                logging.getLogger("absl").removeFilter(self._filter)

    # -- writing ------------------------------------------------------------------------------

    def _commit(
        self,
        step: int,
        partial: Path,
        records: Mapping[str, _manifest.ArrayRecord],
        size: int,
    ) -> None:
        """Finishes a save: runs in the background thread, or at once when not ``async_``."""
        try:
            if self._orbax is not None:
                self._orbax.wait_until_finished()
            if _is_primary():
                self._good[step] = self._publish(step, partial, records)
                self.skipped.pop(step, None)
                self._prune(step)
            self._settled.add(step)
        except BaseException as error:
            self._failure = self._failed(step, partial, size, error)
            self._failure.__cause__ = error

    def _publish(
        self, step: int, partial: Path, records: Mapping[str, _manifest.ArrayRecord]
    ) -> _manifest.Manifest:
        manifest = _manifest.write(partial, step, records, checksums=self.cfg.checksums)
        final = self._path(step)
        if final.exists():  # a damaged step, or one that an earlier run had gone beyond
            final.rename(_fresh(final, _DISCARDED))
        partial.rename(final)
        sync_directory(final.parent)
        return manifest

    def _prune(self, committed: int) -> None:
        """Removes what is not to be kept, now that a step has been committed.

        What a rollback has left behind goes too: the next run would go on from there.
        """
        self._abandoned.discard(committed)
        good = [s for s in self.steps() if s not in self.skipped and s not in self._abandoned]
        for step in set(self.steps()) - set(self.kept(good)) - {committed}:
            # Renamed first: a kill halfway must not leave a damaged directory of a step's name.
            path = self._path(step)
            path.rename(_fresh(path, _DISCARDED))
            self._good.pop(step, None)
        for path in self._entries():
            step, suffix = path.stem, path.suffix
            if _is_step(step) and suffix in (_PARTIAL, _DISCARDED):
                shutil.rmtree(path, ignore_errors=True)

    def _failed(self, step: int, partial: Path, size: int, error: BaseException) -> CheckpointError:
        """Cleans up after a save that failed, and says what is left."""
        if isinstance(error, CheckpointError):
            return error
        if _is_primary():
            shutil.rmtree(partial, ignore_errors=True)
        last = next(
            (s for s in self._candidates() if self._verify(s, contents=False) is None), None
        )
        return _failure.explain(
            error, step=step, size_bytes=size, root=self._root(), last_good=last
        )

    # -- reading ------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[int]:
        """Finished steps, newest first; warns of a save that was cut off after the newest."""
        steps = self.steps()
        for path in self._entries():
            if path.suffix == _PARTIAL and _is_step(path.stem):
                step = int(path.stem)
                if step not in steps and (not steps or step > steps[-1]):
                    self._skip(step, f"{path.name}: the save did not finish")
        return iter(sorted(steps, reverse=True))

    def _verify(self, step: int, *, contents: bool = True) -> str | None:
        """Returns why a step is unusable, or None."""
        found = _manifest.read(self._path(step))
        reason = found if isinstance(found, str) else None
        if not isinstance(found, str):
            reason = _manifest.verify(self._path(step), found, contents=contents)
            if reason is None and contents:
                self._good[step] = found
        if reason is not None:
            self._good.pop(step, None)
            self._skip(step, reason)
        return reason

    def _skip(self, step: int, reason: str) -> None:
        if self.skipped.get(step) != reason:
            self.skipped[step] = reason
            _log.warning("checkpoint step %d in %s is skipped: %s", step, self._root(), reason)

    def _manifest(self, step: int) -> _manifest.Manifest:
        """The manifest of a step that is whole."""
        if step not in self._good or not _is_primary():
            if not self._path(step).is_dir():
                have = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(
                    f"there is no checkpoint of step {step}; there are: {have}",
                    code="AX605",
                    where=str(self._root()),
                    hint="without a step the newest good one is taken",
                )
            found = _manifest.read(self._path(step))
            # The first process has compared the contents for all.
            reason = self._verify(step) if _is_primary() or isinstance(found, str) else None
            if reason is not None or isinstance(found, str):
                raise CheckpointError(
                    f"the checkpoint is damaged: {reason or found}",
                    code="AX605",
                    where=str(self._path(step)),
                    hint="restore an older step; training skips damaged ones by itself",
                )
            self._good[step] = found
        return self._good[step]

    def _read(
        self,
        step: int,
        manifest: _manifest.Manifest,
        recipes: Mapping[str, stack_form.Recipe],
        target: Mapping[str, _match.Wanted],
    ) -> dict[str, Any]:
        """Reads the stored arrays that the recipes name, sharded as their use suggests."""
        ocp = _orbax_module()
        shardings: dict[str, jax.sharding.Sharding | None] = {}
        for path, recipe in recipes.items():
            for source in recipe.sources:
                if source.path not in shardings or recipe.direct:
                    shardings[source.path] = _source_sharding(recipe, source, target[path])
        leaves: dict[str, Any] = {}
        items: dict[str, Any] = {}
        args: dict[str, Any] = {}
        for path, sharding in shardings.items():
            record = manifest.arrays[path]
            dtype = np.dtype(record.dtype)
            if 0 in record.shape:
                empty = np.zeros(record.shape, dtype)
                leaves[path] = empty if sharding is None else jax.device_put(empty, sharding)
                continue
            items[record.name] = jax.ShapeDtypeStruct(record.shape, dtype)
            if sharding is None:
                args[record.name] = ocp.RestoreArgs(restore_type=np.ndarray)
            else:
                args[record.name] = ocp.ArrayRestoreArgs(
                    sharding=sharding, global_shape=record.shape, dtype=dtype
                )
        if items:
            request = ocp.args.PyTreeRestore(item=items, restore_args=args, partial_restore=True)
            read = self._checkpointer().restore(self._path(step) / ARRAYS, args=request)
            names = {manifest.arrays[path].name: path for path in shardings}
            leaves |= {names[name]: array for name, array in read.items()}
        return leaves

    # -- places -------------------------------------------------------------------------------

    def _root(self) -> Path:
        if self._directory is None:
            raise CheckpointError("the checkpointer has no directory: call open() first")
        return self._directory

    def _path(self, step: int) -> Path:
        return self._root() / str(step)

    def _entries(self) -> list[Path]:
        return sorted(self._root().iterdir()) if self._root().is_dir() else []

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            ocp = _orbax_module()
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
            self._orbax = ocp.AsyncCheckpointer(handler)
            self._filter = _OrbaxToDebug()
            logging.getLogger("absl").addFilter(self._filter)
        return self._orbax


def _orbax_module() -> Any:
    import orbax.checkpoint as ocp

    return ocp


class _OrbaxToDebug(logging.Filter):
    """Moves orbax's messages to our logger's debug level; its errors reach the user through us."""

    def filter(self, record: logging.LogRecord) -> bool:
        if f"{os.sep}orbax{os.sep}" not in record.pathname:
            return True
        _log.debug("orbax: %s", record.getMessage())
        return False


@contextlib.contextmanager
def orbax_quiet() -> Iterator[None]:
    """Moves orbax's messages to our logger's debug level."""
    mover = _OrbaxToDebug()
    logging.getLogger("absl").addFilter(mover)
    try:
        yield
    finally:
        logging.getLogger("absl").removeFilter(mover)


def _is_primary() -> bool:
    return jax.process_index() == 0


def _is_step(name: str) -> bool:
    return name.isdecimal() and str(int(name)) == name


def _fresh(path: Path, suffix: str) -> Path:
    """A name beside ``path`` that is free; what an earlier kill left there is removed."""
    other = path.with_name(path.name + suffix)
    shutil.rmtree(other, ignore_errors=True)
    return other


def stored_name(path: str) -> str:
    """File name of an array: its path with dots, unambiguous and not too long."""
    name = path.replace(".", "%2E").replace("/", ".") or "value"
    if len(name.encode()) <= _NAME_BYTES:
        return name
    import hashlib

    digest = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
    return f"{digest}-{name[-(_NAME_BYTES // 2) :]}"


def _source_sharding(
    recipe: stack_form.Recipe, source: stack_form.Source, want: _match.Wanted
) -> jax.sharding.Sharding | None:
    """Sharding in which to read a part of a leaf: that of the leaf, less or plus layer axes."""
    sharding = want.sharding
    if recipe.direct or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (len(want.shape) - len(sharding.spec)))
    layer = spec[len(recipe.stacked) :]
    extra = [None] * len(source.index or ())
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*extra, *layer))


def _to_json(extra: Mapping[str, Any], step: int) -> str:
    try:
        return json.dumps(extra, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the extra values of step {step} have no JSON form: {error}",
            code="AX604",
            hint="convert arrays and numpy scalars with .tolist() or .item()",
        ) from error
