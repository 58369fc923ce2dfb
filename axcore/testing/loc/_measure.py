"""The whole measure: code bases before and after, counts, gate, fit, control, verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axcore.testing.loc._codebase import code_base, installed_bases
from axcore.testing.loc._configs import ConfigsResult, change_configs
from axcore.testing.loc._features import Feature
from axcore.testing.loc._fit import Fit, fit_growth
from axcore.testing.loc._flat import check_control, flat_code_base
from axcore.testing.loc._gate import Experiments, GateResult, run_gate
from axcore.testing.loc._normalize import Files, changed_lines
from axcore.testing.loc._probe import GateError
from axcore.testing.loc._published import COMPARED, PUBLISHED, SOURCE
from axcore.testing.loc._trees import imported

__all__ = ["FULL", "MAX_INTEGRATION_LINES", "QUICK", "Grid", "Report", "Row", "measure"]

MAX_INTEGRATION_LINES = 10


@dataclass(frozen=True)
class Grid:
    """The code bases to generate.

    Attributes:
        modules: The values of N.
        variants: The values of M.
        num_configs: Experiments for the snippet that adds all compared features.
        num_bases: At most so many installed experiments to derive modules from; None: all.
    """

    modules: tuple[int, ...]
    variants: tuple[int, ...]
    num_configs: int
    num_bases: int | None = None

    def sizes(self) -> list[tuple[int, int]]:
        """Returns every (N, M)."""
        return [(n, m) for n in self.modules for m in self.variants]


FULL = Grid(modules=(5, 10, 20, 40), variants=(1, 2, 4, 8), num_configs=1000)
QUICK = Grid(modules=(2, 3, 5), variants=(1, 2, 3), num_configs=30, num_bases=2)


@dataclass(frozen=True)
class Row:
    """One feature, measured.

    Attributes:
        name: Its name.
        title: One line.
        provider: Where its snippet comes from.
        counts: (N, M) -> changed lines of pre-existing files.
        fit: Their growth.
        integration_lines: Lines of the snippet in the experiment; None in the control.
        gate: What the gate found; None in the control.
    """

    name: str
    title: str
    provider: str
    counts: Mapping[tuple[int, int], int]
    fit: Fit
    integration_lines: int | None = None
    gate: GateResult | None = None

    @property
    def changed_lines(self) -> int:
        """Changed lines in the largest code base."""
        return self.counts[max(self.counts)]

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        data: dict[str, Any] = {
            "name": self.name,
            "class": self.fit.growth,
            "changed_lines": self.changed_lines,
            "title": self.title,
            "provider": self.provider,
            "counts": [{"n": n, "m": m, "lines": c} for (n, m), c in sorted(self.counts.items())],
            "coefficients": dict(self.fit.coefficients),
        }
        if self.gate is not None:
            data["integration_lines"] = self.integration_lines
            data["built"] = self.gate.num_built
            data["compared"] = self.gate.num_compared
            data["failures"] = [
                {"module": i, "variant": j, "reason": reason}
                for (i, j), reason in self.gate.failures.items()
            ]
            data["warnings"] = list(self.gate.warnings)
        return data


@dataclass(frozen=True)
class Report:
    """What ``axcore loc`` found.

    Attributes:
        features: Those that could be measured.
        skipped: Name -> why it could not.
        control: The flat control style, feature by feature.
        configs: The snippet on many experiments, or None where a compared feature is skipped.
        grid: The code bases.
        bases: Installed experiments that modules derive from.
        snippets: Name -> the snippet in the experiment.
        problems: What is not as it should be; empty when all is well.
    """

    features: tuple[Row, ...]
    skipped: Mapping[str, str]
    control: tuple[Row, ...]
    configs: ConfigsResult | None
    grid: Grid
    bases: tuple[str, ...]
    snippets: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the document of ``axcore loc --json``."""
        configs = self.configs
        return {
            "features": [row.to_json() for row in self.features],
            "skipped": [{"name": n, "reason": r} for n, r in self.skipped.items()],
            "control": [row.to_json() for row in self.control],
            "configs": None if configs is None else vars(configs),
            "grid": {"modules": list(self.grid.modules), "variants": list(self.grid.variants)},
            "bases": list(self.bases),
            "snippets": dict(self.snippets),
            "published": {
                "source": SOURCE,
                "models": 20,
                "variants": 10,
                "systems": [
                    {"system": name, **dict(zip(COMPARED, lines, strict=True))}
                    for name, lines in PUBLISHED.items()
                ],
            },
            "ok": not self.problems,
            "problems": list(self.problems),
        }


def measure(
    features: Iterable[Feature],
    grid: Grid,
    progress: Callable[[str, int, int], None] | None = None,
    *,
    control: Iterable[Feature] | None = None,
) -> Report:
    """Measures features over generated code bases.

    Args:
        features: See :func:`axcore.testing.loc.find_features`.
        grid: The code bases.
        progress: Called with (what, done, of how many).
        control: Features for the flat control style, of which those with a flat section are
            taken; None takes ``features``.
    """
    told = progress or (lambda what, done, total: None)
    features = tuple(features)
    missing = {feature.name: feature.missing() for feature in features}
    present = [feature for feature in features if missing[feature.name] is None]
    skipped = {name: reason for name, reason in missing.items() if reason is not None}
    bases = installed_bases(grid.num_bases)
    before = {size: code_base(*size, bases) for size in grid.sizes()}
    with imported(before[max(before)]) as base:
        experiments = Experiments(base)
        rows = [_row(feature, before, experiments, told) for feature in present]
        compared = [feature for feature in present if feature.name in COMPARED]
        configs = None
        if len(compared) == len(COMPARED):
            configs = change_configs(
                experiments, compared, grid.num_configs, _counter("configs", grid.num_configs, told)
            )
    flat = [f for f in (features if control is None else control) if f.flat is not None]
    control_rows, control_problems = _control(flat, grid, told)
    report = Report(
        tuple(rows),
        skipped,
        tuple(control_rows),
        configs,
        grid,
        bases,
        {feature.name: feature.integration for feature in present},
    )
    problems = (*_problems(report), *control_problems)
    return Report(**{**vars(report), "problems": problems})


def _row(
    feature: Feature,
    before: Mapping[tuple[int, int], Files],
    experiments: Experiments,
    told: Callable[[str, int, int], None],
) -> Row:
    counts = {size: changed_lines(files, feature.edited(files)) for size, files in before.items()}
    largest = before[max(before)]
    edited = feature.edited(largest)
    tick = _counter(feature.name, len(experiments.pairs()), told)
    if edited == largest:
        gate = run_gate(experiments, experiments, feature, tick)
        left = experiments.base.read(largest)
    else:
        with imported(edited) as base:
            gate = run_gate(experiments, Experiments(base), feature, tick)
            left = base.read(edited)
    if left != edited:
        raise GateError(f"{feature.name} has changed files of the code base while it ran")
    return Row(
        feature.name,
        feature.title,
        feature.provider,
        counts,
        fit_growth(counts),
        feature.integration_lines,
        gate,
    )


def _control(
    features: Sequence[Feature], grid: Grid, told: Callable[[str, int, int], None]
) -> tuple[list[Row], list[str]]:
    """Measures the flat style, and checks that its features work there."""
    rows: list[Row] = []
    problems: list[str] = []
    before = {size: flat_code_base(*size) for size in grid.sizes()}
    largest = max(before)
    with imported(before[largest]) as plain:
        for feature in features:
            after = {size: flat_code_base(*size, feature) for size in grid.sizes()}
            counts = {size: changed_lines(before[size], after[size]) for size in before}
            rows.append(
                Row(feature.name, feature.title, feature.provider, counts, fit_growth(counts))
            )
            pairs = [(i, j) for i in range(largest[0]) for j in range(largest[1]) if 0 in (i, j)]
            tick = _counter(f"control: {feature.name}", len(pairs), told)
            with imported(after[largest]) as changed:
                for pair in pairs:
                    try:
                        check_control(plain, changed, feature, pair)
                    except GateError as error:
                        problems.append(f"control, {pair}: {error.message}")
                    tick()
    return rows, problems


def _problems(report: Report) -> list[str]:
    found: list[str] = []
    for row in report.features:
        assert row.gate is not None and row.integration_lines is not None
        for (i, j), reason in list(row.gate.failures.items())[:3]:
            found.append(f"{row.name}: module {i}, variant {j}: {reason}")
        if len(row.gate.failures) > 3:
            found.append(f"{row.name}: {len(row.gate.failures)} experiments fail in all")
        if row.fit.growth != "O(1)" or row.changed_lines:
            found.append(
                f"{row.name}: {row.fit.growth}, {row.changed_lines} changed lines; expected O(1), 0"
            )
        if row.integration_lines > MAX_INTEGRATION_LINES:
            found.append(
                f"{row.name}: {row.integration_lines} integration lines, expected at most "
                f"{MAX_INTEGRATION_LINES}"
            )
    for row in report.control:
        if row.fit.growth != "O(NM)":
            found.append(f"control, {row.name}: {row.fit.growth}, expected O(NM): the harness errs")
    if not report.control:
        found.append("no feature has a flat section: nothing shows that the harness counts")
    configs = report.configs
    if configs is not None and not (
        configs.num_built == configs.num_configs == report.grid.num_configs
    ):
        found.append(
            f"one snippet: {configs.num_built} of {configs.num_configs} different experiments "
            f"built, expected {report.grid.num_configs}: {'; '.join(configs.failures)}"
        )
    return found


def _counter(what: str, total: int, told: Callable[[str, int, int], None]) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        told(what, done, total)

    told(what, 0, total)
    return tick
