"""What every test may count on: eight simulated CPU devices, for this process only."""

import subprocess
import sys

import jax


def test_eight_cpu_devices_here():
    assert len(jax.devices()) == 8
    assert {d.platform for d in jax.devices()} == {"cpu"}


def test_started_processes_see_one_cpu_device():
    code = "import jax; print(len(jax.devices()), jax.default_backend())"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert output.split() == ["1", "cpu"]
