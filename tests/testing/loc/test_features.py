"""Features are text: read, checked, found, and skipped with the reason."""

import textwrap

import pytest

from axcore.errors import CliError
from axcore.testing.loc import find_features, parse_feature

TEXT = '''
"""A scale: outputs are doubled."""
# requires: axcore.layers:Attention

# %% integration
from axcore.layers import Attention


def integrate(cfg):
    """Sets it."""
    for attention in cfg.find(Attention.Config).values():  # every one
        attention.logit_scale = 2.0


# %% check
def is_present(cfg, model):
    return True


def check(probe):
    pass
'''.lstrip()


def test_a_feature_is_read():
    feature = parse_feature("scale", TEXT, "acme")
    assert (feature.title, feature.provider) == ("A scale: outputs are doubled", "acme")
    assert feature.requires == ("axcore.layers:Attention",)
    assert feature.missing() is None
    assert feature.flat is None


def test_integration_lines_are_imports_and_body():
    assert parse_feature("scale", TEXT, "acme").integration_lines == 3


@pytest.mark.parametrize(
    ("target", "reason"),
    [("nowhere.at.all:X", "No module named"), ("axcore.layers:Absent", "is not there")],
)
def test_what_is_not_installed_is_a_reason_to_skip(target, reason):
    text = TEXT.replace("axcore.layers:Attention", target)
    assert reason in (parse_feature("scale", text, "acme").missing() or "")


@pytest.mark.parametrize(
    ("old", "missing"), [("def check(probe)", "check"), ("# %% integration", "integrate")]
)
def test_a_section_without_its_function_is_refused(old, missing):
    with pytest.raises(CliError, match=f"defines no {missing}"):
        parse_feature("scale", TEXT.replace(old, "def other()" if "def" in old else ""), "acme")


def test_a_folder_of_features_is_found(tmp_path):
    (tmp_path / "scale.py").write_text(TEXT)
    names = [feature.name for feature in find_features(folders=[tmp_path])]
    assert names[-1] == "scale" and len(names) == len(set(names))


def test_one_name_given_twice_is_refused(tmp_path):
    (tmp_path / "norm.py").write_text(TEXT)
    with pytest.raises(CliError, match="'norm' is given by axcore and by"):
        find_features(folders=[tmp_path])


def test_an_unknown_name_comes_with_near_misses():
    with pytest.raises(CliError) as error:
        find_features(["logit_kap"])
    assert "logit_cap" in (error.value.hint or "")


def test_edits_are_applied_to_the_files_they_name():
    edit = "\n\n# %% edit modules/*.py\ndef edit(text):\n    return text + 'FLAG = 1\\n'\n"
    feature = parse_feature("scale", textwrap.dedent(TEXT) + edit, "acme")
    files = {"modules/m.py": "x = 1\n", "other.py": "y = 1\n"}
    assert feature.edited(files) == {**files, "modules/m.py": "x = 1\nFLAG = 1\n"}
