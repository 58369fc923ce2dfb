"""How much of a run was compiled and how much came from the persistent compilation cache.

Whoever starts JAX decides whether and where there is a cache (commands have one by default); JAX
tells of its use by events, counted here.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
from jax import monitoring

__all__ = ["CompileCacheUse"]

_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"


class CompileCacheUse:
    """Counts compilations between entering and leaving, of this process.

    Attributes:
        requests: Programs that were needed.
        hits: Those that the cache had; the others were compiled.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.hits = 0
        # Programs are compiled by whichever thread needs one.
        self._lock = threading.Lock()

    def __enter__(self) -> CompileCacheUse:
        monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        monitoring.unregister_event_listener(self._count)

    def _count(self, event: str, **facts: Any) -> None:
        del facts
        with self._lock:
            self.requests += event == _REQUEST
            self.hits += event == _HIT

    def to_json(self) -> dict[str, Any]:
        """Returns directory (None: the cache is off), requests, hits, compiled, hit rate."""
        settings: Any = jax.config  # its attributes are made at run time
        directory = settings.jax_compilation_cache_dir
        return {
            "directory": directory,
            "requests": self.requests,
            "hits": self.hits,
            "compiled": self.requests - self.hits,
            "hit_rate": self.hits / self.requests if directory and self.requests else None,
        }
