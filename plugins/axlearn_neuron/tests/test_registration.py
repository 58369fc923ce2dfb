"""The installed distribution is a plugin: found, active, light, and it leads to code."""

import importlib.util

import pytest

from axcore.testing import PluginConformance


class TestPlugin(PluginConformance):
    distribution = "axlearn-neuron"


@pytest.mark.skipif(
    importlib.util.find_spec("jax_neuronx") is not None, reason="the vendor's packages are here"
)
def test_what_only_the_vendors_packages_can_load_is_skipped_by_name(plugin_host):
    with pytest.raises(pytest.skip.Exception, match="attention_nki needs jax_neuronx"):
        TestPlugin().test_targets_lead_to_code(plugin_host)
