"""Static checkers see the fields of configs: as constructor keywords and as attributes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("typing_cases.py")


@pytest.mark.slow
def test_pyright_reports_exactly_the_lines_marked_as_errors(tmp_path: Path):
    pytest.importorskip("pyright", reason="needs pyright (dependency group lint)")
    copy = tmp_path / "cases.py"
    copy.write_text(CASES.read_text())
    settings = {
        "include": ["cases.py"],
        "typeCheckingMode": "strict",
        "reportUnusedExpression": "none",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    run = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    if not run.stdout.startswith("{"):
        pytest.skip(f"pyright cannot run here: {(run.stderr or run.stdout)[:200]}")
    found = json.loads(run.stdout)["generalDiagnostics"]
    errors = {d["range"]["start"]["line"] + 1: d["message"] for d in found}
    lines = CASES.read_text().splitlines()
    wanted = {i for i, line in enumerate(lines, 1) if "# error" in line}
    assert errors.keys() == wanted, errors
