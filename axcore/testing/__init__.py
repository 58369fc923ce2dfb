"""For plugin authors: conformance suites to subclass, and fixtures. Imports nothing heavy.

Subclass a suite in a test module, under a name that starts with ``Test``:

Example:
    ```python
    from axcore.testing import PluginConformance

    class TestPlugin(PluginConformance):
        distribution = "acme-kernels"
    ```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.lazy import lazy_attributes

if TYPE_CHECKING:
    from ._backends import BackendConformance as BackendConformance
    from ._decoding import check_cached_decode as check_cached_decode
    from ._distributions import only_distribution as only_distribution
    from ._distributions import write_distribution as write_distribution
    from ._kernels import KernelCase as KernelCase
    from ._kernels import KernelConformance as KernelConformance
    from ._layers import LayerConformance as LayerConformance
    from ._pages import run_page as run_page
    from ._plugins import PluginConformance as PluginConformance
    from ._processes import run_processes as run_processes
    from ._programs import equations as equations
    from ._quantization import QuantizationConformance as QuantizationConformance
    from ._rules import DENSE_7B as DENSE_7B
    from ._rules import DENSE_70B as DENSE_70B
    from ._rules import FitCase as FitCase
    from ._rules import RuleChoices as RuleChoices
    from ._rules import apply_rule as apply_rule

_PUBLIC = {
    "BackendConformance": "axcore.testing._backends",
    "DENSE_70B": "axcore.testing._rules",
    "DENSE_7B": "axcore.testing._rules",
    "FitCase": "axcore.testing._rules",
    "KernelCase": "axcore.testing._kernels",
    "KernelConformance": "axcore.testing._kernels",
    "LayerConformance": "axcore.testing._layers",
    "PluginConformance": "axcore.testing._plugins",
    "QuantizationConformance": "axcore.testing._quantization",
    "RuleChoices": "axcore.testing._rules",
    "apply_rule": "axcore.testing._rules",
    "check_cached_decode": "axcore.testing._decoding",
    "equations": "axcore.testing._programs",
    "only_distribution": "axcore.testing._distributions",
    "run_page": "axcore.testing._pages",
    "run_processes": "axcore.testing._processes",
    "write_distribution": "axcore.testing._distributions",
}

__all__ = [
    "DENSE_7B",
    "DENSE_70B",
    "BackendConformance",
    "FitCase",
    "KernelCase",
    "KernelConformance",
    "LayerConformance",
    "PluginConformance",
    "QuantizationConformance",
    "RuleChoices",
    "apply_rule",
    "check_cached_decode",
    "equations",
    "only_distribution",
    "run_page",
    "run_processes",
    "write_distribution",
]

__getattr__, __dir__ = lazy_attributes(globals(), _PUBLIC)
