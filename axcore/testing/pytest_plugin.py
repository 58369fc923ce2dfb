"""Fixtures for tests of plugins; pytest loads this module wherever axcore is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from axcore.plugins import PluginHost


@pytest.fixture(scope="session")
def plugin_host() -> PluginHost:
    """The host with all installed plugins and none of the environment's filters."""
    from axcore.plugins import PluginHost

    return PluginHost()


@pytest.fixture(scope="module")
def no_compile_cache() -> Iterator[None]:
    """Compiles anew: JAX cannot read back from its cache what was compiled without a device."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings: Any = jax.config  # its attributes are made at run time
    former = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX remembers whether it was on
    yield
    jax.config.update("jax_enable_compilation_cache", former)
    compilation_cache.reset_cache()
