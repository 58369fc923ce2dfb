"""Discovery, filters, collisions, versions, look-up, requirements, trust."""

from __future__ import annotations

import random
import sys

import pytest

from axcore.errors import PluginError, PluginLookupError
from axcore.plugins import PluginHost, host, reset_host, switch_off_plugins


@pytest.fixture
def two(site, hook):
    site.add("acme-a", hook("optimizers", 'NamedSpec("fast", "math:sqrt")'))
    site.add("acme-b", hook("optimizers", 'NamedSpec("slow", "math:exp")'), version="2.5")
    return site


@pytest.fixture
def clean_environment(monkeypatch):
    for name in ("LOAD", "DISABLE", "STRICT"):
        monkeypatch.delenv(f"AXCORE_{name}_PLUGINS", raising=False)
    former = reset_host()
    yield monkeypatch
    reset_host(former)


def test_a_good_plugin_is_active_and_serves_its_specs(two):
    found = two.host()
    record = {r.name: r for r in found.records}["acme-b"]
    assert record.to_json() == {
        "distribution": "acme-b",
        "version": "2.5",
        "name": "acme-b",
        "status": "active",
        "reason": "",
        "provides": {"optimizers": ["slow"]},
    }
    assert found.optimizers.get("slow").target == "math:exp"
    assert found.optimizers.owner("slow") == "acme-b"
    assert found.optimizers.load("slow")(0) == 1.0


def test_core_is_the_first_record_and_registers_like_any_plugin(two):
    record = two.host().records[0]
    assert (record.distribution, record.name, record.status) == ("axcore", "core", "active")
    assert "cpu" in record.provides["instance_types"]


def test_no_plugins_leaves_core_alone(two):
    found = two.host(load=())
    assert [r.name for r in found.records if r.status == "active"] == ["core"]
    assert found.optimizers.names() == two.host(disable=["acme-a", "acme-b"]).optimizers.names()


@pytest.mark.parametrize("name", ["acme-a", "Acme_A", "entry"])
def test_filters_take_the_name_of_the_distribution_or_of_the_entry_point(site, name, status):
    site.add("acme-a", entry="entry")
    site.add("acme-b")
    assert status(site.host(disable=[name])) == {"entry": "disabled", "acme-b": "active"}
    assert status(site.host(load=[name])) == {"entry": "active", "acme-b": "disabled"}


def test_a_disabled_plugin_is_not_imported(site):
    module = site.add("acme", "1 / 0")
    assert site.host(disable=["acme"]).records[1].status == "disabled"
    assert module not in sys.modules


def test_a_filter_that_names_no_plugin_is_reported(two):
    assert two.host(disable=["acne-a"]).unmatched_filters == ("acne-a",)
    with pytest.raises(PluginError, match="no installed plugin is called 'acne-a'"):
        two.host(disable=["acne-a"], strict=True)


def test_strict_mode_names_every_plugin_that_is_not_active_and_chains_its_error(site):
    site.add("acme-bad", "1 / 0")
    site.add("acme-off")
    with pytest.raises(PluginError, match="acme-bad is failed: import failed: ZeroDiv") as caught:
        site.host(strict=True, disable=["acme-off"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "acme-off" not in caught.value.message


@pytest.mark.parametrize(
    ("requirement", "core", "status"),
    [
        ("axcore>=0.1,<0.2", "0.1.0", "active"),
        ("axcore>=0.2", "0.1.0", "incompatible"),
        ("axcore<0.1", "0.1.0", "incompatible"),
        ("AxCore >= 99", "0.1.0", "incompatible"),
        ("axcore>=0.3", "0.3.0.dev1", "active"),
        ("axcore>=0.3,<0.4", "0.3.0rc1", "active"),
        ("axcore<0.3", "0.3.0.dev1", "incompatible"),
        ("axcore>=0.4", "0.3.0.dev1", "incompatible"),
        ("axcore", "0.1.0", "active"),
        ("axcore>=99; python_version < '3'", "0.1.0", "active"),
        ("axcore>=99; extra == 'later'", "0.1.0", "active"),
        ("axcore-other>=99", "0.1.0", "active"),
    ],
)
def test_the_distributions_own_requirement_on_core_decides(site, requirement, core, status):
    site.add("acme", requires=["numpy", requirement])
    record = site.host(core_version=core).records[1]
    assert record.status == status
    if status == "incompatible":
        assert requirement.split(">")[0].strip().lower()[:6] in record.reason.lower()
        assert core in record.reason


def test_an_incompatible_plugin_is_not_imported(site):
    module = site.add("acme", requires=["axcore>=99"])
    site.host()
    assert module not in sys.modules


def test_a_name_from_two_distributions_makes_both_conflicting_and_names_both(site, hook, status):
    site.add("acme-a", hook("optimizers", 'NamedSpec("fast", "math:sqrt")'))
    site.add("acme-b", hook("optimizers", 'NamedSpec("fast", "math:exp")'))
    site.add("acme-c", hook("optimizers", 'NamedSpec("good", "math:exp")'))
    found = site.host()
    assert status(found) == dict.fromkeys(("acme-a", "acme-b"), "conflicting") | {
        "acme-c": "active"
    }
    reason = found.records[1].reason
    assert "acme-a" in reason and "acme-b" in reason and "optimizers 'fast'" in reason
    with pytest.raises(PluginLookupError, match="acme-a is conflicting"):
        found.optimizers.get("fast")


def test_a_filter_settles_a_conflict_because_filters_run_first(site, hook):
    site.add("acme-a", hook("optimizers", 'NamedSpec("fast", "math:sqrt")'))
    site.add("acme-b", hook("optimizers", 'NamedSpec("fast", "math:exp")'))
    assert site.host(disable=["acme-a"]).optimizers.owner("fast") == "acme-b"


def test_a_name_of_cores_stays_cores(site, hook, status):
    site.add("acme", hook("optimizers", 'NamedSpec("adamw", "math:sqrt")'))
    found = site.host()
    assert status(found) == {"acme": "conflicting"}
    assert "axcore (core) and acme (acme) both provide optimizers 'adamw'" in (
        found.records[1].reason
    )
    assert found.optimizers.owner("adamw") == "axcore"


def test_two_distributions_with_the_same_entry_point_name_are_both_reported(site, hook, status):
    site.add("acme-a", entry="acme")
    site.add("acme-b", entry="acme")
    found = site.host()
    assert [r.status for r in found.records[1:]] == ["conflicting", "conflicting"]
    assert all("acme-a" in r.reason and "acme-b" in r.reason for r in found.records[1:])


def test_two_kernels_of_one_op_and_implementation_conflict(site, hook, status):
    kernel = 'KernelSpec(op="rms_norm", implementation="acme", platforms=("gpu",), target="a:b")'
    site.add("acme-a", hook("kernels", kernel))
    site.add("acme-b", hook("kernels", kernel))
    assert set(status(site.host()).values()) == {"conflicting"}


def test_no_result_depends_on_the_order_in_which_plugins_are_found(site, hook):
    for i in range(6):
        name = "shared" if i < 2 else f"own{i}"
        site.add(f"acme-{i}", hook("optimizers", f'NamedSpec("{name}", "math:sqrt")'))
    site.add("acme-broken", "1 / 0")
    shuffler = random.Random(0)
    seen = set()
    for _ in range(5):
        candidates = list(site.candidates())
        shuffler.shuffle(candidates)
        found = PluginHost(candidates)
        seen.add((found.digest(), found.records, found.optimizers.names()))
    assert len(seen) == 1


def test_a_plugin_is_imported_once(site):
    module = site.add(
        "acme", "import builtins\nbuiltins.zoo_count = getattr(builtins, 'zoo_count', 0) + 1"
    )
    import builtins

    try:
        site.host()
        site.host()
        assert builtins.zoo_count == 1
        assert module in sys.modules
    finally:
        del builtins.zoo_count


def test_a_copy_later_on_the_path_is_shadowed_as_for_python(site, tmp_path):
    from axcore.plugins import find_candidates
    from axcore.testing import write_distribution

    site.add("acme", version="2.0")
    write_distribution(tmp_path / "later", "acme", "", version="1.0", module="zoo_shadowed")
    found = find_candidates([str(site.path), str(tmp_path / "later")])
    assert [c.version for c in found] == ["2.0"]


def test_digest_changes_with_version_and_specs_and_not_with_a_disabled_plugin(site, hook):
    alone = site.host().digest()
    site.add("acme", hook("optimizers", 'NamedSpec("fast", "math:sqrt")'))
    assert site.host().digest() != alone
    assert site.host(disable=["acme"]).digest() == alone
    assert site.host(core_version="0.1.99").digest() != site.host().digest()


def test_a_missing_name_raises_with_near_misses_and_known_names(two):
    with pytest.raises(PluginLookupError, match=r"no optimizer named 'fats'; known: .*slow") as e:
        two.host().optimizers.get("fats")
    assert "did you mean 'fast'" in str(e.value)


def test_a_target_with_a_missing_package_says_so_and_chains(site, hook):
    site.add("acme", hook("optimizers", 'NamedSpec("fast", "no_such_package_at_all.x:y")'))
    with pytest.raises(PluginError, match="cannot import 'no_such_package_at_all") as caught:
        site.host().optimizers.load("fast")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "install the package" in str(caught.value.hint)
    assert "of acme" in str(caught.value)


def test_a_target_without_the_attribute_says_so(site, hook):
    site.add("acme", hook("optimizers", 'NamedSpec("fast", "math:sqrtt")'))
    with pytest.raises(PluginError, match="no attribute 'sqrtt'") as caught:
        site.host().optimizers.load("fast")
    assert "'sqrt'" in str(caught.value.hint)


@pytest.mark.parametrize("required", ["acme-b", "acme-b>=2,<3", "Acme_B==2.5", "axcore>=0.0"])
def test_required_plugins_that_are_there_pass(two, required):
    two.host().check_required([required])


@pytest.mark.parametrize(
    ("required", "message"),
    [
        ("acme-b<2", "installed as 2.5"),
        ("acme-x>=1", "not installed"),
        ("acme b", "not a requirement"),
        ("acme-bad", "is failed: import failed: ZeroDivisionError"),
        ("acme-off", "is disabled"),
    ],
)
def test_required_plugins_that_are_not_raise(two, required, message):
    two.add("acme-bad", "1 / 0")
    two.add("acme-off")
    with pytest.raises(PluginError, match=message):
        two.host(disable=["acme-off"]).check_required([required])


def test_trusted_are_core_active_plugins_and_what_they_declare(site):
    good = site.add("acme", requires=["pyarrow>=1", "numpy", "no-such-distribution"])
    bad = site.add("broken", "1 / 0", requires=["hypothesis"])
    trusted = site.host().trusted_packages()
    assert {"axcore", "pyarrow", good} <= trusted
    # Of core's own dependencies a text may name only what axcore.config lists.
    assert not {"numpy", "jax", "jaxlib", "optax"} & trusted
    assert not {"hypothesis", bad, "no_such_distribution", "os", "subprocess"} & trusted


def test_the_process_has_one_host(clean_environment):
    assert host() is host()


def test_the_environment_filters_the_process_host(clean_environment):
    clean_environment.setenv("AXCORE_LOAD_PLUGINS", "axlearn-moe, axlearn-rope")
    clean_environment.setenv("AXCORE_DISABLE_PLUGINS", "axlearn-moe")
    active = {r.distribution for r in host().records if r.status == "active"}
    assert active == {"axcore", "axlearn-rope"}


def test_an_empty_allow_list_loads_nothing(clean_environment):
    clean_environment.setenv("AXCORE_LOAD_PLUGINS", "")
    assert {r.distribution for r in host().active_records()} == {"axcore"}


def test_no_plugins_holds_for_child_processes_too(clean_environment):
    clean_environment.setenv("AXCORE_LOAD_PLUGINS", "axlearn-moe")
    switch_off_plugins()
    import os

    assert os.environ["AXCORE_LOAD_PLUGINS"] == ""
    assert {r.distribution for r in host().active_records()} == {"axcore"}


def test_strict_mode_is_read_from_the_environment(clean_environment):
    clean_environment.setenv("AXCORE_DISABLE_PLUGINS", "no-such-plugin")
    assert host().unmatched_filters == ("no-such-plugin",)
    clean_environment.setenv("AXCORE_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="no-such-plugin"):
        host()
    assert host(check=False).records


def test_a_wrong_strict_value_is_an_error(clean_environment):
    clean_environment.setenv("AXCORE_STRICT_PLUGINS", "yes")
    with pytest.raises(PluginError, match="'yes', expected '1' or '0'"):
        host()


def test_the_host_imports_no_jax():
    import subprocess

    code = "import sys; from axcore.plugins import host; host(); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
