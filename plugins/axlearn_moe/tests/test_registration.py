"""The installed distribution registers with axcore, and its plugin module stays light."""

import subprocess
import sys

import axlearn_moe
from axcore.plugins import host


def test_appears_among_the_records_as_active():
    records = {record.distribution: record for record in host().records}
    record = records["axlearn-moe"]
    assert record.status == "active", record.reason
    assert record.version == axlearn_moe.__version__


def test_plugin_module_imports_no_jax():
    code = "import sys, axlearn_moe.plugin; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
