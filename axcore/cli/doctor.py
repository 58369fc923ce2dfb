"""``axcore doctor``: what is installed, what works, what would be chosen, and what to fix."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from axcore.cli._experiment import rows
from axcore.cli._jax import NEWEST_TESTED_JAX, cache_dir, is_untested
from axcore.cli._parser import named
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import AxcoreError
from axcore.plugins import host

__all__ = ["add_parser", "doctor"]

_PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "numpy", "pluggy", "rich")
# extra -> the module that it brings, and what for.
_EXTRAS = {
    "plots": ("matplotlib", "plots/loss.png"),
    "tensorboard": ("tensorboardX", "TensorBoard files"),
    "parquet": ("pyarrow", "Parquet data"),
    "tokenizers": ("tokenizers", "tokenizers of Hugging Face, SentencePiece and tiktoken"),
    "convert": ("safetensors", "axcore convert"),
}


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``doctor``."""
    command = add_command(
        subparsers,
        "doctor",
        doctor,
        help="show what is installed, what works and what to fix",
        example="axcore doctor --instance cpu-8 --json",
    )
    command.add_argument(
        "--instance",
        metavar="T",
        type=named,
        help="show what would be chosen there (default: this machine)",
    )


def doctor(args: argparse.Namespace) -> CommandResult:
    """Examines the installation; exit code 2 when something has to be fixed."""
    plugins = host(check=False)
    problems: list[dict[str, str]] = []
    devices = _devices(problems)
    chosen = _chosen(args.instance, problems)
    ranges = _jax_ranges(plugins, problems)
    for record in plugins.records:
        if record.status not in ("active", "disabled"):
            problems.append(
                {
                    "problem": f"plugin {record.label} is {record.status}: {record.reason}",
                    "fix": f"axcore plugins show {record.distribution}; repair, upgrade or "
                    "uninstall it",
                }
            )
    missing = {
        extra: f"{what}: pip install 'axcore[{extra}]'"
        for extra, (module, what) in _EXTRAS.items()
        if importlib.util.find_spec(module) is None
    }
    cache = cache_dir()
    data = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "axcore": _version("axcore"),
        "packages": {name: _version(name) for name in _PACKAGES},
        "jax_ranges": ranges,
        "newest_tested_jax": NEWEST_TESTED_JAX,
        "devices": devices,
        "plugins": [record.to_json() for record in plugins.records],
        "chosen": chosen,
        "compile_cache": None if cache is None else str(cache),
        "missing_extras": missing,
        "problems": problems,
    }
    return CommandResult(data, _text(data), exit_code=2 if problems else 0)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(problems: list[dict[str, str]]) -> list[dict[str, Any]]:
    try:
        import jax

        return [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()]
    except Exception as error:  # a broken JAX is what a doctor is called for
        text = " ".join(str(error).split())
        problems.append(
            {
                "problem": f"JAX does not start: {type(error).__name__}: {text}",
                "fix": "check that jax, jaxlib and the accelerator's plugin belong together; "
                "JAX_PLATFORMS=cpu runs without the accelerator",
            }
        )
        return []


def _chosen(name: str | None, problems: list[dict[str, str]]) -> dict[str, Any] | None:
    """Returns the instance, rule and kernels that a run would take."""
    try:
        from axcore.parallel import detect, resolve_instance

        instance = resolve_instance(name or detect())
        active = host(check=False).active_for(instance.name)
        rule, spec = active.mesh_rule()
        ops: dict[str, list[str]] = {}
        for kernel in active.kernels:
            ops.setdefault(kernel.op, []).append(kernel.implementation)
        return {
            "instance": instance.name,
            "platform": instance.platform,
            "num_devices": instance.num_devices,
            "rule": rule,
            "reason": spec.reason,
            "kernels": ops,
            "distributions": list(active.distributions),
        }
    except AxcoreError as error:
        problems.append({"problem": error.message, "fix": error.hint or "see the message"})
        return None
    except Exception as error:  # an instance's detection may touch a broken driver
        problems.append(
            {
                "problem": f"the machine cannot be examined: {type(error).__name__}: {error}",
                "fix": "name it with --instance",
            }
        )
        return None


def _jax_ranges(plugins: Any, problems: list[dict[str, str]]) -> dict[str, str]:
    """Returns distribution -> the JAX it asks for, and notes those that this JAX does not meet."""
    installed = _version("jax")
    ranges: dict[str, str] = {}
    for distribution in _askers([r.distribution for r in plugins.records]):
        found = _jax_requirement(_requires(distribution))
        if found is None:
            continue
        ranges[distribution] = str(found.specifier) or "any"
        if installed is not None and not found.specifier.contains(installed, prereleases=True):
            problems.append(
                {
                    "problem": f"{distribution} asks for jax{found.specifier}, installed is "
                    f"{installed}",
                    "fix": f"pip install 'jax{found.specifier}', or another version of "
                    f"{distribution}",
                }
            )
    return ranges


def _askers(distributions: list[str]) -> list[str]:
    """Returns distributions and what is installed of their direct dependencies, extras included."""
    found = dict.fromkeys(distributions)
    for distribution in distributions:
        found |= dict.fromkeys(r.name for r in _requirements(_requires(distribution)))
    return [name for name in found if name != "jax"]


def _requires(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # not installed, or run from a source tree


def _requirements(requires: list[str]) -> list[Requirement]:
    found: list[Requirement] = []
    for text in requires:
        with contextlib.suppress(InvalidRequirement):  # another package's metadata
            found.append(Requirement(text))
    return found


def _jax_requirement(requires: list[str]) -> Requirement | None:
    for requirement in _requirements(requires):
        if requirement.name == "jax" and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            return requirement
    return None


def _text(data: Mapping[str, Any]) -> str:
    jax = data["packages"]["jax"]
    newer = f"  (newer than the newest tested, {NEWEST_TESTED_JAX})"
    packages = [
        (name, (version or "missing") + (newer if name == "jax" and is_untested(jax) else ""))
        for name, version in data["packages"].items()
    ]
    lines = [f"axcore {data['axcore']} on Python {data['python']}, {data['machine']}"]
    lines += ["", "packages:", rows(packages)]
    lines += ["", "JAX asked for:", rows(list(data["jax_ranges"].items()))]
    lines += ["", "devices:"]
    lines += [f"  {d['platform']}:{d['id']} {d['kind']}" for d in data["devices"]] or ["  none"]
    lines += ["", "plugins:"]
    lines.append(
        rows(
            [
                (f"{p['distribution']} {p['version']}", f"{p['status']}  {p['reason']}".rstrip())
                for p in data["plugins"]
            ]
        )
    )
    chosen = data["chosen"]
    if chosen is not None:
        lines += ["", f"a run would be for {chosen['instance']}:"]
        lines.append(
            rows(
                [
                    ("devices", f"{chosen['num_devices']} {chosen['platform']}"),
                    ("mesh rule", f"{chosen['rule']} ({chosen['reason']})"),
                    *(
                        (f"kernels of {op}", ", ".join(names))
                        for op, names in chosen["kernels"].items()
                    ),
                ]
            )
        )
    lines += ["", f"compiled programs are kept in: {data['compile_cache'] or 'nowhere'}"]
    if data["missing_extras"]:
        lines += ["", "not installed, and only needed for:"]
        lines += [f"  {text}" for text in data["missing_extras"].values()]
    lines.append("")
    if data["problems"]:
        lines.append("to fix:")
        for p in data["problems"]:
            lines += [f"  {p['problem']}", f"    -> {p['fix']}"]
    else:
        lines.append("nothing to fix")
    return "\n".join(lines)
