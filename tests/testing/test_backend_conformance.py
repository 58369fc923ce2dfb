"""The backend suite passes on core's own machines and catches what is not a machine."""

from __future__ import annotations

import dataclasses

import pytest

from axcore.parallel import resolve_instance
from axcore.testing import BackendConformance, FitCase
from axcore.testing import _backends as backends

FIT = FitCase("tiny-lm", "cpu-8", "cpu-simulated", {"fsdp": -1, "model": 1}, "none")


class TestCore(BackendConformance):
    distribution = "axcore"
    instances = ("cpu", "cpu-8")
    absent = ("cpu-0",)
    fits = (FIT,)


def test_machines_are_found_from_patterns():
    class Suite(BackendConformance):
        distribution = "axcore"

    assert Suite()._instances() == ("cpu", "cpu-1")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hbm_bytes": 0}, "hbm_bytes"),
        ({"peak_flops": {"bfloat16": 0.0}}, "peak_flops"),
        ({"family": "another"}, "another"),
    ],
    ids=["memory", "rate", "family"],
)
def test_a_machine_with_impossible_facts_is_caught(monkeypatch, change, what):
    def resolve(name):
        return dataclasses.replace(resolve_instance(name), **change)

    monkeypatch.setattr(backends, "resolve_instance", resolve)
    with pytest.raises(AssertionError, match=what):
        TestCore().test_instances_resolve_to_machines()


def test_a_compiler_that_takes_any_error_for_a_lack_of_memory_is_caught(monkeypatch):
    from axcore.parallel.aot import OutOfMemory
    from axcore.parallel.aot._cpu import CpuCompiler

    monkeypatch.setattr(CpuCompiler, "out_of_memory", lambda self, error: OutOfMemory(1))
    with pytest.raises(AssertionError):
        TestCore().test_the_compiler_keeps_the_protocol()


@pytest.mark.parametrize(
    "change",
    [{"mesh": {"fsdp": 8}}, {"remat": "full"}, {"accumulation_steps": 2}, {"rule": "a1"}],
    ids=str,
)
def test_an_experiment_that_is_fitted_otherwise_is_caught(change):
    with pytest.raises(AssertionError):
        TestCore().test_experiments_fit_machines(dataclasses.replace(FIT, **change))


def test_an_experiment_that_takes_too_much_memory_is_caught(monkeypatch):
    monkeypatch.setattr(backends, "budget_bytes", lambda instance: 2**20)
    with pytest.raises(AssertionError, match="MemoryEstimate"):
        TestCore().test_experiments_fit_machines(FIT)


def test_an_experiment_of_an_absent_package_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="tiny-lm needs acme_models"):
        TestCore().test_experiments_fit_machines(
            dataclasses.replace(FIT, requires=("acme_models",))
        )
