"""The gate: every code base with a feature builds, and the feature does what it should there.

Every pair of module and variant is built with the feature and looked at. The numbers are compared
on pairs in which every module and every variant occurs: (i, 0) for all i and (0, j) for all j. A
module reads the same in every code base, so a pair is examined once and counts for all code bases
that it is part of.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from axcore.config import ConfigWarning
from axcore.plugins import Candidate, PluginHost, find_candidates, host, reset_host
from axcore.testing.loc._codebase import added_files
from axcore.testing.loc._features import Feature
from axcore.testing.loc._probe import GateError, Probe, build
from axcore.testing.loc._trees import CodeBase

__all__ = ["Experiments", "GateResult", "installed", "run_gate"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class GateResult:
    """What the gate found.

    Attributes:
        num_built: Experiments built with the feature.
        num_compared: Of these, the ones whose numbers were compared.
        failures: (module, variant) -> what is wrong.
        warnings: What the snippet was warned of, each text once: edits that it loses.
    """

    num_built: int
    num_compared: int
    failures: Mapping[Pair, str]
    warnings: tuple[str, ...] = ()


class Experiments:
    """The experiments of a code base, made once and copied.

    Attributes:
        base: The code base.
        num_modules: N.
        num_variants: M.
    """

    def __init__(self, base: CodeBase):
        self.base = base
        self._catalog = base.module("catalog.py")
        self._configs: dict[Pair, Any] = {}
        self._models: dict[Pair, Any] = {}
        self._probes: dict[Pair, Probe] = {}
        self.num_modules = len(self._catalog.MODULES)
        self.num_variants = len(self._catalog.VARIANTS)

    def pairs(self) -> list[Pair]:
        """Returns all (module, variant)."""
        return [(i, j) for i in range(self.num_modules) for j in range(self.num_variants)]

    def config(self, pair: Pair, **sizes: int) -> Any:
        """Returns a fresh config."""
        if sizes:
            return self._catalog.experiment(*pair, **sizes)
        if pair not in self._configs:
            self._configs[pair] = self._catalog.experiment(*pair)
        return self._configs[pair].copy()

    def probe(self, pair: Pair, after: Any, after_model: Any) -> Probe:
        """Returns a probe that shares what is known of the experiment before."""
        if pair not in self._probes:
            before = self.config(pair)
            self._probes[pair] = Probe(before, before, build(before), None)
        known = self._probes[pair]
        probe = Probe(known.before, after, known.before_model, after_model)
        probe.before_params, probe.before_logits = known.before_params, known.before_logits
        return probe


def run_gate(
    before: Experiments, after: Experiments, feature: Feature, on_pair: Callable[[], None]
) -> GateResult:
    """Adds a feature to a code base on disk and examines every experiment with it.

    Args:
        before: The experiments of the code base without the feature.
        after: Those of the code base that the feature is added to; the same unless it edits files.
        feature: The feature.
        on_pair: Called after each pair, for progress.
    """
    after.base.add(added_files(feature))
    failures: dict[Pair, str] = {}
    warned: dict[str, None] = {}
    num_built = num_compared = 0
    with installed(after.base, feature):
        integrate, checks = snippet(after.base, feature)
        for pair in after.pairs():
            try:
                cfg = after.config(pair)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", ConfigWarning)
                    integrate(cfg)
                warned |= {str(warning.message): None for warning in caught}
                model = build(cfg)
                num_built += 1
                if not checks.is_present(cfg, model):
                    raise GateError(f"{feature.name} is not in the built model")
                if 0 in pair:
                    checks.check(before.probe(pair, cfg, model))
                    num_compared += 1
            except Exception as error:  # whatever the code of a feature raises is its failure
                failures[pair] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            on_pair()
    return GateResult(num_built, num_compared, failures, tuple(warned))


def snippet(base: CodeBase, feature: Feature) -> tuple[Callable[[Any], Any], Any]:
    """Returns ``integrate`` of a feature's experiment, and the module of its checks."""
    experiment = base.module(f"added/{feature.name}/experiment.py")
    return experiment.integrate, base.module(f"added/{feature.name}/check.py")


@contextmanager
def installed(base: CodeBase, feature: Feature) -> Iterator[None]:
    """Registers a feature that is a plugin, as if its distribution were installed."""
    name = f"{base.name}.added.{feature.name}.plugin"
    if importlib.util.find_spec(name) is None:
        yield
        return
    candidate = Candidate(
        distribution=f"acme-{feature.name.replace('_', '-')}",
        version="1.0",
        name=f"acme-{feature.name.replace('_', '-')}",
        load=lambda: importlib.import_module(name),
        packages=frozenset({base.name}),
    )
    active = {(r.distribution, r.name) for r in host(check=False).active_records()}
    others = [c for c in find_candidates() if (c.distribution, c.name) in active]
    former = reset_host(PluginHost([*others, candidate]))
    try:
        host().check_required([candidate.distribution])
        yield
    finally:
        reset_host(former)
