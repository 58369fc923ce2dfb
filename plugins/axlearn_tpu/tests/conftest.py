"""What tests that compile for TPUs share."""

import pytest


@pytest.fixture(scope="module")
def libtpu(no_compile_cache):
    """The compiler for TPUs, which needs none."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: axlearn-tpu[aot]")
