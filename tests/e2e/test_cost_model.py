"""The cost model beside published step times: the error that is stated is the one there is."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from axcore.parallel import MeshShape, resolve_instance
from axcore.parallel.cost import predict_step
from axcore.plugins import host

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.xdist_group("cost_model"),
    pytest.mark.skipif(
        not {"axlearn-tpu", "axlearn-gpu", "axlearn-neuron", "axlearn-models"}
        <= {record.distribution for record in host(check=False).active_records()},
        reason="needs the plugins axlearn-tpu, axlearn-gpu, axlearn-neuron and axlearn-models",
    ),
]


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location(
        "cost_model_benchmark", ROOT / "benchmarks" / "cost_model.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def calibrated(benchmark):
    return benchmark.calibrate()


def dense(calibrated):
    """The rows of models that do not depend on a mixture of experts: two of each kind."""
    return [f for f in calibrated[0] if f.row.experiment.startswith("fuji")]


def test_a_row_is_predicted_from_the_other_of_its_hardware_within_a_tenth(calibrated):
    rows = dense(calibrated)
    assert {f.kind for f in rows} == {"gpu-h100", "tpu-v5p", "neuron-trn2"}
    errors = {f.row.name: f.error for f in rows}
    # Issue 4 aims at 15 %; 5.5 % are reached, and a change that doubles it should be looked at.
    assert all(error is not None and abs(error) < 0.1 for error in errors.values()), errors


def test_published_mfus_follow(calibrated):
    for f in dense(calibrated):
        # Half of the leave-one-out error, since each row is among those that were fitted.
        assert 100 * f.prediction.mfu_noncausal == pytest.approx(f.row.mfu, rel=0.06), f.row.name
        assert f.prediction.mfu_causal < f.prediction.mfu_noncausal


def test_plugins_state_the_fitted_number_and_where_it_is_from(calibrated):
    for f in dense(calibrated):
        instance = resolve_instance(f.row.instance)
        # The number stands in the plugin with three digits; 2 % of it are 1 % of a step.
        assert instance.matmul_efficiency == pytest.approx(f.prediction.efficiency, rel=0.02)
        assert "benchmarks/cost_model.py" in instance.matmul_efficiency_source
        assert "AXLearn paper" in instance.matmul_efficiency_source


@pytest.mark.parametrize("name", ["tpu-v6e-256", "gpu-b200-8", "neuron-trn1.32xlarge-1"])
def test_a_number_that_was_not_fitted_says_whose_it_is(name):
    assert re.fullmatch(r"that of \w+, not fitted", resolve_instance(name).matmul_efficiency_source)


def test_the_printed_rule_cannot_be_that_of_the_small_model(benchmark):
    row = benchmark.ROWS[0]
    model = benchmark.model_of(row.experiment, row.instance, row.others[0], seq_len=row.seq_len)
    # Not even with products at the peak.
    assert model.at(1.0).step_seconds > 1.25 * row.seconds


def test_rows_that_cannot_run_are_named_with_the_reason(benchmark, calibrated):
    fitted, skipped = calibrated
    assert {f.row.name for f in fitted} | set(skipped) == {row.name for row in benchmark.ROWS}
    assert all("the catalog has no" in reason for reason in skipped.values())


def test_the_rows_of_the_mixture_on_the_page_are_those_that_are_computed(benchmark, calibrated):
    page = (ROOT / "docs" / "cost.md").read_text()
    table = re.findall(r"^\| 30B-A3B, 512 (\w+) \| (.+) \|$", page, re.M)
    kinds = {"v5p": "tpu-v5p-1024", "B200": "gpu-b200-512"}
    found = {f.row.instance: f for f in calibrated[0] if f.row.experiment == "qwen3-30B-A3B"}
    assert set(found) == {kinds[chip] for chip, _ in table} == set(kinds.values())
    for chip, rest in table:
        f = found[kinds[chip]]
        mesh, published, seconds, mfu, full, causal, efficiency, error = rest.split(" | ")
        assert mesh == f"{MeshShape.of(f.row.mesh).describe()}, {f.microbatches}"
        assert (float(published), float(mfu)) == (f.row.seconds, f.row.mfu)
        assert float(seconds) == pytest.approx(f.prediction.step_seconds, abs=0.01)
        assert float(full) == pytest.approx(100 * f.prediction.mfu_noncausal, abs=0.1)
        assert float(causal) == pytest.approx(100 * f.prediction.mfu_causal, abs=0.1)
        assert float(efficiency) == pytest.approx(f.prediction.efficiency, abs=0.002)
        assert float(error.removesuffix(" %")) == pytest.approx(100 * f.error, abs=0.3)


def test_the_table_of_the_page_is_the_one_that_is_computed(calibrated):
    page = (ROOT / "docs" / "cost.md").read_text()
    names = {"7B": "fuji-7B-v2", "70B": "fuji-70B-v2"}
    table = re.findall(r"^\| (7B|70B), [\d,]+ (\w+) \| (.+) \|$", page, re.M)
    assert len(table) == 6
    found = {(f.row.experiment, f.kind): f for f in dense(calibrated)}
    kinds = {"H100": "gpu-h100", "v5p": "tpu-v5p", "Trainium2": "neuron-trn2"}
    for size, chip, rest in table:
        f = found[names[size], kinds[chip]]
        mesh, published, seconds, mfu, full, causal, efficiency, error = rest.split(" | ")
        assert mesh == f"{MeshShape.of(f.row.mesh).describe()}, {f.microbatches}"
        assert (float(published), float(mfu)) == (f.row.seconds, f.row.mfu)
        # The page has two decimals of seconds and one of percents.
        assert float(seconds) == pytest.approx(f.prediction.step_seconds, abs=0.01)
        assert float(full) == pytest.approx(100 * f.prediction.mfu_noncausal, abs=0.1)
        assert float(causal) == pytest.approx(100 * f.prediction.mfu_causal, abs=0.1)
        assert float(efficiency) == pytest.approx(f.prediction.efficiency, abs=0.002)
        assert float(error.removesuffix(" %")) == pytest.approx(100 * f.error, abs=0.3)


def test_the_rule_of_a_machine_is_predicted_without_it():
    from axcore import experiments
    from axcore.train import assemble

    built = assemble(experiments.get("fuji-7B-v2"), instance="tpu-v5e-256")
    found = predict_step(built.cfg, built.instance)
    assert found.memory.num_devices == 256
    assert any("offloaded" in note for note in found.notes)


def test_what_rules_give_mixtures_is_what_the_page_shows():
    from axcore import experiments
    from axcore.train import assemble

    page = (ROOT / "docs" / "cost.md").read_text()
    names = {
        "Qwen3-30B-A3B (16,384)": ("qwen3-30B-A3B", ["seq_len=16384"]),
        "DeepSeek-V3": ("deepseek-V3", []),
        "Mixtral 8x7B": ("mixtral-8x7B", []),
    }
    of = "|".join(map(re.escape, names))
    table = re.findall(rf"^\| ({of}), (\S+-\d+) \| (.+) \|$", page, re.M)
    assert len(table) == 6
    for name, instance, rest in table:
        experiment, sets = names[name]
        built = assemble(experiments.get(experiment), instance=instance, sets=sets)
        found = predict_step(built.cfg, built.instance)
        settings, gib, seconds, _, exchanged = rest.split(" | ")
        assert settings.startswith(
            f"{built.cfg.mesh_shape.describe()}, {built.cfg.accumulation_steps}, "
        )
        assert gib.split()[0] == f"{found.memory.total / 2**30:.1f}"
        # Three digits, or two.
        assert float(seconds) == pytest.approx(found.step_seconds, rel=0.01)
        received = found.collective_bytes.get(("all_to_all", "expert"), 0)
        assert exchanged == f"{received / 2**30:,.0f}"


@pytest.mark.slow
def test_predicted_steps_of_recipes_are_those_that_the_page_shows():
    """`python benchmarks/quantization.py --predict fuji-7B-v2` makes the table."""
    path = ROOT / "benchmarks" / "quantization.py"
    spec = importlib.util.spec_from_file_location("quantization_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    header, *rows = (
        row for row in module.prediction_table("fuji-7B-v2").splitlines() if row.startswith("| ")
    )
    page = (ROOT / "docs" / "quantization.md").read_text()
    assert header in page and len(rows) == len(module.MACHINES)
    for row in rows:
        assert row in page, row
        faster = float(row.split("|")[5].strip(" x"))
        assert 1.2 < faster < 2.0, row  # products are the most of a step, and twice as fast
