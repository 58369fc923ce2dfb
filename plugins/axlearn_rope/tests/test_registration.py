"""The installed distribution registers with axcore, and its plugin module stays light."""

import subprocess
import sys

import axlearn_rope
from axcore.plugins import host


def test_appears_among_the_records_as_active():
    records = {record.distribution: record for record in host().records}
    record = records["axlearn-rope"]
    assert record.status == "active", record.reason
    assert record.version == axlearn_rope.__version__


def test_plugin_module_imports_no_jax():
    code = "import sys, axlearn_rope.plugin; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_registers_the_layer_and_the_modifier(plugin_host):
    assert plugin_host.modifiers.load("axlearn-rope:rope") is axlearn_rope.RoPEModifier
    assert plugin_host.layers.load("RoPE") is axlearn_rope.RoPE
    for kind, name in ((plugin_host.modifiers, "axlearn-rope:rope"), (plugin_host.layers, "RoPE")):
        assert kind.owner(name) == "axlearn-rope"


def test_every_public_name_is_there():
    for name in axlearn_rope.__all__:
        assert getattr(axlearn_rope, name) is not None
        assert name in dir(axlearn_rope)
