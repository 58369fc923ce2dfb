"""Specs check themselves when they are made."""

from __future__ import annotations

import copy
import pickle

import pytest

from axcore.errors import PluginError
from axcore.plugins import (
    CallbackSpec,
    CompilerOptionSpec,
    Instance,
    InstanceTypeSpec,
    KernelSpec,
    MeshRuleSpec,
    NamedSpec,
    OpCall,
    pattern_matches,
    specificity,
)


def kernel(**changes):
    fields = dict(op="rms_norm", implementation="acme", platforms=("gpu",), target="acme.k:f")
    return KernelSpec(**{**fields, **changes})


def test_a_kernel_is_named_after_op_and_implementation():
    assert kernel().name == "rms_norm.acme"


def test_a_kernel_cannot_be_named_otherwise():
    with pytest.raises(PluginError, match=r"expected 'rms_norm\.acme'"):
        kernel(name="other")


@pytest.mark.parametrize("target", ["acme", "acme.k", ":f", "acme:", "a b:c", "acme:f()", 3, None])
def test_a_target_is_module_and_attribute(target):
    with pytest.raises(PluginError, match=r"target is .* expected 'module:attribute'"):
        kernel(target=target)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", "rms-norm"),
        ("implementation", ""),
        ("platforms", "gpu"),
        ("platforms", ()),
        ("platforms", ("GPU",)),
        ("supports", "no target"),
        ("partitioning", ("batch",)),
        ("partitioning", {"x": "batch"}),
        ("priority", True),
        ("priority", 1.0),
        ("description", None),
    ],
)
def test_a_wrong_field_is_named_in_the_error(field, value):
    with pytest.raises(PluginError, match=rf"KernelSpec.*{field} is"):
        kernel(**{field: value})


def test_lists_become_tuples_and_mappings_frozen_so_that_nothing_changes_later():
    dims = ["batch"]
    spec = kernel(platforms=["gpu", "tpu"], partitioning={"x": dims})
    dims.append("seq")
    assert spec.platforms == ("gpu", "tpu")
    assert spec.partitioning == {"x": ("batch",)}
    with pytest.raises(TypeError):
        spec.partitioning["x"] = ()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_specs_are_equal_after_a_copy_and_hash_alike(copied):
    spec = kernel(partitioning={"x": ("batch",)})
    assert copied(spec) == spec
    assert hash(copied(spec)) == hash(spec)


def test_the_text_of_a_spec_does_not_depend_on_the_order_of_items():
    x, y = ("x", ("batch",)), ("y", ("seq",))
    assert repr(kernel(partitioning=dict([x, y]))) == repr(kernel(partitioning=dict([y, x])))


@pytest.mark.parametrize("platforms", [("*",), ("gpu", "tpu")])
def test_a_kernel_runs_on_its_platforms_only(platforms):
    spec = kernel(platforms=platforms)
    assert spec.runs_on("tpu")
    assert spec.runs_on("cpu") == (platforms == ("*",))


@pytest.mark.parametrize("name", ["", "has space", "-dash", "a/b", None, 3])
def test_a_bad_name_is_refused(name):
    with pytest.raises(PluginError, match="name is"):
        NamedSpec(name, "math:sqrt")


@pytest.mark.parametrize("name", ["fuji-7B-v2", "qwen3-30B-A3B", "axlearn-moe:moe", "SmolLM2_1.7B"])
def test_the_names_that_catalogs_use_are_legal(name):
    assert NamedSpec(name, "math:sqrt").name == name


def test_rules_and_options_must_say_why():
    with pytest.raises(PluginError, match="reason is"):
        MeshRuleSpec(name="r", pattern="cpu-*", target="a:b", reason=" ")
    with pytest.raises(PluginError, match="reason is"):
        CompilerOptionSpec(name="o", pattern="cpu-*", key="k", value=1, reason="")


def test_an_option_value_is_a_plain_value():
    with pytest.raises(PluginError, match="value is"):
        CompilerOptionSpec(name="o", pattern="*", key="k", value=[1], reason="why")


def test_a_callback_says_which_events_it_wants():
    with pytest.raises(PluginError, match="events is"):
        CallbackSpec(name="c", events=(), target="a:b")


def test_an_instance_type_is_named_by_its_pattern():
    spec = InstanceTypeSpec(pattern="acme-*", family="acme", platform="gpu", target="a:resolve")
    assert spec.name == "acme-*"


@pytest.mark.parametrize(
    ("pattern", "name", "matches", "literal"),
    [
        ("cpu", "cpu", True, 3),
        ("cpu", "cpu-8", False, 3),
        ("cpu-*", "cpu-8", True, 4),
        ("tpu-v5p-*", "tpu-v5e-8", False, 8),
        ("tpu-v5?-*", "tpu-v5e-8", True, 7),
        ("*", "anything", True, 0),
        ("CPU-*", "cpu-8", False, 4),
    ],
)
def test_patterns(pattern, name, matches, literal):
    assert pattern_matches(pattern, name) is matches
    assert specificity(pattern) == literal


def instance(**changes):
    fields = dict(
        name="acme-16",
        family="acme",
        platform="gpu",
        num_hosts=2,
        devices_per_host=8,
        hbm_bytes=80 << 30,
        peak_flops={"bfloat16": 1e15},
    )
    return Instance(**{**fields, **changes})


def test_the_devices_of_an_instance_are_those_of_all_hosts():
    assert instance().num_devices == 16


def test_simulated_devices_replace_real_ones():
    assert instance(simulated_devices=4).num_devices == 4


@pytest.mark.parametrize("count", [0, -1, 1.0, True])
def test_an_instance_has_whole_positive_counts(count):
    with pytest.raises(PluginError, match="num_hosts is"):
        instance(num_hosts=count)


def test_an_op_call_knows_which_dims_are_split():
    call = OpCall(
        op="rms_norm",
        shapes={"x": (8, 16, 32)},
        device_shapes={"x": (4, 16, 8)},
        dtypes={"x": "float32"},
    )
    assert call.sharded_dims("x") == (0, 2)


def test_an_op_call_on_one_device_has_whole_shapes():
    call = OpCall(op="rms_norm", shapes={"x": (8, 16)}, dtypes={"x": "float32"})
    assert call.device_shapes == call.shapes
    assert call.sharded_dims("x") == ()
