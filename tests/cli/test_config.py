"""``axcore config``: show, diff, explain, golden."""

from __future__ import annotations

import pytest

from axcore import experiments
from axcore.config import Config


def test_show_prints_a_text_that_reads_back(cli):
    done = cli("config", "show", "tiny-lm")
    assert Config.from_text(done.out) == experiments.get("tiny-lm")


def test_show_as_json_says_who_set_each_value(cli):
    field = cli("config", "show", "tiny-lm", "--set", "batch_size=2", "--json").json["fields"][
        "batch_size"
    ]
    assert field["value"] == "2"
    assert (field["set_by"]["kind"], field["set_by"]["name"]) == ("flag", "--set batch_size")
    assert [e["kind"] for e in field["history"]] == ["default", "experiment", "flag"]
    assert field["set_by"] == field["history"][-1]


def test_show_covers_every_path_of_the_text(cli):
    shown = cli("config", "show", "tiny-lm", "--json").json["fields"]
    assert set(shown) == set(experiments.get("tiny-lm").lines()) - {""}


def test_show_without_an_experiment_lists_the_catalog(cli):
    done = cli("config", "show")
    assert done.code == 2 and "tiny-lm" in done.err


def test_show_applies_a_machines_rule_only_when_asked(cli):
    plain = cli("config", "show", "tiny-lm").out
    fitted = cli("config", "show", "tiny-lm", "--instance", "cpu-8").out
    assert "data=-1" in plain and "fsdp=-1" in fitted


def test_diff_of_a_derived_experiment_is_exactly_its_differences(cli, module):
    name = module(
        "derived",
        "from axcore import experiments\n"
        "def exp():\n    return experiments.get('tiny-lm').set(max_step=7, seed=3)\n",
    )
    done = cli("config", "diff", "tiny-lm", f"{name}:exp", "--json")
    assert done.json["differences"] == {
        "max_step": {"first": "1200", "second": "7"},
        "seed": {"first": "0", "second": "3"},
    }
    assert cli("config", "diff", "tiny-lm", f"{name}:exp").out.splitlines() == [
        "max_step: 1200 -> 7",
        "seed: 0 -> 3",
    ]


def test_diff_of_equal_configs_says_so(cli):
    assert cli("config", "diff", "tiny-lm", "tiny-lm").out == "no differences\n"


def test_explain_names_setters_rules_and_what_they_left_alone(cli):
    done = cli(
        *("config", "explain", "tiny-lm", "--instance", "cpu-8", "--json"),
        *("--set", "mesh_shape=data('axcore.parallel.MeshShape', pipeline=1, data=-1, expert=1, "),
    )
    assert done.code == 2  # an unfinished value is an error, not a string
    data = cli(
        *("config", "explain", "tiny-lm", "--instance", "cpu-8", "--json"),
        *("--set", "mesh_shape.data=4", "--set", "batch_size=8"),
    ).json
    assert data["instance"] == "cpu-8"
    assert data["rules"]["rules"][0]["name"] == "axcore:cpu-simulated"
    (kept,) = data["rules"]["kept"]
    assert kept["path"].startswith("mesh_shape") and kept["set_by"]["kind"] == "flag"
    assert data["fields"]["batch_size"]["set_by"]["name"] == "--set batch_size"


def test_explain_shows_effective_values_and_where_they_come_from(cli):
    data = cli(
        *("config", "explain", "tiny-lm", "--instance", "cpu", "--json"),
        *("--set", "model.compute_dtype=bfloat16", "--set", "seq_len=32"),
    ).json
    effective = data["effective"]
    attention = effective["model.decoder.layer.attention.compute_dtype"]
    assert attention["value"] == "'bfloat16'" or attention["value"] == '"bfloat16"'
    assert attention["from"].startswith("derived")
    assert effective["model.decoder.layer.attention.param_dtype"]["value"] == "'float32'"
    assert effective["model.max_seq_len"] == {"value": "32", "from": "derived (seq_len)"}
    # 5 % of 1200, derived from the one horizon
    assert effective["learner.optimizer.learning_rate.warmup_steps"]["value"] == "60"


def test_explain_lists_all_that_replacements_did(cli, module):
    name = module(
        "replacing",
        "from axcore import experiments\nfrom axcore.layers import Attention, FeedForward, Linear\n"
        "def exp():\n"
        "    cfg = experiments.get('tiny-lm')\n"
        "    cfg.model.decoder.layer.feed_forward.hidden_dim = 40\n"
        "    cfg.model.replace(FeedForward.Config, FeedForward.Config(gate=Linear.Config()))\n"
        "    return cfg\n",
    )
    flags = ("config", "explain", f"{name}:exp", "--instance", "cpu")
    (done,) = cli(*flags, "--json").json["replacements"]
    assert done["path"] == "model.decoder.layer.feed_forward" and "hidden_dim" in done["moved"]
    assert len(done["defaulted"]) > 10 and (done["overridden"], done["lost"]) == ([], [])
    shown = cli(*flags)
    assert f"    defaulted: {', '.join(done['defaulted'])}\n" in shown.out
    assert done["defaulted"][-1] not in shown.err


def test_explain_as_text(cli):
    done = cli("config", "explain", "tiny-lm", "--instance", "cpu", "--set", "batch_size=8")
    assert "  batch_size: 8  [flag (--set batch_size)]\n" in done.out  # no line of our own code
    assert "axcore:cpu for cpu" in done.out


def test_golden_texts_are_written_and_checked(cli, tmp_path):
    golden = tmp_path / "golden" / "tiny-lm.txt"
    assert cli("config", "golden", "tiny-lm", "--out", golden).code == 0
    assert cli("config", "golden", "tiny-lm", "--check", golden, "--json").json["matches"] is True
    done = cli("config", "golden", "tiny-lm", "--set", "seed=3", "--check", golden)
    assert done.code == 2 and "seed: 0 -> 3" in done.err
    assert Config.from_text(golden.read_text()) == experiments.get("tiny-lm")


def test_golden_overwrites_no_other_file(cli, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("mine")
    assert cli("config", "golden", "tiny-lm", "--out", note).code == 2
    assert note.read_text() == "mine"


def test_a_missing_golden_file_is_an_error(cli, tmp_path):
    done = cli("config", "golden", "tiny-lm", "--check", tmp_path / "no.txt")
    assert done.code == 2 and "--out" in done.err


RULES = """config("axcore.parallel.MeshRules")
rules: tuple
rules.0: tuple
rules.0.0: "cpu*"
rules.0.1: tuple
rules.0.1.0: config("axcore.parallel.SetModifier")
rules.0.1.0.values: {"accumulation_steps": 2}
"""


def test_rules_from_a_file_come_last_and_are_named(cli, tmp_path):
    rules = tmp_path / "rules.txt"
    rules.write_text(RULES)
    flags = ("config", "explain", "tiny-lm", "--instance", "cpu", "--rules", rules, "--json")
    data = cli(*flags).json
    assert data["fields"]["accumulation_steps"]["value"] == "2"
    assert data["fields"]["accumulation_steps"]["set_by"]["kind"] == "rule"
    assert data["rules"]["rules"][-1]["name"] == "--rules[cpu*]"
    kept = cli(*flags, "--set", "accumulation_steps=4").json
    assert kept["fields"]["accumulation_steps"]["value"] == "4"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1"),
        ("rules = 3\n", "line 1"),
        (RULES.replace('"cpu*"', "7"), "got 7 (int), expected str"),
        ('config("axcore.parallel.SetModifier")\nvalues: {}\n', "MeshRules"),
        (RULES.replace("axcore.parallel.SetModifier", "os.system"), "os"),
    ],
)
def test_a_bad_file_of_rules_is_named_with_its_line(cli, tmp_path, text, told):
    rules = tmp_path / "rules.txt"
    rules.write_text(text)
    done = cli("config", "show", "tiny-lm", "--instance", "cpu", "--rules", rules)
    assert done.code == 2
    assert str(rules) in done.err and told in done.err and "hint: " in done.err


def test_a_missing_file_of_rules_is_an_error(cli, tmp_path):
    done = cli("config", "show", "tiny-lm", "--instance", "cpu", "--rules", tmp_path / "no")
    assert done.code == 2 and "AX465" in done.err


def test_experiments_of_the_current_folder_are_found(cli, tmp_path, monkeypatch):
    (tmp_path / "herebyname.py").write_text(
        "from axcore import experiments\ndef exp():\n    return experiments.get('tiny-lm')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    assert cli("config", "show", "herebyname:exp").code == 0
