"""``axcore aot``: JSON and text, exit codes, and what is kept from one call to the next."""

from __future__ import annotations

import pytest

MICRO = (
    "--set model.model_dim=8 --set model.decoder.num_layers=1"
    " --set model.decoder.layer.attention.num_heads=2 --set batch_size=2 --set seq_len=16"
).split()

pytestmark = [pytest.mark.xdist_group("cli_aot"), pytest.mark.usefixtures("quick_compiles")]


@pytest.fixture
def aot(cli):
    """Compiles a model of 3,000 parameters for one CPU device."""

    def run(*flags, instance="cpu"):
        return cli("aot", "tiny-lm", "--instance", instance, *MICRO, *flags)

    return run


def test_json_has_what_the_design_promises_and_the_second_call_knows_it(aot):
    first = aot("--json")
    assert first.code == 0, first.err
    promised = {
        *("fits", "devices", "mesh", "hbm_bytes", "hbm_limit_bytes", "flops", "predicted"),
        *("compile_seconds", "compiler", "substituted", "advice", "collectives", "blind_spots"),
    }
    assert promised <= first.json.keys()
    assert (first.json["fits"], first.json["cached"], first.json["devices"]) == (True, False, 1)
    assert first.json["collectives"] == []
    assert "compiling for 1 devices of cpu with xla-cpu" in first.err

    second = aot()
    assert second.code == 0
    assert "tiny-lm: fits on cpu (1 devices, one device)" in second.out
    assert "known from an earlier compilation with xla-cpu" in second.out
    assert "in full, of the peak of float32 (" in second.out
    for kind in ("parameters", "optimizer", "activations", "temporaries"):
        assert f"  {kind} " in second.out


def test_what_does_not_fit_exits_with_3_and_says_what_is_needed(aot, monkeypatch):
    monkeypatch.setattr("axcore.parallel.instances._memory_bytes", lambda: 100_000)
    done = aot("--no-advice")
    assert done.code == 3
    assert "tiny-lm: does not fit on cpu" in done.out
    assert "97.66 KiB available" in done.out
    again = aot("--no-advice", "--json")
    assert (again.code, again.json["fits"], again.json["advice"]) == (3, False, [])


def test_a_machine_without_a_compiler_is_an_error_of_the_user(aot, cli):
    done = aot(instance="gpu-none-8")
    assert done.code == 2
    assert "unknown instance 'gpu-none-8'" in done.err


def test_positions_that_do_not_divide_are_refused_with_those_that_do(aot):
    done = aot("--set", 'mesh_shape={"seq": 8}', "--set", "seq_len=20", instance="cpu-8")
    assert done.code == 2
    assert "dim 1 of size 20 does not divide into 8 parts (seq=8) [AX458]" in done.err
    assert "make seq_len 16 or 24" in done.err
