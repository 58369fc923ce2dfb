"""``axcore plan``: the table, the rule that it emits and a run by it, comparisons, exit codes."""

from __future__ import annotations

import json

import pytest

from axcore.errors import AotError, PluginError

MICRO = (
    "--set model.model_dim=8 --set model.decoder.num_layers=2"
    " --set model.decoder.layer.attention.num_heads=2 --set batch_size=4 --set seq_len=16"
).split()

pytestmark = [pytest.mark.xdist_group("cli_aot"), pytest.mark.usefixtures("quick_compiles")]


@pytest.fixture
def plan(cli):
    def run(*flags, instance="cpu-2"):
        return cli("plan", "tiny-lm", "--instance", instance, *MICRO, *flags)

    return run


def test_the_emitted_rule_is_taken_by_rules_and_gives_the_planned_mesh(plan, cli, tmp_path):
    rule = tmp_path / "rule.txt"
    result = plan("--verify", "1", "--emit", str(rule), "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["verified"][0]["fits"] is True
    assert data["chosen"]["mesh"] == data["candidates"][0]["mesh"]
    explained = cli(
        *("config", "explain", "tiny-lm", "--instance", "cpu-2", "--rules", str(rule)),
        *(*MICRO, "--json"),
    )
    assert explained.code == 0, explained.err
    shape = json.loads(explained.out)["fields"]["mesh_shape"]
    chosen = data["chosen"]["mesh"]
    assert all(f"{axis}={size}" in shape["value"] for axis, size in chosen.items())
    assert "--rules" in json.dumps(shape["set_by"])


def test_people_see_the_ranking_the_reasons_and_what_was_chosen(plan):
    result = plan("--verify", "0")
    assert result.code == 0, result.err
    assert "x the time" in result.out and "chosen: " in result.out
    assert "MFU with attention in full of the peak of float32 (" in result.out


def test_families_are_compared_by_cost_where_prices_are_known(plan):
    prices = "--price tpu-v5e-*=1.2 --price gpu-h100-*=3 --price nothing-*=3".split()
    result = plan(*prices, "--json", instance="any")
    assert result.code == 0, result.err
    assert "the price of nothing-* is that of no machine" in result.err
    rows = json.loads(result.out)["compared"]
    priced = [r["usd_per_million_tokens"] for r in rows if r["usd_per_million_tokens"] is not None]
    assert len(priced) > 2 and priced == sorted(priced)
    assert {r["instance"].rpartition("-")[0] for r in rows} >= {"tpu-v5e", "gpu-h100"}


@pytest.mark.parametrize(
    ("instance", "flags", "said"),
    [
        ("any", "--price tpu", "PATTERN=USD"),
        ("any", "--price tpu-*=nan", "PATTERN=USD"),
        ("any", "--objective memory", "needs one instance"),
        ("any", "--verify 1", "needs one instance"),
        ("cpu-2", "--price cpu-*=1", "--instance any"),
        ("cpu-2", "--verify -1", "--verify got -1"),
        ("cpu-2", "--quantize nope", "nope"),
        ("cpu-2", "--emit no/such/folder/rule.txt", "no directory 'no/such/folder'"),
        ("cpu-2", "--emit .", "is a directory"),
    ],
)
def test_what_cannot_be_is_refused(plan, instance, flags, said):
    result = plan(*flags.split(), instance=instance)
    assert result.code == 2 and said in result.err


def test_rows_that_no_mesh_divides_are_not_called_too_large(plan):
    result = plan("--set", "batch_size=3", "--verify", "0", "--set", 'mesh_shape={"data": 2}')
    assert result.code == 3
    assert "size 3 does not divide into 2" in result.out and "larger machine" not in result.out


def test_a_candidate_that_cannot_be_is_refused_and_the_next_one_is_chosen(plan, monkeypatch):
    from axcore.errors import ShardingError
    from axcore.train import _plan as planning

    def aot(assembled, **rest):
        raise ShardingError("rows do not divide")

    monkeypatch.setattr(planning, "aot", aot)
    result = plan("--verify", "1", "--json")
    assert result.code == 0, result.err
    (verified,) = result.json["verified"]
    assert (verified["fits"], verified["reason"]) == (False, "rows do not divide")
    _, second, *_ = result.json["candidates"]
    chosen = result.json["chosen"]
    assert (chosen["mesh"], chosen["remat"]) == (second["mesh"], second["remat"])


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    ("error", "code", "exit_code", "told"),
    [
        (AotError("it is not installed", code="AX480", hint="pip install it"), "AX480", 2, "pip"),
        (AotError("it cannot compile", code="AX484", exit_code=4), "AX484", 4, "cannot compile"),
        (PluginError("its target cannot be imported", code="AX210"), "AX210", 2, "imported"),
        (RuntimeError("segments\nmissing"), "AX980", 4, "RuntimeError: segments missing"),
    ],
)
def test_a_plan_whose_verification_failed_is_shown_and_fails(
    plan, monkeypatch, tmp_path, error, code, exit_code, told, form
):
    from axcore.train import _plan as planning

    def aot(assembled, **rest):
        raise error

    monkeypatch.setattr(planning, "aot", aot)
    rule = tmp_path / "rule.txt"
    result = plan("--verify", "1", "--emit", rule, *(["--json"] if form == "json" else []))
    assert result.code == exit_code and rule.exists()
    assert f"[{code}]" in result.err and told in result.err and "--verify 0" in result.err
    if form == "text":
        assert "not verified: " in result.out and "chosen: " in result.out
        return
    (verified,) = result.json["verified"]
    assert (verified["fits"], verified["error"]) == (None, code)
    assert result.json["chosen"]["mesh"] == result.json["candidates"][0]["mesh"]
    assert (result.json["error"]["code"], result.json["error"]["exit_code"]) == (code, exit_code)


def test_a_plan_that_was_verified_has_no_error(plan):
    assert plan("--verify", "0", "--json").json["error"] is None
