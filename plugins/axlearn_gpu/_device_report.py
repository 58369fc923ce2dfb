"""What ``device_check.py`` reports while it runs, and when it ends."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["FAILED", "NO_GPU", "OK", "UNFINISHED", "Check"]

#: Exit codes; 77 is what test harnesses take for skipped.
OK, FAILED, UNFINISHED, NO_GPU = 0, 4, 5, 77


class Check:
    """The run: its clock, its report, and what it says while it works."""

    def __init__(self, out: Path, seconds: float, dry_run: bool):
        self.out, self.dry_run = out, dry_run
        self.started = time.perf_counter()
        self.seconds = seconds
        self.report: dict[str, Any] = {"dry_run": dry_run, "not_run": [], "failures": []}

    def watch(self, seconds: float) -> None:
        """Ends the process with what is reported by then, should a compiler or a kernel hang.

        Args:
            seconds: When, from the start; the budget is asked between steps, and ends well before.
        """
        timer = threading.Timer(max(0.0, seconds - (self.seconds - self.left())), self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        self.not_run("everything after the line before", "the time was over while it ran")
        self.report["exit_code"] = UNFINISHED
        self.write()
        os._exit(UNFINISHED)  # a thread inside a compiler cannot be interrupted

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.perf_counter() - self.started)

    def say(self, text: str) -> None:
        """Writes a line with the time to the standard error."""
        sys.stderr.write(f"[{time.perf_counter() - self.started:6.1f} s] {text}\n")
        sys.stderr.flush()

    def not_run(self, what: str, reason: str) -> None:
        """Records what was left out, and why."""
        self.say(f"not run: {what}: {reason}")
        self.report["not_run"].append({"what": what, "reason": reason})

    def failed(self, what: str, error: BaseException) -> None:
        """Records a failure; the run goes on."""
        lines = (str(error) or repr(error)).strip().splitlines()
        self.say(f"FAILED: {what}: {lines[0][:300]}")
        trace = "".join(traceback.format_exception(error))[-2000:]
        self.report["failures"].append(
            {"what": what, "error": "\n".join(lines)[:2000], "trace": trace}
        )

    def write(self) -> None:
        """Writes the report as it is by now."""
        self.report["seconds"] = round(time.perf_counter() - self.started, 1)
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.report, indent=1, default=str) + "\n")
        partial.replace(self.out)

    def code(self) -> int:
        """The exit code."""
        if self.report["failures"]:
            return FAILED
        late = any("time" in entry["reason"] for entry in self.report["not_run"])
        return UNFINISHED if late else OK
