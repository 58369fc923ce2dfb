"""Runs the suites on everything that one distribution registers; for ``axcore plugins check``."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_name

from axcore.errors import AxcoreError, PluginError

__all__ = ["Check", "check_distribution", "suites"]

_SECONDS = 1800
_MODULE = """\
import json
import pathlib

import jax

jax.config.update("jax_num_cpu_devices", 8)  # to split dims over, where there is no accelerator

from axcore.testing._check import suites

made = suites({distribution!r})
globals().update(made)
told = {{name: [suite.__mro__[1].__name__, suite.subject] for name, suite in made.items()}}
pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(told))
"""


@dataclasses.dataclass(frozen=True)
class Check:
    """One test of a suite.

    Attributes:
        suite: The suite's class, such as ``KernelConformance``.
        subject: What was checked, such as ``rms_norm.acme``.
        test: The test and its case.
        outcome: How it ended.
        reason: Why it failed or was skipped, in one line.
    """

    suite: str
    subject: str
    test: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str = ""

    def to_json(self) -> dict[str, str]:
        """The JSON object of ``axcore plugins check NAME``."""
        return dataclasses.asdict(self)


def check_distribution(distribution: str) -> list[Check]:
    """Runs every suite that fits what a distribution registers, in a process of its own.

    Args:
        distribution: Its name.

    Returns:
        One record for each test, in the order in which they ran.

    Raises:
        PluginError: pytest is not installed, or it could not run.
    """
    if importlib.util.find_spec("pytest") is None:
        raise PluginError(
            "the suites need pytest, which is not installed",
            code="AX417",
            hint="pip install pytest; without a NAME the command needs nothing",
        )
    with tempfile.TemporaryDirectory() as folder:
        module, report = Path(folder) / "test_plugin.py", Path(folder) / "report.xml"
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")  # so that none further up is read
        module.write_text(_MODULE.format(distribution=distribution))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", str(module), "-q", f"--junitxml={report}"),
                *("--rootdir", folder, "-p", "no:cacheprovider"),
            ],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode not in (0, 1) or not report.exists():
            raise PluginError(
                f"pytest ended with {done.returncode} before it had checked {distribution}",
                code="AX417",
                hint=(done.stdout + done.stderr).strip()[-500:],
            )
        subjects = json.loads(module.with_suffix(".json").read_text())
        return list(_read(ElementTree.parse(report), subjects))


def suites(distribution: str) -> dict[str, type]:
    """Returns test classes, by name, for what a distribution registers.

    Layers take part where a role of core says how they are called and ``input_dim`` is all that
    their config needs; the package's own tests check the others.
    """
    from axcore.plugins import host

    from ._backends import BackendConformance
    from ._kernels import KernelConformance
    from ._plugins import PluginConformance
    from ._quantization import QuantizationConformance

    owner, plugins = canonicalize_name(distribution), host()

    def owned(registry: Any) -> list[Any]:
        return [spec for _, spec, name in registry.items() if name == owner]

    made: dict[str, type] = {}

    def add(base: type, subject: str, **attributes: Any) -> None:
        words = re.findall(r"[A-Za-z0-9]+", subject)
        name = f"Test{base.__name__}_{'_'.join(words)}"
        made[name] = type(name, (base,), {"subject": subject, **attributes})

    add(PluginConformance, owner, distribution=owner)
    if owned(plugins.instance_types):
        add(BackendConformance, owner, distribution=owner)
    for spec in owned(plugins.kernels):
        add(KernelConformance, spec.name, op=spec.op, implementation=spec.implementation)
    for spec in owned(plugins.quantization):
        if "serving" not in spec.scope:
            add(QuantizationConformance, spec.name, recipe=spec.name)
    for spec in owned(plugins.layers):
        suite = _layer_suite(plugins.layers.load(spec.name))
        if suite is not None:
            add(suite, spec.name)
    return made


def _layer_suite(layer: Any) -> type | None:
    """A suite for a layer whose call is known from its role, or None."""
    import jax
    import jax.numpy as jnp

    from axcore import layers

    from ._layers import LayerConformance

    with_info = (layers.BaseFeedForward, layers.BaseAttention, layers.BaseTransformerLayer)
    if not issubclass(layer, (*with_info, layers.BaseNorm)):
        return None

    def config(self: Any) -> Any:
        del self
        return layer.Config(input_dim=16)

    def inputs(self: Any, key: jax.Array) -> tuple[Any, ...]:
        del self
        x = jax.random.normal(key, (2, 4, 16))
        positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
        return (
            (x, layers.SequenceInfo(positions=positions)) if issubclass(layer, with_info) else (x,)
        )

    try:
        config(None).instantiate(name="layer")
    except AxcoreError:
        return None  # it needs more than a width: its own tests know what
    return type("LayerConformance", (LayerConformance,), {"config": config, "inputs": inputs})


def _read(report: Any, subjects: Mapping[str, Sequence[str]]) -> Iterator[Check]:
    """The tests of a JUnit report."""
    for case in report.iter("testcase"):
        name = case.get("classname", "").rpartition(".")[2]
        suite, subject = subjects.get(name, (name, ""))
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = (child.get("message") or "").strip().partition("\n")[0]
        yield Check(suite, subject, case.get("name", ""), outcome, reason)
