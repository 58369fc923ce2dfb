"""Set-up shared by all tests, those of the plugins included: devices, compile cache, hypothesis."""

import contextlib
import getpass
import os
import re
import tempfile
from pathlib import Path

import hypothesis
import pytest

# Inherited by the processes that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # after the platform is chosen
from jax.experimental.compilation_cache import compilation_cache

NUM_CPU_DEVICES = 8

# In this process only: a command that a test starts sees one device unless it asks for more.
jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)

# Small programs are compiled over and over, in one run and in the next. One folder per worker:
# entries are not written atomically.
_cache = Path(
    tempfile.gettempdir(),
    f"axcore-tests-{getpass.getuser()}",
    f"jax-{jax.__version__}",
    os.environ.get("PYTEST_XDIST_WORKER", "main"),
)
_cache.mkdir(mode=0o700, parents=True, exist_ok=True)
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_configure(config):
    # Half an entry is what a run leaves that was killed while it wrote; its program is compiled.
    torn = "Error reading persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", f"ignore:{torn}:UserWarning")


# What tells a file whose programs are for several devices, and a test of the conformance suites.
_SEVERAL_DEVICES = re.compile(r"mesh|MeshShape|shard_map|target_of|KernelConformance|cpu-\d")
_ONE_TEST = "test_sharded_equals_unsharded"


@contextlib.contextmanager
def _no_cache():
    """Programs of several CPU devices that are read back can deadlock (jaxlib 0.10.2)."""
    former = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", former)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def _no_cache_for_files_of_several_devices(request):
    several = _SEVERAL_DEVICES.search(Path(request.path).read_text("utf-8"))
    with _no_cache() if several else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _no_cache_for_a_test_of_several_devices(request):
    with _no_cache() if request.node.name.startswith(_ONE_TEST) else contextlib.nullcontext():
        yield


# How long an example takes, compiled or on a busy machine, says nothing about a property. CI draws
# the same examples every time, so that no change is refused by chance.
_PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("dev", **_PATIENT)
hypothesis.settings.register_profile("ci", **_PATIENT, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
