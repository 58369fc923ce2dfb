"""Installing registers; only the owner of the machine, core and what is in use act."""

from __future__ import annotations

import pytest

from axcore.errors import PluginError, PluginLookupError

INSTANCE = (
    'InstanceTypeSpec(pattern="{0}", family="acme", platform="{1}", target="acme.machines:resolve")'
)
KERNEL = (
    'KernelSpec(op="rms_norm", implementation="{0}", platforms=("{1}",), target="a:b", '
    "priority={2})"
)
RULE = 'MeshRuleSpec(name="{0}", pattern="{1}", traits={2}, target="math:pi", reason="measured")'
OPTION = 'CompilerOptionSpec(name="{0}", pattern="{1}", key="{2}", value={3}, reason="measured")'


@pytest.fixture
def machines(site, hook):
    """Distribution ``acme`` owns the machines ``acme-*`` of platform ``npu``."""
    site.add(
        "acme",
        hook("instance_types", INSTANCE.format("acme-*", "npu"))
        + hook("kernels", KERNEL.format("acme", "npu", 0), KERNEL.format("acme_cpu", "cpu", 0))
        + hook("mesh_rules", RULE.format("all", "acme-*", ()))
        + hook("compiler_options", OPTION.format("fast", "acme-*", "fast_math", True)),
    )
    return site


def add_rival(site, hook):
    site.add(
        "rival",
        hook("kernels", KERNEL.format("rival", "npu", 10))
        + hook("mesh_rules", RULE.format("all", "acme-16", ()))
        + hook("compiler_options", OPTION.format("fast", "acme-*", "fast_math", False)),
    )


def test_the_distribution_of_the_instance_type_owns_the_instance(machines):
    host = machines.host()
    assert host.owner_of_instance("acme-16") == "acme"
    assert host.owner_of_instance("cpu-8") == "axcore"


def test_an_unknown_instance_is_an_error_with_near_misses(machines):
    with pytest.raises(PluginLookupError, match="no instance type covers 'acne'") as caught:
        machines.host().active_for("acne")
    assert "acme-*" in str(caught.value)


def test_the_owners_rules_options_and_kernels_act_beside_cores(machines):
    active = machines.host().active_for("acme-16")
    assert active.distributions == ("acme", "axcore")
    assert active.platform == "npu"
    assert [k.implementation for k in active.kernels_for("rms_norm")] == ["acme", "xla"]
    assert active.mesh_rule()[0] == "acme:all"
    assert active.options() == {"fast_math": True}
    assert active.candidates == ()


def test_a_rival_changes_nothing_until_it_is_in_use(machines, hook):
    before = machines.host().active_for("acme-16")
    add_rival(machines, hook)
    after = machines.host().active_for("acme-16")
    assert after.kernels == before.kernels
    assert after.mesh_rules == before.mesh_rules
    assert after.options() == before.options()
    assert after.candidates == (
        ("mesh_rules", "rival:all"),
        ("compiler_options", "rival:fast"),
        ("kernels", "rival:rms_norm.rival"),
    )


@pytest.mark.parametrize("name", ["rival", "Rival", "entry"])
def test_use_makes_a_rivals_pieces_act(machines, hook, name):
    machines.add(
        "rival",
        hook("kernels", KERNEL.format("rival", "npu", 10))
        + hook("mesh_rules", RULE.format("all", "acme-16", ())),
        entry="entry",
    )
    active = machines.host().active_for("acme-16", use=[name])
    assert [k.implementation for k in active.kernels_for("rms_norm")] == ["rival", "acme", "xla"]
    assert active.mesh_rule()[0] == "rival:all"


def test_two_values_for_one_compiler_option_are_an_error_naming_both(machines, hook):
    add_rival(machines, hook)
    active = machines.host().active_for("acme-16", use=["rival"])
    with pytest.raises(PluginError, match=r"'fast_math' is True by acme:fast and False by rival"):
        active.options()


def test_the_same_value_twice_is_no_error(machines, hook):
    machines.add(
        "friend", hook("compiler_options", OPTION.format("same", "acme-16", "fast_math", True))
    )
    assert machines.host().active_for("acme-16", use=["friend"]).options() == {"fast_math": True}


def test_true_and_one_are_different_values(machines, hook):
    machines.add(
        "friend", hook("compiler_options", OPTION.format("same", "acme-16", "fast_math", 1))
    )
    with pytest.raises(PluginError, match="fast_math"):
        machines.host().active_for("acme-16", use=["friend"]).options()


def test_using_what_is_not_active_is_an_error_with_its_reason(machines):
    machines.add("broken", "1 / 0")
    with pytest.raises(PluginLookupError, match="use names 'broken'") as caught:
        machines.host().active_for("acme-16", use=["broken"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_provider_of_the_compiler_owns_the_platform(site, hook):
    site.add("pods", hook("instance_types", INSTANCE.format("pod-*", "npu")))
    site.add(
        "vendor",
        hook("compilers", 'CompilerSpec(platform="npu", target="a:b")')
        + hook("kernels", KERNEL.format("vendor", "npu", 0)),
    )
    active = site.host().active_for("pod-4")
    assert active.distributions == ("axcore", "pods", "vendor")
    assert [k.implementation for k in active.kernels_for("rms_norm")] == ["vendor", "xla"]


def test_kernels_of_other_platforms_do_not_act(machines):
    assert "acme_cpu" not in [
        k.implementation for k in machines.host().active_for("acme-16").kernels
    ]


def test_a_name_that_two_distributions_cover_is_an_error_naming_both(machines, hook):
    machines.add("rival", hook("instance_types", INSTANCE.format("acme-16", "npu")))
    host = machines.host()
    with pytest.raises(PluginError, match=r"claimed by acme \('acme-\*'\) and rival \('acme-16'\)"):
        host.owner_of_instance("acme-16")
    assert host.owner_of_instance("acme-8") == "acme"


def test_within_a_distribution_the_most_specific_pattern_wins(site, hook):
    site.add(
        "acme",
        hook(
            "instance_types",
            INSTANCE.format("acme-*", "npu"),
            INSTANCE.format("acme-big-*", "gpu"),
        ),
    )
    assert site.host().active_for("acme-big-8").platform == "gpu"


@pytest.mark.parametrize(
    ("rules", "traits", "winner"),
    [
        ([("broad", "acme-*", ()), ("narrow", "acme-16", ())], (), "narrow"),
        ([("plain", "acme-*", ()), ("moe", "acme-*", ("moe",))], (), "plain"),
        ([("plain", "acme-*", ()), ("moe", "acme-*", ("moe",))], ("moe", "long"), "moe"),
        (
            [("narrow", "acme-16", ()), ("moe", "acme-*", ("moe", "long"))],
            ("moe", "long"),
            "narrow",
        ),
        ([("one", "acme-*", ("moe",)), ("two", "acme-*", ("moe", "long"))], ("moe", "long"), "two"),
        ([("other", "acme-8", ()), ("fits", "*", ())], (), "fits"),
    ],
)
def test_the_most_specific_rule_wins(site, hook, rules, traits, winner):
    site.add(
        "acme",
        hook("instance_types", INSTANCE.format("acme-*", "npu"))
        + hook("mesh_rules", *(RULE.format(*rule) for rule in rules)),
    )
    assert site.host().active_for("acme-16").mesh_rule(traits)[0] == f"acme:{winner}"


def test_equally_specific_rules_are_an_error_naming_both(site, hook):
    site.add(
        "acme",
        hook("instance_types", INSTANCE.format("acme-*", "npu"))
        + hook("mesh_rules", RULE.format("a", "acme-1?", ()), RULE.format("b", "acme-?6", ())),
    )
    with pytest.raises(PluginError, match="acme:a and acme:b fit instance 'acme-16' equally"):
        site.host().active_for("acme-16").mesh_rule()


def test_no_rule_is_an_error(site, hook):
    site.add("acme", hook("instance_types", INSTANCE.format("acme-*", "npu")))
    with pytest.raises(PluginLookupError, match="no mesh rule for instance 'acme-16'"):
        site.host().active_for("acme-16").mesh_rule()
