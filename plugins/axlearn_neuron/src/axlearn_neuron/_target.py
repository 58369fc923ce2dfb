"""The machine that a kernel is traced for."""

from __future__ import annotations

from axcore.errors import PluginError
from axcore.ops import ambient_target
from axlearn_neuron.instances import resolve

__all__ = ["cores_per_device"]


def cores_per_device() -> int:
    """Returns the physical cores behind a JAX device (LNC); 1 where no machine is known."""
    target = ambient_target()
    try:
        instance = resolve("" if target is None else target.instance)
    except PluginError:
        return 1  # a target of another platform, or none
    return int(instance.attributes["physical_cores_per_device"])
