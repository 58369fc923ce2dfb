"""Lets tests, and the processes and configs they make, import ``interop_foreign``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
