"""The suite of hardware plugins: machines, rules, options, compiler, what kernels answer."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from axcore.errors import AotError, PluginError
from axcore.parallel import MeshShape, abstract_mesh, resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.parallel.cost import memory_estimate
from axcore.parallel.plan import budget_bytes
from axcore.plugins import InstanceTypeSpec, KernelSpec, host, load_target
from axcore.train import assemble

from ._kernels import KernelConformance
from ._op_cases import default_cases, known_ops
from ._rules import FitCase

__all__ = ["BackendConformance"]

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Facts of machines that a missing number would silently turn into nonsense.
_POSITIVE = ("num_hosts", "devices_per_host", "hbm_bytes", "num_slices")
_FOR_COMPILERS = ("AX480", "AX481")


class BackendConformance:
    """Checks what one distribution says of hardware.

    Attributes:
        distribution: The distribution's name.
        instances: Names of machines to check; by default one of each type, found by trying sizes
            in place of a last ``*`` of its pattern.
        absent: Names that its patterns cover and that do not exist.
        experiments: Experiments to fit to each machine: models of different traits.
        rows_per_device: Rows of the batch for each device.
        fits: Experiments at their own size, and what the rules must make of them; by the model of
            memory they fit.

    Example:
        ```python
        class TestAcme(BackendConformance):
            distribution = "acme-accelerators"
            instances = ("acme-a1-8", "acme-a1-256")
            absent = ("acme-a1-3",)
            fits = (FitCase("tiny-lm", "acme-a1-8", "a1", {"fsdp": -1}, "none"),)
        ```
    """

    distribution: str
    instances: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ("tiny-lm",)
    rows_per_device: int = 1
    fits: tuple[FitCase, ...] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Runs the test of ``fits`` once per case."""
        if "fit" in metafunc.fixturenames:
            none = pytest.mark.skip(reason="the suite names no experiment that must fit")
            cases = self.fits or (pytest.param(None, marks=none, id="none"),)
            metafunc.parametrize("fit", cases, ids=lambda fit: fit.name)

    def test_instances_resolve_to_machines(self) -> None:
        for name in self._instances():
            instance = resolve_instance(name)
            spec = host().instance_type(name)
            assert instance.name == name
            assert (instance.family, instance.platform) == (spec.family, spec.platform)
            for field in _POSITIVE:
                assert getattr(instance, field) > 0, f"{name}: {field}"
            assert instance.num_devices == instance.num_hosts * instance.devices_per_host
            for dtype, rate in instance.peak_flops.items():
                assert rate > 0, f"{name}: peak_flops[{dtype!r}]"

    def test_every_instance_type_has_a_machine(self) -> None:
        checked = self._instances()
        for spec in self._instance_types():
            assert any(fnmatch.fnmatchcase(name, spec.pattern) for name in checked), (
                f"none of {checked} is a {spec.pattern}: name one in `instances`"
            )

    def test_machines_that_do_not_exist_are_refused(self) -> None:
        if not self.absent:
            pytest.skip("the suite names no absent machine")
        for name in self.absent:
            with pytest.raises(PluginError):
                resolve_instance(name)

    def test_detect_names_a_machine_or_none(self) -> None:
        for spec in self._instance_types():
            if spec.detect is None:
                continue
            name = load_target(spec.detect, where=spec.name)()
            assert name is None or resolve_instance(name).family == spec.family

    def test_rules_give_meshes_of_all_devices(self) -> None:
        from axcore import experiments

        for name in self._instances():
            num = resolve_instance(name).num_devices
            for experiment in self.experiments:
                cfg = experiments.get(experiment).set(batch_size=num * self.rows_per_device)
                a = assemble(cfg, instance=name)
                shape = MeshShape.of(a.cfg.mesh_shape)
                mesh = abstract_mesh(shape, num, a.instance.num_slices)
                assert mesh.size == num, f"{experiment} on {name}"
                a.cfg.sharding_rules.check()

    def test_experiments_fit_machines(self, fit: FitCase) -> None:
        from axcore import experiments

        for package in fit.requires:
            pytest.importorskip(package, reason=f"{fit.experiment} needs {package}")
        a = assemble(experiments.get(fit.experiment), instance=fit.instance, sets=fit.sets)
        cfg: Any = a.cfg
        shape = MeshShape.of(cfg.mesh_shape)
        mesh = {axis: getattr(shape, axis) for axis in fit.mesh}
        policies = {node.remat.policy for _, node in cfg.walk() if "remat" in node.fields()}
        expected = (fit.mesh, {fit.remat}, fit.accumulation_steps)
        assert (mesh, policies, cfg.accumulation_steps) == expected
        assert cfg.set_by("mesh_shape").name == f"{self._owner()}:{fit.rule}"
        memory = memory_estimate(cfg, num_devices=a.instance.num_devices)
        assert memory.total <= budget_bytes(a.instance), memory

    def test_rules_and_options_match_machines_and_give_reasons(self) -> None:
        names = self._instances()
        for registry in (host().mesh_rules, host().compiler_options):
            for name, spec, owner in registry.items():
                if owner != self._owner():
                    continue
                assert spec.reason.strip(), f"{name} gives no reason"
                matched = any(fnmatch.fnmatchcase(n, spec.pattern) for n in names)
                assert matched or not self.instances, (
                    f"{name} is for {spec.pattern}, which none of {names} is"
                )

    def test_the_compiler_keeps_the_protocol(self) -> None:
        platforms = {resolve_instance(name).platform for name in self._instances()}
        ours = {p for p in platforms if p in host().compilers}
        ours = {p for p in ours if host().compilers.owner(p) == self._owner()}
        if not ours:
            pytest.skip("the distribution provides no compiler")
        for name in self._instances():
            instance = resolve_instance(name)
            if instance.platform not in ours:
                continue
            compiler: Any = compiler_for(instance)
            assert isinstance(compiler.name, str)
            assert compiler.name
            assert isinstance(compiler.compiles, bool)
            assert isinstance(compiler.reports_out_of_memory, bool)
            assert all(isinstance(line, str) for line in compiler.blind_spots)
            limit = compiler.memory_limit_bytes(instance)
            # Vendors round what they publish.
            assert 0 < limit <= instance.hbm_bytes * 1.02, f"{name}: {limit} bytes"
            assert compiler.out_of_memory(ValueError("something else")) is None
            for key, value in compiler.compile_options(instance).items():
                assert isinstance(key, str)
                assert isinstance(value, bool | int | float | str)
            for (op, kernel), (stand_in, reason) in compiler.stand_ins.items():
                assert f"{op}.{kernel}" in host().kernels, f"{op}.{kernel} is no kernel"
                assert f"{op}.{stand_in}" in host().kernels, f"{op}.{stand_in} is no kernel"
                assert reason.strip()
            try:
                assert compiler.version()
            except AotError as error:
                assert error.code in _FOR_COMPILERS, error
                assert error.hint, "say which extra to install"

    def test_kernels_answer_every_usual_call(self) -> None:
        """``supports`` gives a reason or None; what the kernel itself imports need not be here."""
        for spec in self._kernels():
            suite = KernelConformance()
            suite.op, suite.implementation = spec.op, spec.implementation
            for case in default_cases(spec.op) if spec.op in known_ops() else ():
                suite.test_supports_gives_a_reason_or_none(case)

    def _owner(self) -> str:
        return canonicalize_name(self.distribution)

    def _instance_types(self) -> list[InstanceTypeSpec]:
        items = host().instance_types.items()
        return [spec for _, spec, owner in items if owner == self._owner()]

    def _kernels(self) -> list[KernelSpec]:
        return [spec for _, spec, owner in host().kernels.items() if owner == self._owner()]

    def _instances(self) -> tuple[str, ...]:
        if self.instances:
            return self.instances
        return tuple(n for spec in self._instance_types() if (n := _example(spec)) is not None)


def _example(spec: InstanceTypeSpec) -> str | None:
    """A machine of the type, or None when none of the usual sizes exists."""
    if not any(c in spec.pattern for c in "*?["):
        return spec.pattern
    for size in _SIZES:
        name = spec.pattern.replace("*", str(size))
        try:
            resolve_instance(name)
        except PluginError:
            continue
        return name
    return None
