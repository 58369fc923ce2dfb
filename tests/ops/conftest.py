"""Ops are tested with strict dtype promotion: a reference says where it changes precision."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield
