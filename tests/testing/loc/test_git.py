"""Lines outside of a plugin's folder, counted in a made-up history."""

import subprocess
from pathlib import Path

import pytest

from axcore.errors import CliError
from axcore.testing.loc import find_checkout, landings


@pytest.fixture
def history(tmp_path, monkeypatch):
    """Commits files: path -> text, None deletes."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(files: dict[str, str | None]) -> None:
        for path, text in files.items():
            place: Path = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                place.unlink()
            else:
                place.write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", "m")

    git("init", "-q")
    commit(
        {
            "axcore/a.py": "x = 1\ny = 2\n",
            "plugins/acme_x/pyproject.toml": "[project]\n",
            "plugins/acme_x/src/acme_x/plugin.py": "",
            "plugins/acme_y/pyproject.toml": "[project]\n",
            "plugins/acme_y/src/acme_y/y.py": "z = 1\n",
            "docs/guide.md": "One\n",
        }
    )
    return tmp_path, commit


def landing(root, name="acme-x"):
    return {found.plugin: found for found in landings(root)}[name]


def test_the_commit_that_made_the_shell_lands_nothing(history):
    root, _ = history
    assert landing(root).commits == ()


def test_a_commit_in_the_folder_alone_changes_nothing_elsewhere(history):
    root, commit = history
    commit({"plugins/acme_x/src/acme_x/x.py": "x = 1\n", "plugins/acme_x/README.md": "X\n"})
    found = landing(root)
    assert len(found.commits) == 1
    assert (found.core_lines, found.plugin_lines, found.other_lines) == (0, 0, 0)


def test_lines_elsewhere_are_counted_by_place(history):
    root, commit = history
    commit(
        {
            "plugins/acme_x/src/acme_x/x.py": "x = 1\n",
            "axcore/a.py": "x = 1\n# why\ny = 3\nz = 4\n",  # one changed, one added
            "axcore/new.py": "x = 1\n",
            "plugins/acme_y/src/acme_y/y.py": None,
            "docs/guide.md": "One\nTwo\n",
        }
    )
    found = landing(root)
    assert (found.core_lines, found.plugin_lines, found.other_lines) == (2, 1, 1)
    assert found.touched == ("axcore/a.py", "plugins/acme_y/src/acme_y/y.py")
    assert found.new_files == ("axcore/new.py",)


def test_commits_elsewhere_and_snippets_land_nothing(history):
    root, commit = history
    commit({"axcore/a.py": "x = 2\n"})
    commit({"plugins/acme_x/src/acme_x/loc_features/x.py": "x = 1\n", "axcore/a.py": "x = 3\n"})
    assert landing(root).commits == ()


def test_outside_of_a_checkout_it_says_so(tmp_path):
    with pytest.raises(CliError, match="reads the history of a checkout") as error:
        find_checkout(tmp_path)
    assert "clone" in (error.value.hint or "")
