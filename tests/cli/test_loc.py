"""``axcore loc``: one quick run of everything, and what it promises."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from axcore.cli import main
from axcore.testing.loc import MAX_INTEGRATION_LINES, PUBLISHED

pytestmark = pytest.mark.xdist_group("loc")

IN_CORE = {"backend", "kernel", "logit_cap", "lora", "mesh_rule", "norm", "optimizer"}
IN_CORE |= {"qk_norm", "sliding_window"}

NOWHERE = '''
"""A feature whose check never holds."""

# %% integration
from axcore.layers import Attention


def integrate(cfg):
    """Sets it in the first layer only."""
    next(iter(cfg.find(Attention.Config).values())).logit_scale = 2.0


# %% check
def is_present(cfg, model):
    return False


def check(probe):
    pass
'''.lstrip()


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["loc", *argv])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def quick():
    code, out, err = run("--quick", "--json")
    assert code == 0, f"{out}\n{err}"
    return json.loads(out)


def test_every_feature_costs_existing_code_nothing(quick):
    for row in quick["features"]:
        assert (row["name"], row["class"], row["changed_lines"]) == (row["name"], "O(1)", 0)
        assert row["integration_lines"] <= MAX_INTEGRATION_LINES
        assert row["built"] == 15 and row["compared"] == 7 and row["failures"] == []


def test_all_features_are_there_or_say_why_not(quick):
    names = {row["name"] for row in quick["features"]}
    assert names >= IN_CORE
    skipped = {row["name"]: row["reason"] for row in quick["skipped"]}
    assert all(skipped.values())
    assert names | set(skipped) >= {*IN_CORE, "rope", "moe"}


def test_the_flat_control_grows_with_modules_times_variants(quick):
    assert quick["control"]
    assert {row["class"] for row in quick["control"]} == {"O(NM)"}
    assert all(row["changed_lines"] > 50 for row in quick["control"])


def test_one_snippet_for_both_compared_features_changes_every_experiment(quick):
    if quick["configs"] is None:
        pytest.skip("needs the plugins of both compared features")
    configs = quick["configs"]
    assert configs["integration_lines"] <= MAX_INTEGRATION_LINES
    assert configs["num_built"] == configs["num_configs"] == 30


def test_published_figures_stand_in_the_document(quick):
    rows = {row["system"]: (row["rope"], row["moe"]) for row in quick["published"]["systems"]}
    assert rows == PUBLISHED
    assert rows["Megatron-LM"] == (400, 20) and rows["Flax"] == (600, None)
    assert quick["published"]["source"] == "arXiv:2507.05411"


def test_the_table_shows_ours_beside_the_published(tmp_path):
    (tmp_path / "scale.py").write_text(NOWHERE)
    code, out, err = run("--quick", "--feature", "scale", "--folder", str(tmp_path))
    assert code == 4  # it is present nowhere
    assert "not as it should be: scale: module 0, variant 0" in out
    lines = out.splitlines()
    assert any(line.split()[:4] == ["scale", "O(1)", "0", "2"] for line in lines)
    assert any(line.split() == ["Megatron-LM", "400", "20"] for line in lines)
    assert any(line.split() == ["logit_cap", "O(NM)", "75"] for line in lines)
    assert "replaced by" not in err


def test_an_unknown_feature_is_an_error_of_the_user():
    code, out, err = run("--feature", "logit_kap")
    assert (code, out) == (2, "")
    assert "did you mean 'logit_cap'" in err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_experiments_and_all_code_bases():
    code, out, err = run("--json")
    data = json.loads(out)
    assert code == 0, err
    assert data["grid"] == {"modules": [5, 10, 20, 40], "variants": [1, 2, 4, 8]}
    assert {row["class"] for row in data["features"]} == {"O(1)"}
    assert {row["built"] for row in data["features"]} == {320}
    assert {row["class"] for row in data["control"]} == {"O(NM)"}
    if data["configs"] is not None:
        assert data["configs"]["num_built"] == data["configs"]["num_configs"] >= 1000
