"""What the TPU compiler says without libtpu: environment, limits, refusals, and the way to it."""

import os

import pytest

from axcore.errors import AotError
from axcore.parallel import resolve_instance
from axcore.parallel.aot import OutOfMemory, compiler_for
from axlearn_tpu import compiler as module
from axlearn_tpu.compiler import TpuCompiler

GIB = 2**30


def test_it_serves_every_slice():
    for name in ("tpu-v4-8", "tpu-v5e-256-4", "tpu-7x-4"):
        assert isinstance(compiler_for(resolve_instance(name)), TpuCompiler)


def test_preparing_leaves_what_the_user_has_set(monkeypatch):
    for name in module._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_LOG_DIR", "/var/log/tpu")
    TpuCompiler().prepare()
    TpuCompiler().prepare()
    assert os.environ["TPU_LOG_DIR"] == "/var/log/tpu"
    assert os.environ["TPU_SKIP_MDS_QUERY"] == os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    for name in module._ENVIRONMENT:
        monkeypatch.delenv(name)  # prepare set it behind monkeypatch's back


def test_without_libtpu_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    instance = resolve_instance("tpu-v5e-8")
    for call in (TpuCompiler().version, lambda: TpuCompiler().devices(instance)):
        with pytest.raises(AotError, match="libtpu is not installed") as caught:
            call()
        assert caught.value.code == "AX480"
        assert 'pip install "axlearn-tpu[aot]"' in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (16.09G) exceeds available HBM (15.75G).",
            16.09 * GIB,
            15.75 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (8.00T) exceeds available HBM (94.75G).",
            8 * 1024 * GIB,
            94.75 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 25.93G of 15.48G hbm. Exceeded hbm capacity by 10.45G.\n\nTotal hbm "
            "usage >= 26.44G:\n    reserved        530.00M\n",
            25.93 * GIB,
            15.48 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: Program hbm requirement 512.5M: ...", 512.5 * 2**20, None),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.", None, None),
    ],
)
def test_refusals_for_lack_of_memory_are_read(text, needed, available):
    expected = [None if n is None else round(n) for n in (needed, available)]
    assert TpuCompiler().out_of_memory(RuntimeError(text)) == OutOfMemory(*expected)


@pytest.mark.parametrize(
    "text",
    [
        "INVALID_ARGUMENT: No such compile option: 'xla_tpu_fast'",
        # A kernel that overflows on-chip memory is wrong on every mesh and every slice.
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for "
        "%custom-call. Scoped allocation with size 20.07M and limit 16.00M exceeded scoped vmem "
        "limit by 4.07M.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.1M of 1.0M smem.",
    ],
)
def test_other_errors_are_not_taken_for_it(text):
    assert TpuCompiler().out_of_memory(RuntimeError(text)) is None


def test_a_program_may_use_less_than_the_chip_has():
    for name in ("tpu-v4-8", "tpu-v5e-8", "tpu-v6e-8", "tpu-7x-4"):
        instance = resolve_instance(name)
        limit = TpuCompiler().memory_limit_bytes(instance)
        assert 0.95 * instance.hbm_bytes < limit < instance.hbm_bytes
