"""The installed distribution is a plugin: found, active, light, and it leads to code."""

import axlearn_rope
from axcore.testing import PluginConformance


class TestPlugin(PluginConformance):
    distribution = "axlearn-rope"


def test_registers_the_layer_and_the_modifier(plugin_host):
    assert plugin_host.modifiers.load("axlearn-rope:rope") is axlearn_rope.RoPEModifier
    assert plugin_host.layers.load("RoPE") is axlearn_rope.RoPE
    for kind, name in ((plugin_host.modifiers, "axlearn-rope:rope"), (plugin_host.layers, "RoPE")):
        assert kind.owner(name) == "axlearn-rope"


def test_every_public_name_is_there():
    for name in axlearn_rope.__all__:
        assert getattr(axlearn_rope, name) is not None
        assert name in dir(axlearn_rope)
