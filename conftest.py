"""Set-up shared by all tests, those of the plugins included: devices, hypothesis."""

import os

import hypothesis

# Inherited by the processes that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # after the platform is chosen

NUM_CPU_DEVICES = 8

# In this process only: a command that a test starts sees one device unless it asks for more.
jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)

# No compilation cache: programs of several CPU devices that are read back from it can deadlock
# (jaxlib 0.10.2), and reruns would be no faster for the others by much.

# Compile times say nothing about a property, and CI must fail on the same examples as the desk.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
