"""What a process holds."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["peak_rss_bytes"]


def peak_rss_bytes() -> int | None:
    """Most memory that this process has held since it started, in bytes; None where unknown.

    Linux: ``VmHWM`` of ``/proc/self/status``. ``getrusage`` would not do: what it returns begins at
    the peak of the process that started this one, since it survives ``execve`` (getrusage(2)).
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _peak_of_usage()
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return None


def _peak_of_usage() -> int | None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
