"""What the repository's ``conftest.py`` sets up for every test."""

from __future__ import annotations

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def cache(tmp_path):
    """A compile cache of the test's own, which keeps every program."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    former = {name: getattr(jax.config, name) for name in options}

    def use(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(options)
    yield tmp_path
    use(former)


def triple(x):
    return 3 * x


def test_half_an_entry_of_the_compile_cache_is_no_failure(cache):
    assert jax.jit(lambda x: triple(x))(2.0) == 6.0
    entries = list(cache.glob("*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])
    assert jax.jit(lambda x: triple(x))(2.0) == 6.0
