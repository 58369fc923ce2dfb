"""The commands that the README promises, and the script that looks for an interpreter."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIND_PYTHON = ROOT / ".ci" / "find-python"


def _targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def _commands(path: Path) -> set[str]:
    """Targets named as ``make X`` on lines of their own or between backticks."""
    text = path.read_text()
    return set(re.findall(r"^\s*make ([a-z-]+)", text, re.MULTILINE)) | set(
        re.findall(r"`make ([a-z-]+)", text)
    )


def test_readme_names_the_two_commands():
    assert {"train", "test"} <= _commands(ROOT / "README.md")


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *ROOT.glob("plugins/*/README.md"), *ROOT.glob("docs/*.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_make_command_in_a_document_is_a_target(path):
    assert _commands(path) <= _targets()


def test_newest_runs_existing_tests_of_each_contract_and_of_training():
    (line,) = re.findall(r"^NEWEST_TESTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [path for path in line.split() if not (ROOT / path).exists()] == []
    assert {"config", "module", "plugins", "train"} <= {path.split("/")[1] for path in line.split()}


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test\n" in script.read_text()


def _fake_python(folder: Path, name: str, *, version: str, has_ensurepip: bool = True) -> None:
    """A command that answers the questions of find-python as that interpreter would."""
    old = version < "3.11"
    script = folder / name
    script.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"  *ensurepip*) exit {0 if has_ensurepip else 1} ;;\n"
        f"  *sys.exit*) exit {1 if old else 0} ;;\n"
        f"  *sys.executable*) echo {script} ;;\n"
        f"  *) echo {version} ;;\n"
        "esac\n"
    )
    script.chmod(0o755)


def _find_python(folder: Path, *versions: str, python: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        ["/bin/sh", FIND_PYTHON, *versions],
        env={"PATH": str(folder), "HOME": str(folder), "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_find_python_takes_a_suitable_interpreter(tmp_path):
    _fake_python(tmp_path, "python3", version="3.12")
    assert _find_python(tmp_path)[:2] == (0, f"{tmp_path}/python3")


def test_find_python_passes_over_an_old_interpreter(tmp_path):
    _fake_python(tmp_path, "python3", version="3.10")
    status, _, message = _find_python(tmp_path)
    assert status == 1
    assert "no Python >= 3.11 found" in message
    assert "hint: " in message


def test_find_python_says_what_an_interpreter_without_ensurepip_lacks(tmp_path):
    _fake_python(tmp_path, "python3", version="3.11", has_ensurepip=False)
    status, _, message = _find_python(tmp_path)
    assert status == 1
    assert "ensurepip" in message
    assert "python3-venv" in message


def test_find_python_keeps_to_the_versions_asked_for(tmp_path):
    _fake_python(tmp_path, "python3", version="3.11")
    assert _find_python(tmp_path, "3.13", "3.12")[0] == 1
    _fake_python(tmp_path, "python3.12", version="3.12")
    assert _find_python(tmp_path, "3.13", "3.12")[1] == f"{tmp_path}/python3.12"


def test_find_python_takes_the_named_interpreter_or_none(tmp_path):
    _fake_python(tmp_path, "python3", version="3.12")
    status, _, message = _find_python(tmp_path, python="/nowhere/python")
    assert status == 1
    assert "PYTHON=/nowhere/python" in message
