"""``axcore kernels``: the sites of a program, chosen and refused, without a compiler."""

from __future__ import annotations

import pytest

SMALL = (
    "--set model.model_dim=8 --set model.decoder.num_layers=1"
    " --set model.decoder.layer.attention.num_heads=2 --set batch_size=8 --set seq_len=16"
).split()


@pytest.fixture
def explain(cli):
    def run(*flags, instance="cpu"):
        return cli("kernels", "explain", "tiny-lm", "--instance", instance, *SMALL, *flags)

    return run


def test_list_names_every_implementation_and_where_it_comes_from(cli):
    done = cli("kernels", "list", "--op", "attention", "--json")
    assert done.code == 0, done.err
    ours = {row["implementation"]: row for row in done.json if row["distribution"] == "axcore"}
    assert ours.keys() == {"ring", "all_to_all", "xla"}
    assert ours["ring"]["communicates"] == ["seq"]
    assert "pure XLA reference" in cli("kernels", "list").out


def test_list_of_an_op_that_is_none(cli):
    done = cli("kernels", "list", "--op", "atention")
    assert done.code == 2 and "did you mean 'attention'" in done.err


def test_explain_has_a_row_for_every_site_of_the_step(explain):
    done = explain("--json", instance="cpu-8")
    assert done.code == 0, done.err
    assert (done.json["instance"], done.json["purpose"]) == ("cpu-8", "train")
    sites = {(row["op"], row["chosen"]) for row in done.json["sites"]}
    assert sites == {(op, "xla") for op in ("attention", "layer_norm", "linear_cross_entropy")}
    names = [(row["site"], row["op"]) for row in done.json["sites"]]
    assert len(names) == len(set(names))


def test_explain_says_why_a_listed_kernel_does_not_serve(explain):
    done = explain("--set", "ops.attention.implementations=('ring',)", "--purpose", "prefill")
    assert done.code == 0, done.err
    assert "xla (below the acceptable list)" in done.out
    assert "attention: ring refused: reads no key/value cache" in done.out


def test_a_forced_kernel_that_cannot_serve_fails(explain):
    done = explain("--set", "model.decoder.layer.attention.kernel=ring", "--purpose", "decode")
    assert done.code == 2
    assert "ring: reads no key/value cache" in done.err
    forced = explain("--set", "model.decoder.layer.attention.kernel=xla", "--json")
    assert forced.code == 0
    assert {r["chosen"] for r in forced.json["sites"] if r["op"] == "attention"} == {"xla"}


def test_a_list_of_one_forces_it_for_all_calls_of_an_op(explain):
    one = ("--set", "ops.attention.implementations=('ring',)")
    done = explain(*one, "--set", 'mesh_shape={"seq": 2, "data": 4}', "--json", instance="cpu-8")
    assert done.code == 0, done.err
    assert {r["chosen"] for r in done.json["sites"] if r["op"] == "attention"} == {"ring"}
    # Where nothing splits the sequence it cannot serve, and on a CPU the reference does, marked.
    told = [row for row in explain(*one, "--json").json["sites"] if row["op"] == "attention"]
    assert [(r["chosen"], r["fallback"]) for r in told] == [("xla", True)]
    assert told[0]["refused"][0]["implementation"] == "ring"


def test_a_kernel_that_nobody_has_is_an_error_with_near_misses(explain):
    done = explain("--set", "ops.attention.implementations=('rinng',)")
    assert done.code == 2
    assert "AX415" in done.err and "did you mean 'ring'" in done.err
