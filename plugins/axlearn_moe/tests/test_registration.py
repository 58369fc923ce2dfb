"""The installed distribution is a plugin: found, active, light, and it leads to code."""

from axcore.testing import PluginConformance


class TestPlugin(PluginConformance):
    distribution = "axlearn-moe"
