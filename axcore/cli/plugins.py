"""``axcore plugins``: what is installed, whether it works, and a start for a new one."""

from __future__ import annotations

import argparse
from pathlib import Path

from axcore.cli._console import say
from axcore.cli._new_plugin import write_plugin
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import PluginError, PluginLookupError, did_you_mean
from axcore.plugins import CORE, PluginHost, PluginRecord, host, switch_off_plugins

__all__ = ["add_parser", "check", "list_", "new", "show"]


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``plugins list|show|check|new``."""
    parser = subparsers.add_parser("plugins", help="list, inspect, check and start plugins")
    inner = parser.add_subparsers(dest="plugins_command", required=True, metavar="COMMAND")
    add_command(
        inner,
        "list",
        list_,
        help="list installed plugins, their status and what they provide",
        example="axcore plugins list --json",
    )
    command = add_command(
        inner,
        "show",
        show,
        help="show one plugin and every spec it provides",
        example="axcore plugins show acme-kernels",
    )
    command.add_argument("name", metavar="NAME", help="a distribution or an entry point")
    command = add_command(
        inner,
        "check",
        check,
        help="exit with 2 unless every plugin is active or disabled; with NAME run the suites",
        example="axcore plugins check --targets\naxcore plugins check acme-kernels",
    )
    command.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="run the conformance suites on what this distribution registers (needs pytest)",
    )
    command.add_argument(
        "--targets", action="store_true", help="also import everything that the plugins name"
    )
    command = add_command(
        inner,
        "new",
        new,
        help="write a complete plugin into ./NAME",
        example="axcore plugins new acme-kernels && pip install -e './acme-kernels[test]'",
    )
    command.add_argument("name", metavar="NAME", help="the distribution's name")


def list_(args: argparse.Namespace) -> CommandResult:
    """Lists all plugins, core first."""
    plugins = _host(args)
    return CommandResult(_json(plugins.records), _table(plugins))


def show(args: argparse.Namespace) -> CommandResult:
    """Shows one plugin with the fields of all its specs.

    Raises:
        PluginLookupError: No such plugin is installed.
    """
    plugins = _host(args)
    records = _named(plugins, args.name)
    data = []
    lines = []
    for record in records:
        specs = {
            kind: [
                {"name": spec.name, "description": spec.description}
                | ({"target": spec.target} if hasattr(spec, "target") else {})
                for _, spec, owner in registry.items()
                if owner == record.distribution and spec.name in record.provides.get(kind, ())
            ]
            for kind, registry in plugins.registries().items()
        }
        specs = {kind: found for kind, found in specs.items() if found}
        data.append({**record.to_json(), "specs": specs})
        lines.append(f"{record.distribution} {record.version} ({record.name}): {record.status}")
        if record.reason:
            lines.append(f"  {record.reason}")
        for kind, found in specs.items():
            lines.append(f"  {kind.replace('_', ' ')}")
            for spec in found:
                told = f"  {spec['description']}" if spec["description"] else ""
                lines.append(f"    {spec['name']}  {spec.get('target', '')}{told}".rstrip())
    return CommandResult(data, "\n".join(lines))


def check(args: argparse.Namespace) -> CommandResult:
    """Checks all plugins; with ``--targets`` also that what they name can be imported.

    With NAME it runs the suites of :mod:`axcore.testing` on that one.

    Raises:
        PluginLookupError: No such plugin is installed.
    """
    plugins = _host(args)
    if args.name is not None:
        return _conformance(args.name, _named(plugins, args.name))
    problems = [
        f"{r.label} is {r.status}: {r.reason}"
        for r in plugins.records
        if r.status not in ("active", "disabled")
    ]
    problems += [f"no installed plugin is called {name!r}" for name in plugins.unmatched_filters]
    if args.targets:
        problems += _unloadable(plugins)
    if args.json:  # records have no place for what a target's import says
        for problem in problems:
            say(problem)
    good = f"{len(plugins.records)} plugins checked, all well"
    return CommandResult(
        _json(plugins.records),
        "\n".join([_table(plugins), "", *(problems or [good])]),
        exit_code=2 if problems else 0,
    )


def new(args: argparse.Namespace) -> CommandResult:
    """Writes a new plugin into ./NAME.

    Raises:
        CliError: The name cannot be a distribution's, or ./NAME exists.
    """
    root = Path.cwd() / args.name
    files = write_plugin(args.name, root)
    text = "\n".join(
        [
            f"wrote {len(files)} files to {root}",
            "next:",
            f"  pip install -e './{args.name}[test]'",
            f"  pytest ./{args.name}",
            "  axcore plugins list",
        ]
    )
    data = {"name": args.name, "path": str(root), "files": [str(f) for f in files]}
    return CommandResult(data, text)


def _host(args: argparse.Namespace) -> PluginHost:
    if getattr(args, "no_plugins", False):
        switch_off_plugins()
    return host(check=False)  # strict mode must not keep these commands from saying what is wrong


def _named(plugins: PluginHost, name: str) -> list[PluginRecord]:
    """Returns the records of a distribution or an entry point."""
    records = [r for r in plugins.records if name in (r.distribution, r.name)]
    if not records:
        known = sorted({n for r in plugins.records for n in (r.distribution, r.name)})
        raise PluginLookupError(
            f"no installed plugin is called {name!r}",
            hint=did_you_mean(name, known) or "axcore plugins list shows all",
        )
    return records


def _conformance(name: str, records: list[PluginRecord]) -> CommandResult:
    """Runs the suites and tells, for each thing that was checked, how they ended."""
    from axcore.testing._check import check_distribution

    inactive = [f"{r.label} is {r.status}: {r.reason}" for r in records if r.status != "active"]
    if inactive:
        return CommandResult(
            {"name": name, "status": records[0].status, "checks": []}, "\n".join(inactive), 2
        )
    checks = check_distribution(records[0].distribution)
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for check in checks:
        row = counts.setdefault((check.suite, check.subject), {})
        row[check.outcome] = row.get(check.outcome, 0) + 1
    outcomes = ("passed", "failed", "skipped")
    table = [("suite", "checked", *outcomes)] + [
        (*what, *(str(row.get(outcome, 0)) for outcome in outcomes)) for what, row in counts.items()
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    told: dict[str, None] = {}
    for check in checks:
        if check.outcome == "failed":
            told[f"failed: {check.subject}: {check.test}: {check.reason}"] = None
        elif check.outcome == "skipped":
            test = check.test.partition("[")[0]
            told[f"skipped: {check.subject}: {test}: {check.reason}"] = None
    failed = any(check.outcome == "failed" for check in checks)
    data = {"name": name, "status": "active", "checks": [check.to_json() for check in checks]}
    return CommandResult(data, "\n".join([*lines, "", *told]), 2 if failed else 0)


def _json(records: tuple[PluginRecord, ...]) -> list[dict[str, object]]:
    return [record.to_json() for record in records]


def _unloadable(plugins: PluginHost) -> list[str]:
    problems = []
    for kind, registry in plugins.registries().items():
        for name, spec, owner in registry.items():
            if owner != CORE and hasattr(spec, "target"):
                try:
                    registry.load(name)
                except PluginError as error:
                    problems.append(f"{owner}: {kind} {name!r}: {error.message}")
    return problems


def _table(plugins: PluginHost) -> str:
    rows = [("distribution", "version", "name", "status", "provides")]
    for r in plugins.records:
        provides = ", ".join(
            f"{len(names)} {kind.replace('_', ' ')}" for kind, names in sorted(r.provides.items())
        )
        told = r.reason if r.status != "active" else provides or "nothing yet"
        rows.append((r.distribution, r.version, r.name, r.status, told))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]
        )
        for row in rows
    ]
    lines += [f"no installed plugin is called {name!r}" for name in plugins.unmatched_filters]
    return "\n".join(lines)
