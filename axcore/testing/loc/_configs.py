"""One snippet on a thousand experiments: each is changed, built and looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from axcore.testing.loc._codebase import added_files
from axcore.testing.loc._features import Feature
from axcore.testing.loc._gate import Experiments, installed, snippet
from axcore.testing.loc._probe import build

__all__ = ["ConfigsResult", "change_configs"]

_WIDTHS = (16, 24, 32, 40, 48, 64, 80, 96)
_DEPTHS = (1, 2)


@dataclass(frozen=True)
class ConfigsResult:
    """What one snippet did to many experiments.

    Attributes:
        features: What the snippet adds.
        integration_lines: Its lines.
        num_configs: Experiments; no two have the same text.
        num_built: Of these, the ones whose model was built with every feature in it.
        failures: The first few that were not: which, and why.
    """

    features: tuple[str, ...]
    integration_lines: int
    num_configs: int
    num_built: int
    failures: tuple[str, ...]


def change_configs(
    experiments: Experiments, features: Sequence[Feature], count: int, on_config: Callable[[], None]
) -> ConfigsResult:
    """Applies the snippets of several features, one after the other, to generated experiments.

    Args:
        experiments: Of a code base; every module with every variant, in several widths and depths.
        features: The features.
        count: How many experiments.
        on_config: Called after each, for progress.
    """
    base = experiments.base
    for feature in features:
        if not (base.path / "added" / feature.name).exists():
            base.add(added_files(feature))
    failures: list[str] = []
    seen: set[str] = set()
    num_built = 0
    with ExitStack() as stack:
        parts = []
        for feature in features:
            stack.enter_context(installed(base, feature))
            parts.append(snippet(base, feature))
        for module, variant, depth, width in itertools.islice(_sizes(experiments), count):
            cfg = experiments.config((module, variant), num_layers=depth, model_dim=width)
            seen.add(cfg.fingerprint())
            try:
                for integrate, _ in parts:
                    integrate(cfg)
                model = build(cfg)
                absent = [
                    feature.name
                    for feature, (_, checks) in zip(features, parts, strict=True)
                    if not checks.is_present(cfg, model)
                ]
                if absent:
                    raise ValueError(f"{', '.join(absent)} is not in the built model")
                num_built += 1
            except Exception as error:  # whatever a snippet raises is its failure
                failures.append(f"module {module}, variant {variant}, {width} x {depth}: {error}")
            on_config()
    return ConfigsResult(
        tuple(feature.name for feature in features),
        sum(feature.integration_lines for feature in features),
        len(seen),
        num_built,
        tuple(failures[:5]),
    )


def _sizes(experiments: Experiments) -> Iterator[tuple[int, int, int, int]]:
    for depth in _DEPTHS:
        for width in _WIDTHS:
            for module, variant in experiments.pairs():
                yield module, variant, depth, width
