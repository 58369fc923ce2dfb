"""What compiling models of full size for machines that are not here costs, one case at a time.

    python benchmarks/aot_cases.py [--only "qwen3 gpu"] [--timeout 1800]

Needs ``axlearn-tpu[aot]``, ``axlearn-gpu[aot]``, ``axlearn-models`` and ``axlearn-moe``. Each case
is a process of its own, ``axcore aot ... --json``, without advice and without earlier answers.
Prints a table: whether the step fits, bytes a device, what a device receives in a step (gathered,
scattered or summed, exchanged among experts) beside what the cost model predicts, its step time,
the compiler's seconds, wall and CPU seconds of the process, and the most memory it held. CPU
seconds are what can be compared: others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A command and what it should end with."""

    experiment: str
    instance: str
    flags: tuple[str, ...] = ()
    exit_code: int = 0


CASES = (
    Case("fuji-7B-v2", "gpu-p5.48xlarge-256"),
    Case("fuji-70B-v2", "gpu-h100-512"),
    # Mixtures of experts: the published row's length, and the model's own settings.
    Case("qwen3-30B-A3B", "gpu-b200-512", ("--set", "seq_len=16384")),
    Case("deepseek-V3", "gpu-h100-2048"),
    Case("fuji-70B-v2", "tpu-v5e-16", ("--set", "batch_size=16"), exit_code=3),
    Case("fuji-7B-v2", "tpu-v5p-512"),
    Case("fuji-70B-v2", "tpu-v5p-1024"),
    Case("fuji-7B-v2", "tpu-v5e-256"),
    Case("qwen3-30B-A3B", "tpu-v5p-1024", ("--set", "seq_len=16384")),
    Case("deepseek-V3", "tpu-v5p-2048"),
)
COLUMNS = ("experiment", "instance", "devices", "fits", "GiB a device")
COLUMNS += ("gathered", "summed", "exchanged", "predicted s")
COLUMNS += ("compile s", "wall s", "CPU s", "RSS GiB")


def run(case: Case, timeout: float, cache: str) -> tuple[dict[str, Any] | None, str, float]:
    """Runs a case; returns (its report, what went wrong, wall seconds)."""
    command = [sys.executable, "-m", "axcore", "aot", case.experiment]
    command += ["--instance", case.instance, "--no-advice", "--no-cache", "--json", *case.flags]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "AXCORE_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return None, f"not done in {timeout:g} s", timeout
    wall = time.perf_counter() - start
    if done.returncode != case.exit_code:
        lines = done.stderr.strip().splitlines()
        error = next((line for line in lines if line.startswith("error:")), "")
        return None, f"exit code {done.returncode}: {error}", wall
    return json.loads(done.stdout), "", wall


#: Column -> kinds of collectives that compilers write, and those of the cost model.
MOVED = {
    "gathered": (("all-gather",), ("all_gather",)),
    "summed": (("all-reduce", "reduce-scatter"), ("all_reduce", "reduce_scatter")),
    "exchanged": (("all-to-all", "ragged-all-to-all"), ("all_to_all",)),
}


def moved(report: dict[str, Any]) -> list[str]:
    """Returns GiB that a device receives in a step, and in brackets those predicted."""
    cells: list[str] = []
    for kinds, expected in MOVED.values():
        got = sum(c["received_bytes"] for c in report["collectives"] if c["kind"] in kinds)
        by_axes = (report["predicted"] or {}).get("collective_bytes", {})
        wanted = sum(n for name, n in by_axes.items() if name.split()[0] in expected)
        cells.append(f"{got / GIB:,.1f} ({wanted / GIB:,.1f})")
    return cells


def row(case: Case, report: dict[str, Any], wall: float, cpu: float) -> str:
    """Returns a row of the table."""
    cells = [
        case.experiment,
        " ".join([case.instance, *case.flags]),
        str(report["devices"]),
        "yes" if report["fits"] else "no (exit 3)",
        f"{report['hbm_bytes']['total'] / GIB:.1f} of {report['hbm_limit_bytes'] / GIB:.1f}",
        *moved(report),
        f"{report['predicted']['step_seconds']:.2f}" if report["predicted"] else "",
        f"{report['compile_seconds']:.0f}",
        f"{wall:.0f}",
        f"{cpu:.0f}",
        f"{report['compile_peak_rss_bytes'] / GIB:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Runs the cases and prints the table; returns 1 if any of them ended otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names contain all of these words")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each case")
    args = parser.parse_args()
    failed = 0
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            if not all(word in f"{case.experiment} {case.instance}" for word in args.only.split()):
                continue
            before = _cpu_seconds()
            report, error, wall = run(case, args.timeout, cache)
            if report is None:
                failed = 1
                cells = [case.experiment, case.instance, error, *[""] * (len(COLUMNS) - 5)]
                print(f"| {' | '.join([*cells, f'{wall:.0f}', ''])} |")
            else:
                print(row(case, report, wall, _cpu_seconds() - before))
            sys.stdout.flush()
    return failed


def _cpu_seconds() -> float:
    """Returns CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
