import jax
import pytest
from jax.sharding import PartitionSpec as P

from axcore.errors import ShardingError
from axcore.module import ParameterSpec
from axcore.parallel import (
    Axis,
    MeshShape,
    ShardingRules,
    batch_sharding,
    build_mesh,
    bytes_per_device,
    named_shardings,
    partition_spec,
)


def _zeros(key, spec):
    del key
    return jax.numpy.zeros(spec.shape, spec.dtype)


def _spec(shape, axes, **kw):
    return ParameterSpec(shape=shape, dtype="float32", axes=axes, initializer=_zeros, **kw)


def _mesh(**sizes):
    return build_mesh(MeshShape(**sizes), jax.devices())


PARAM = ShardingRules().table("param")
ACTIVATION = ShardingRules().table("activation")
FSDP_TP = dict(fsdp=4, model=2)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((16, 8), ("embed", "mlp"), P("fsdp", "model")),
        ((16, 4, 8), ("embed", "heads", "head_dim"), P("fsdp", "model", None)),
        ((16, 1, 8), ("embed", "kv_heads", "head_dim"), P("fsdp", None, None)),
        ((32, 16), ("vocab", "embed"), P("model", "fsdp")),
        ((16,), (None,), P(None)),
        ((), (), P()),
    ],
)
def test_default_rules_shard_parameters_over_fsdp_and_model(shape, axes, expected):
    assert partition_spec(shape, axes, _mesh(**FSDP_TP), PARAM) == expected


def test_a_batch_is_split_over_all_data_axes_and_its_positions_over_seq():
    mesh = _mesh(data=2, fsdp=2, seq=2)
    assert batch_sharding(mesh, ShardingRules()).spec == P(("data", "fsdp"), "seq")


def test_stacked_layers_go_to_pipeline_stages():
    mesh = _mesh(pipeline=2, fsdp=4)
    spec = _spec((16, 8), ("embed", "mlp")).stacked(6)
    assert named_shardings({"w": spec}, mesh, ShardingRules())["w"].spec == P(
        "pipeline", "fsdp", None
    )


def test_a_cache_keeps_positions_whole():
    mesh = _mesh(data=2, seq=2, model=2)
    axes = ("batch", "seq", "kv_heads", "head_dim")
    spec = partition_spec((4, 32, 2, 8), axes, mesh, ShardingRules().table("cache"))
    assert spec == P("data", None, "model", None)


def test_the_first_alternative_that_divides_is_taken():
    rules = ShardingRules(param_rules={"mlp": (("fsdp", "model"), ("model",), ())}).table("param")
    mesh = _mesh(**FSDP_TP)
    assert partition_spec((16,), ("mlp",), mesh, rules) == P(("fsdp", "model"))
    assert partition_spec((2,), ("mlp",), mesh, rules) == P("model")
    assert partition_spec((3,), ("mlp",), mesh, rules) == P(None)


def test_an_alternative_whose_mesh_axis_is_taken_is_passed_over():
    rules = ShardingRules(param_rules={"mlp": (("fsdp",), ("model",))}).table("param")
    assert partition_spec((8, 8), ("embed", "mlp"), _mesh(**FSDP_TP), rules) == P("fsdp", "model")


@pytest.mark.parametrize("sizes", [FSDP_TP, dict(data=8)], ids=str)
def test_a_mesh_axis_used_twice_names_array_and_dims_on_every_mesh(sizes):
    with pytest.raises(ShardingError) as info:
        partition_spec((8, 8), ("mlp", "vocab"), _mesh(**sizes), PARAM, name="head/weight")
    message = str(info.value)
    assert "head/weight[mlp=8, vocab=8]" in message
    assert "'model' is used twice: by dim 0 ('mlp') and by dim 1 ('vocab')" in message


def test_an_unknown_logical_axis_names_array_and_near_misses():
    with pytest.raises(ShardingError, match=r"up/weight\[embde=8, mlp=8\].*\n.*'embed'"):
        partition_spec((8, 8), ("embde", "mlp"), _mesh(data=8), PARAM, name="up/weight")


def test_a_dim_that_does_not_divide_names_axis_dim_and_nearest_sizes():
    with pytest.raises(ShardingError) as info:
        partition_spec((4, 6), ("embed", None), _mesh(fsdp=8), PARAM, name="w")
    message = str(info.value)
    assert "dim 0 ('embed') of size 4 does not divide into 8 parts (fsdp=8)" in message
    assert "nearest sizes that do: 8;" in message
    assert "split it into 2 or 4 parts" in message
    with pytest.raises(ShardingError, match="nearest sizes that do: 8 or 16"):
        partition_spec((12,), ("embed",), _mesh(fsdp=8), PARAM)


def test_one_name_per_dim():
    with pytest.raises(ShardingError, match="got 1 axis names"):
        partition_spec((4, 6), ("embed",), _mesh(fsdp=8), PARAM)


def test_a_tree_of_specs_becomes_a_tree_of_shardings_that_name_paths():
    mesh = _mesh(**FSDP_TP)
    specs = {"a": {"w": _spec((16, 8), ("embed", "mlp"))}, "b": _spec((8,), ("mlp",))}
    got = named_shardings(specs, mesh, ShardingRules())
    assert got["a"]["w"].spec == P("fsdp", "model") and got["b"].spec == P("model")
    bad = {"a": {"w": _spec((6, 8), ("embed", "mlp"))}}
    with pytest.raises(ShardingError, match=r"a/w\[embed=6, mlp=8\]"):
        named_shardings(bad, mesh, ShardingRules())


def test_bytes_per_device_count_each_shard():
    specs = {"w": _spec((16, 8), ("embed", "mlp")), "scale": _spec((16,), (None,))}
    shardings = named_shardings(specs, _mesh(**FSDP_TP), ShardingRules())
    got = bytes_per_device(specs, shardings)
    assert got.total == (16 * 8 + 16) * 4
    assert got.per_device == (16 * 8 // 8 + 16) * 4


def test_memory_of_a_parameter_is_part_of_its_sharding():
    spec = _spec((16, 8), ("embed", "mlp"), memory="pinned_host")
    got = named_shardings({"w": spec}, _mesh(**FSDP_TP), ShardingRules())["w"]
    assert got.memory_kind == "pinned_host"


def test_zero_1_differs_in_the_optimizer_table_only():
    rules = ShardingRules(param_rules={"embed": ()}, optimizer_rules={"embed": ("fsdp",)})
    mesh = _mesh(fsdp=8)
    assert partition_spec((16,), ("embed",), mesh, rules.table("param")) == P(None)
    assert partition_spec((16,), ("embed",), mesh, rules.table("optimizer")) == P("fsdp")


def test_the_optimizer_follows_the_parameters_by_default():
    rules = ShardingRules(param_rules={"mlp": ("fsdp",)})
    assert rules.table("optimizer").rules == rules.table("param").rules


def test_a_declared_axis_takes_its_parents_rules():
    Axis("test_expert_mlp", like="mlp")
    mesh = _mesh(**FSDP_TP)
    assert partition_spec((8,), ("test_expert_mlp",), mesh, PARAM) == P("model")
    own = ShardingRules(param_rules={"test_expert_mlp": ("fsdp",)}).table("param")
    assert partition_spec((8, 8), ("test_expert_mlp", "mlp"), mesh, own) == P("fsdp", "model")


def test_a_declared_axis_may_bring_a_rule():
    Axis("test_expert_batch", like="batch", rule=("data", "fsdp"))
    mesh = _mesh(expert=2, fsdp=4)
    axes = ("experts", "test_expert_batch")
    assert partition_spec((2, 8), axes, mesh, ACTIVATION) == P("expert", "fsdp")


def test_an_axis_is_declared_once():
    Axis("test_twice", like="mlp")
    Axis("test_twice", like="mlp")
    with pytest.raises(ShardingError, match="'test_twice' is declared twice"):
        Axis("test_twice", like="embed")


def test_a_parent_must_exist():
    with pytest.raises(ShardingError, match=r"is like 'mpl', which is unknown(.|\n)*'mlp'"):
        Axis("test_orphan", like="mpl")


def test_an_axis_without_parent_or_entry_says_so():
    Axis("test_alone")
    with pytest.raises(ShardingError, match="'test_alone' has no entry in param_rules"):
        partition_spec((8,), ("test_alone",), _mesh(data=8), PARAM)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("model", "write \\('model',\\)"),
        (("modle",), "unknown mesh axis 'modle'(.|\n)*'model'"),
        (("model", ("fsdp",)), "mixes"),
        (("model", "model"), "twice"),
        (3, "not a tuple"),
    ],
)
def test_an_entry_that_is_no_rule_is_refused(rule, message):
    with pytest.raises(ShardingError, match=message):
        ShardingRules(activation_rules={"mlp": rule})


def test_an_entry_for_an_undeclared_axis_is_refused_when_checked():
    with pytest.raises(ShardingError, match="param_rules: unknown logical axis 'mpl'"):
        ShardingRules(param_rules={"mpl": ("model",)}).check()
