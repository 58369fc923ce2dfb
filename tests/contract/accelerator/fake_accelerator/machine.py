"""The machine: what it is, how it is used, what its kernel serves. The rule alone needs JAX."""

import os

from axcore.errors import PluginError
from axcore.plugins import Instance


def resolve(name):
    """Returns a machine of an even number of devices, 2 to 8."""
    count = name.removeprefix("fake-x1-")
    if count not in ("2", "4", "6", "8"):
        raise PluginError(f"no fake-x1 has {count} devices", where=name, hint="try fake-x1-8")
    return Instance(
        name=name,
        family="fake-x1",
        platform="cpu",
        num_hosts=1,
        devices_per_host=int(count),
        hbm_bytes=2**30,
        peak_flops={"bfloat16": 1e12},
    )


def detect():
    """Returns what the environment says."""
    return os.environ.get("FAKE_X1")


def rule(traits, instance):
    """Shards over all devices, splits tensors over two, recomputes all."""
    from axcore.parallel import RematChoice, fully_sharded
    from axcore.remat import Remat

    everything = RematChoice(Remat("full"), whole=1)
    return fully_sharded(traits, instance, choices=[everything], model=2)


def supports_rms_norm(call):
    """Gives the reason why a call cannot be served, or None."""
    dim = call.device_shapes["x"][-1]
    return None if dim % 8 == 0 else f"needs a last dim that is a multiple of 8, got {dim}"
