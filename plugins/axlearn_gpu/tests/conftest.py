"""What tests that compile for GPUs share."""

import importlib.util

import pytest


@pytest.fixture(scope="module")
def cuda_compiler(no_compile_cache):
    """XLA's compiler for GPUs, which needs none."""
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        pytest.skip("JAX's CUDA plugin is not installed: axlearn-gpu[aot]")
