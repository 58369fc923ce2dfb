"""What a run reports of the machine's use, against FLOPs over peak by hand."""

from __future__ import annotations

import pytest

from axcore import experiments
from axcore.parallel import cost
from axcore.parallel.cost import model_flops
from axcore.plugins import Instance
from axcore.train._utilization import utilization


def machine(**fields) -> Instance:
    known = dict(
        name="test-4",
        family="test",
        platform="test",
        num_hosts=1,
        devices_per_host=4,
        hbm_bytes=2**34,
        hbm_bandwidth_bytes=1e12,
        peak_flops={"float32": 1e9},
        ici_bandwidth_bytes=1e11,
    )
    return Instance(**(known | fields))


def test_mfu_is_the_models_flops_over_the_peak_of_all_devices():
    cfg = experiments.get("tiny-lm")
    report = utilization(cfg, machine(), 1000.0)
    train = model_flops(cfg).train
    assert report["mfu"]["causal"] == pytest.approx(train.causal * 1000 / 4e9)
    assert report["mfu"]["noncausal"] == pytest.approx(train.full * 1000 / 4e9)
    assert report["tokens_per_second_per_device"] == 250.0
    assert report["bound_by"] == "matmul" and report["predicted_step_seconds"] > 0
    assert report["peak_flops"] == {"float32": 1e9}
    assert "mfu_unknown" not in report


def test_the_peak_is_named_by_the_dtype_that_states_it():
    report = utilization(experiments.get("tiny-lm"), machine(peak_flops={"bfloat16": 4e9}), 1000.0)
    assert report["peak_flops"] == {"bfloat16": 4e9}  # of products of float32


def test_without_a_timed_step_only_the_prediction_is_there():
    report = utilization(experiments.get("tiny-lm"), machine(), None)
    assert report["mfu"] == {"causal": None, "noncausal": None}
    assert report["mfu_unknown"] == "no step was timed"
    assert report["predicted_step_seconds"] > 0


def test_a_machine_without_stated_rates_does_not_fail_a_run():
    report = utilization(experiments.get("tiny-lm"), machine(peak_flops={}), 1000.0)
    assert report["mfu"]["causal"] is None and report["tokens_per_second_per_device"] == 250.0
    assert "no peak rate for products of float32" in report["mfu_unknown"]


def test_a_layer_that_cannot_be_counted_does_not_fail_a_run(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise KeyError("a layer of another kind")

    monkeypatch.setattr(cost, "predict_step", broken)
    report = utilization(experiments.get("tiny-lm"), machine(), 1000.0)
    assert report["mfu_unknown"].startswith("KeyError")
    assert "MFU is not known" in caplog.text
