"""The installed distribution registers with axcore, and its plugin module stays light."""

import importlib.util
import subprocess
import sys

import pytest

import axlearn_neuron
from axcore.plugins import host
from axcore.testing._check import suites


def test_appears_among_the_records_as_active():
    records = {record.distribution: record for record in host().records}
    record = records["axlearn-neuron"]
    assert record.status == "active", record.reason
    assert record.version == axlearn_neuron.__version__


def test_plugin_module_imports_no_jax():
    code = "import sys, axlearn_neuron.plugin; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(
    importlib.util.find_spec("jax_neuronx") is not None, reason="the vendor's packages are here"
)
def test_plugins_check_skips_what_only_the_vendors_packages_can_load():
    suite = suites("axlearn-neuron")["TestPluginConformance_axlearn_neuron"]
    assert suite.optional_packages == ("jax_neuronx",)
    with pytest.raises(pytest.skip.Exception, match="attention_nki needs jax_neuronx"):
        suite().test_targets_lead_to_code(host())
