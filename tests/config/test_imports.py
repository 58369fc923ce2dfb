"""The config package stays cheap to import."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("heavy", ["jax", "numpy", "optax", "rich", "pluggy", "asyncio"])
def test_config_imports_nothing_heavy(heavy: str):
    code = f"import sys, axcore.config; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
