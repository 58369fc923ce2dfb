"""The peak of a process is its own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from axcore._memory import peak_rss_bytes

CHILD = "from axcore._memory import peak_rss_bytes as peak; print(peak())"


def test_the_peak_of_a_process_does_not_begin_at_that_of_its_parent():
    held = np.ones(200_000_000, np.uint8)
    mine = peak_rss_bytes()
    assert mine is not None
    assert mine > held.nbytes
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert 1e6 < int(done.stdout) < 100e6  # an interpreter: about 10 MB
