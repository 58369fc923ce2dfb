"""``axcore loc``: lines of existing code that adding a feature changes, as a code base grows."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axcore.cli._console import say
from axcore.cli._result import CommandResult, Subparsers, add_command

if TYPE_CHECKING:
    from axcore.testing.loc import Landing, Report

__all__ = ["add_parser", "loc"]

_MARGIN = "  "


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``loc``."""
    command = add_command(
        subparsers,
        "loc",
        loc,
        help="measure the lines of existing code that adding a feature changes",
        example="axcore loc --json\naxcore loc --quick --feature norm --git",
    )
    command.add_argument(
        "--quick", action="store_true", help="smaller code bases: seconds, and a coarser fit"
    )
    command.add_argument(
        "--feature",
        dest="features",
        metavar="NAME",
        action="append",
        default=[],
        help="only this feature; repeatable (default: all of core and the plugins)",
    )
    command.add_argument(
        "--folder",
        dest="folders",
        metavar="DIR",
        action="append",
        default=[],
        type=Path,
        help="take features from the files of this folder too; repeatable",
    )
    command.add_argument(
        "--git",
        action="store_true",
        help="add what the commits that landed each plugin changed elsewhere (in a checkout)",
    )


def loc(args: argparse.Namespace) -> CommandResult:
    """Measures; exit code 4 when something is not as it should be.

    Raises:
        CliError: There is no such feature, a feature's file is malformed, or ``--git`` is given
            outside of a checkout.
    """
    from axcore.cli._jax import jax_started
    from axcore.parallel import prepare_host, resolve_instance
    from axcore.testing.loc import (
        COMPARED,
        FULL,
        QUICK,
        find_checkout,
        find_features,
        landings,
        measure,
    )

    landed = landings(find_checkout()) if args.git else None
    features = find_features(args.features, args.folders)
    flat = [feature for feature in features if feature.flat is not None]
    prepare_host(resolve_instance("cpu"))
    with jax_started(), _quiet_config(), _progress() as progress:
        report = measure(
            features,
            QUICK if args.quick else FULL,
            progress,
            control=flat or find_features(["logit_cap"]),
        )
    if not args.features:
        absent = [name for name in COMPARED if name not in {f.name for f in features}]
        reasons = dict.fromkeys(absent, "no active plugin brings it")
        report = dataclasses.replace(report, skipped={**report.skipped, **reasons})
    data = report.to_json()
    if landed is not None:
        data["git"] = [landing.to_json() for landing in landed]
    return CommandResult(data, _text(report, landed), exit_code=4 if report.problems else 0)


@contextmanager
def _quiet_config() -> Iterator[None]:
    """Leaves out what replacements say: there are thousands, in code that nobody keeps."""
    logger = logging.getLogger("axcore.config")
    former = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(former)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar when stderr is a terminal, else a line for each step."""
    if not sys.stderr.isatty():

        def line(what: str, done: int, total: int) -> None:
            if done == total:
                say(f"{what}: {total} experiments")

        yield line
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("start", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _text(report: Report, landed: list[Landing] | None) -> str:
    from axcore.testing.loc import COMPARED, PUBLISHED, SOURCE

    grid = report.grid
    lines = [
        f"lines of existing code changed to add a feature, N = {_listed(grid.modules)} modules,"
        f" M = {_listed(grid.variants)} variants;",
        f"modules derive from {', '.join(report.bases)}",
        "",
        *_table(
            ("feature", "class", "changed", "integration", "built", "compared", "what"),
            [
                (
                    row.name,
                    row.fit.growth,
                    row.changed_lines,
                    row.integration_lines,
                    row.gate.num_built,
                    row.gate.num_compared,
                    row.title,
                )
                for row in report.features
                if row.gate is not None
            ],
        ),
    ]
    lines += [f"skipped: {name}: {reason}" for name, reason in report.skipped.items()]
    lines += ["", "the control: the same features in a flat style"]
    lines += _table(
        ("feature", "class", "changed"),
        [(row.name, row.fit.growth, row.changed_lines) for row in report.control],
    )
    configs = report.configs
    if configs is not None:
        lines += [
            "",
            f"one snippet of {configs.integration_lines} lines for {' and '.join(configs.features)}"
            f" applied to {configs.num_configs} experiments, {configs.num_built} built with it",
        ]
    ours = {row.name: row for row in report.features}
    here = [str(ours[n].changed_lines) if n in ours else "-" for n in COMPARED]
    published = [
        (system, *("-" if count is None else str(count) for count in counts))
        for system, counts in PUBLISHED.items()
    ]
    lines += ["", f"published, for 20 models x 10 attention variants ({SOURCE}), and here"]
    lines += _table(("system", *COMPARED), [*published, ("axcore, measured above", *here)])
    if landed is not None:
        lines += ["", "from git: lines outside a plugin's folder in the commits that landed it"]
        lines += _table(
            ("plugin", "commits", "core", "other plugins", "tests, docs", "new source files"),
            [
                (
                    landing.plugin,
                    len(landing.commits),
                    landing.core_lines,
                    landing.plugin_lines,
                    landing.other_lines,
                    len(landing.new_files),
                )
                for landing in landed
            ],
        )
    lines.append("")
    lines += [f"not as it should be: {problem}" for problem in report.problems] or ["all is well"]
    return "\n".join(lines)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _table(head: tuple[str, ...], body: list[tuple[Any, ...]]) -> list[str]:
    rows = [head, *(tuple(map(str, row)) for row in body)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return [
        _MARGIN + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
