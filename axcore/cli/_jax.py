"""Starting JAX for a command: the compile cache and a word on versions."""

from __future__ import annotations

import glob
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from axcore.plugins import Instance

__all__ = [
    "NEWEST_TESTED_JAX",
    "aot_cache_dir",
    "cache_dir",
    "can_keep",
    "is_untested",
    "jax_started",
]

NEWEST_TESTED_JAX = "0.12"
_log = logging.getLogger("axcore.cli")
_DAMAGED = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")


def cache_dir() -> Path | None:
    """Returns where compiled programs are kept; None when ``AXCORE_CACHE_DIR`` is empty.

    ``JAX_COMPILATION_CACHE_DIR`` counts first, then ``$AXCORE_CACHE_DIR/xla``, else
    ``~/.cache/axcore/xla``.
    """
    jax_own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(jax_own) if jax_own else _below_cache("xla")


def aot_cache_dir() -> Path | None:
    """Returns where the answers of ``axcore aot`` are kept, beside the compiled programs."""
    return _below_cache("aot")


def _below_cache(name: str) -> Path | None:
    ours = os.environ.get("AXCORE_CACHE_DIR")
    if ours is None:
        return Path.home() / ".cache" / "axcore" / name
    return Path(ours) / name if ours else None


def is_untested(version: str) -> bool:
    """Whether a JAX version is newer than the newest one that axcore was tested with."""
    newest = Version(NEWEST_TESTED_JAX)
    return Version(version).release[: len(newest.release)] > newest.release


def can_keep(instance: Instance) -> bool:
    """Tells whether programs for a machine may be kept and read back.

    Those of several CPU devices may not: read back (jaxlib 0.10.2) their collectives start in
    another order on each device, and a pipeline waits for itself until XLA aborts the process.
    """
    return instance.platform != "cpu" or instance.num_devices == 1


@contextmanager
def jax_started(*, cache: bool = True) -> Iterator[None]:
    """Runs a command's JAX part with the compile cache on; what was set before is put back.

    Args:
        cache: False leaves the cache as it is, where compiling is what is measured.
    """
    import jax

    from axcore.parallel import detect, prepare_host, resolve_instance

    if detect() == "cpu":
        prepare_host(resolve_instance("cpu"))  # JAX looks for no accelerator, and does not complain
    if is_untested(jax.__version__):
        _log.warning(
            "JAX %s is newer than the newest that axcore was tested with (%s)",
            jax.__version__,
            NEWEST_TESTED_JAX,
        )
    settings = _cache_settings() if cache else {}
    former = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        with _mended(settings.get("jax_compilation_cache_dir")):
            yield
    finally:
        if settings:
            from jax.experimental.compilation_cache import compilation_cache

            for name, value in former.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


@contextmanager
def _mended(directory: str | float | int | None) -> Iterator[None]:
    """Removes entries that cannot be read, as a process killed while it wrote one leaves them.

    JAX compiles instead and warns; it never replaces an entry, so it would do so at every start.
    """
    if not isinstance(directory, str):
        yield
        return
    shown = warnings.showwarning

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        found = _DAMAGED.search(str(message))
        if found is None:
            shown(message, *args, **kwargs)
            return
        for entry in Path(directory).glob(f"{glob.escape(found[1])}-*"):
            entry.unlink(missing_ok=True)
        _log.warning("the kept program %r could not be read; it is compiled anew", found[1])

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def _cache_settings() -> dict[str, str | float | int]:
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None):
        return {}  # set by the environment or by who called us
    place = cache_dir()
    if place is None:
        return {}
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("compiled programs are not kept: %s: %s", place, error.strerror or error)
        return {}
    # JAX's own minimum of one second would leave out all programs of a small model, and any
    # minimum some of a large one: a second start of the same job compiles nothing.
    return {
        "jax_compilation_cache_dir": str(place),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
