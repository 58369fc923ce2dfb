"""Compiling a training step ahead of time, for machines that are nowhere."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import jax
import pytest

from axcore import experiments
from axcore.errors import AotError
from axcore.layers import LayerNorm, RMSNorm
from axcore.parallel import MemoryUse
from axcore.parallel.aot import CompileResult, OutOfMemory
from axcore.testing import only_distribution, write_distribution
from axcore.train import aot, assemble

AOT = importlib.import_module("axcore.train._aot")

pytestmark = pytest.mark.xdist_group("aot")


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """Core and the fake chips' plugin, nothing else."""
    path = tmp_path_factory.mktemp("site")
    write_distribution(
        path,
        "fake-chip",
        None,
        entry_points={"fake-chip": "fake_chip.plugin"},
        module="fake_chip/__init__",
    )
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    with only_distribution(path, "fake-chip", Path(__file__).parent / "machines"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    for name in [n for n in sys.modules if n.startswith("fake_chip")]:
        del sys.modules[name]


def micro():
    """tiny-lm of one layer, as small as it gets."""
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 16
    cfg.model.decoder.num_layers = 1
    return cfg.set(batch_size=16, seq_len=16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "aot"


@pytest.fixture(scope="module")
def report(installed, cache):
    return aot(assemble(micro(), instance="fake-big-8"), experiment="micro", cache=cache)


def test_parameters_and_optimizer_are_the_bytes_of_their_shardings(report):
    vocab, dim, seq = 264, 16, 16
    # With the width among their dims: the table, positions, three norms, q k v o, up, down.
    split = vocab * dim + seq * dim + 3 * 2 * dim + (4 * dim * dim + dim)
    split += 2 * dim * 4 * dim + dim
    whole = 3 * dim + 4 * dim  # biases of q, k, v and up
    parameters = 4 * (split // 8 + whole)
    assert report.hbm_bytes["parameters"] == parameters
    # Two moments and a few counters.
    assert 2 * parameters <= report.hbm_bytes["optimizer"] <= 2 * parameters + 32


def test_the_kinds_add_up_to_what_the_compiler_says(report):
    kinds = {k: n for k, n in report.hbm_bytes.items() if k != "total"}
    assert sum(kinds.values()) == report.hbm_bytes["total"] == report.needed_bytes
    assert min(kinds.values()) >= 0 and kinds["activations"] > 0 and kinds["temporaries"] > 0
    batch = 16 // 8 * 16 * (4 * 4 + 1)  # four int32 and a mask, this device's rows
    assert batch <= kinds["other_arguments"] <= batch + 64  # step and key beside it


def test_a_report_says_what_runs_where_and_how_fast(report):
    assert (report.fits, report.compiled, report.cached) == (True, True, False)
    assert (report.instance, report.devices, report.mesh["fsdp"]) == ("fake-big-8", 8, 8)
    assert report.compiler == {"name": "fake", "version": "1.0"}
    assert report.blind_spots == ("it is not a real one",)
    assert report.hbm_limit_bytes == 2**30
    assert report.compile_seconds and report.compile_peak_rss_bytes and report.lower_seconds > 0
    assert {c.mesh_axes for c in report.collectives} == {"fsdp"}
    assert "embedding" in {b.path for b in report.largest_buffers}
    assert {k["op"] for k in report.kernels} >= {"attention", "layer_norm"}
    predicted = report.predicted
    assert predicted["mfu_causal"] < predicted["mfu_noncausal"] < 1
    assert predicted["bound_by"] in predicted["seconds"]


def test_flops_are_of_the_whole_step_under_both_conventions(report):
    vocab, dim, seq, tokens = 264, 16, 16, 256
    # A product of a weight and a token costs 2 forward and 4 backward; queries with keys and
    # weights with values are 2 products over (seq + 1) / 2 visible keys, or all.
    weights = 4 * dim * dim + 2 * dim * 4 * dim + vocab * dim
    expected = {n: 6 * (weights + 2 * dim * n) * tokens for n in ((seq + 1) / 2, seq)}
    assert report.flops["model_causal"] == expected[(seq + 1) / 2]
    assert report.flops["model_noncausal"] == expected[seq]
    # The reference multiplies all queries with all keys, and nothing is recomputed.
    assert report.flops["hardware_matmul"] == expected[seq]
    assert report.flops["hardware"] > report.flops["hardware_matmul"]
    assert report.flops["recompute"] == 0


def test_a_known_program_is_not_compiled_again(report, cache, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("compiled again")

    monkeypatch.setattr("axcore.parallel.LoweredStep.compile", refuse)
    again = aot(assemble(micro(), instance="fake-big-8"), cache=cache)
    assert again.cached
    assert again.hbm_bytes == report.hbm_bytes
    assert again.collectives == report.collectives
    assert again.largest_buffers == report.largest_buffers
    # Options are part of what is known.
    compiler = sys.modules["fake_chip.machine"].FakeCompiler
    monkeypatch.setattr(compiler, "compile_options", lambda *a: {"xla_some_option": True})
    with pytest.raises(AotError, match="compiled again"):
        aot(assemble(micro(), instance="fake-big-8"), cache=cache)


def test_a_damaged_answer_is_made_anew_and_said(report, cache, caplog, monkeypatch):
    for place in cache.iterdir():
        place.write_text("{")
    monkeypatch.setattr("axcore.parallel.LoweredStep.compile", lambda *a: 1 / 0)
    with pytest.raises(AotError, match=r"fake cannot compile .* ZeroDivisionError") as error:
        aot(assemble(micro(), instance="fake-big-8"), cache=cache)
    assert (error.value.code, error.value.exit_code) == ("AX484", 4)
    assert "made anew" in caplog.text


@pytest.mark.slow
def test_what_does_not_fit_comes_with_what_was_tried():
    lines = []
    small = assemble(micro(), instance="fake-small-8")
    report = aot(small, progress=lines.append)
    assert not report.fits
    assert report.needed_bytes > report.hbm_limit_bytes
    *failed, last = report.advice
    assert len(failed) <= 2 and not any(knob.fits for knob in failed)
    assert last.fits and last.needed_bytes <= report.hbm_limit_bytes
    assert report.smallest_instance is None
    assert any("trying" in line for line in lines)
    # A user who sets it gets what was promised.
    changed = assemble(micro(), instance="fake-small-8", sets=last.sets)
    monkey = aot(changed, advice=False)
    assert (monkey.fits, monkey.needed_bytes) == (True, last.needed_bytes)


def with_kernel():
    """As micro, with the norm that has a kernel."""
    cfg = micro()
    cfg.replace(LayerNorm.Config, RMSNorm.Config())
    return cfg


def test_a_kernel_that_cannot_be_built_is_an_error_that_names_the_way_out():
    with pytest.raises(
        AotError, match=r"rms_norm.fake_root \(its assembler is not here\)"
    ) as error:
        aot(assemble(with_kernel(), instance="fake-big-2"))
    assert (error.value.code, error.value.exit_code) == ("AX483", 2)
    assert "decoder/final_norm" in error.value.where
    assert "--stand-in" in error.value.hint


@pytest.mark.parametrize(("instance", "flag"), [("fake-big-2", True), ("fake-kind-2", False)])
def test_a_stand_in_is_compiled_when_the_user_or_the_instance_accepts_it(
    instance, flag, monkeypatch
):
    monkeypatch.setattr(AOT, "compile_for", _fits)
    report = aot(assemble(with_kernel(), instance=instance), stand_in=flag)
    sites = {s.site for s in report.substituted}
    assert sites == {
        "decoder/layer/0:1:1/attention_norm",
        "decoder/layer/0:1:1/feed_forward_norm",
        "decoder/final_norm",
    }
    first = report.substituted[0]
    assert (first.op, first.chosen, first.compiled) == ("rms_norm", "fake_root", "xla")
    assert report.to_json()["with_stand_ins"]
    (kernel,) = [k for k in report.kernels if k["op"] == "rms_norm"]
    assert kernel["chosen"] == "fake_root"


def _fits(*args, **kwargs):
    return CompileResult(MemoryUse(10, 0, 0, 5, 1, 0), None, (), (), 0.1, None)


def _refused(*args, **kwargs):
    return CompileResult(None, OutOfMemory(3 * 2**30, 2**30), (), (), 0.1, None)


def test_an_error_of_the_compiler_can_say_that_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(AOT, "compile_for", _refused)
    report = aot(assemble(micro(), instance="fake-big-2"))
    assert not report.fits and report.needed_bytes == 3 * 2**30
    # Nothing tried fits either: the model names a machine, scaled by what the compiler said.
    assert len(report.advice) == 3 and not any(knob.fits for knob in report.advice)
    assert report.smallest_instance in ("fake-big-4", "fake-big-8", "fake-big-16")
    assert report.hbm_bytes["parameters"] == 4 * ((7792 - 112) // 2 + 112)


def test_without_a_compiler_the_model_answers_and_says_so():
    report = aot(assemble(micro(), instance="fake-none-8"))
    assert (report.compiled, report.fits, report.compile_seconds) == (False, True, None)
    assert report.collectives == () and report.largest_buffers == ()
    assert report.hbm_bytes["parameters"] == 4288
    assert report.flops["hardware_matmul"] == report.flops["model_noncausal"]
    assert any("no compiler" in note for note in report.notes)


def test_a_large_model_on_many_slices_is_traced_without_allocating():
    """260 GB of parameters on 4,096 devices in 4 slices: shapes and nothing else."""
    cfg = micro()
    cfg.model.model_dim = 8192
    cfg.model.decoder.num_layers = 80
    cfg.model.decoder.layer.attention.num_heads = 64
    cfg.set(batch_size=8192, accumulation_steps=2)
    whole = assemble(cfg, instance="fake-none-4096")
    machine = dataclasses.replace(whole.instance, num_slices=4, num_hosts=4, devices_per_host=1024)
    report = aot(dataclasses.replace(whole, instance=machine), advice=False)
    # Slices are replicas: each holds all of the parameters, over its 1,024 devices.
    assert (report.mesh["data"], report.mesh["fsdp"]) == (4, 1024)
    weights = 4 * 12 * 80 * 8192**2 // 1024
    assert weights < report.hbm_bytes["parameters"] < 1.1 * weights
