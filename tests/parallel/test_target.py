import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axcore.errors import ShardingError
from axcore.parallel import MeshShape, ProgramTarget, ShardingRules, build_mesh, resolve_instance


def _target(num_devices=8, rules=None, **sizes):
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[:num_devices])
    return ProgramTarget("cpu-8", "cpu", mesh, rules or ShardingRules())


def test_constrain_shards_by_the_activation_rules():
    target = _target(data=2, seq=2, model=2)
    x = jnp.arange(4 * 8 * 16.0).reshape(4, 8, 16)
    y = jax.jit(lambda x: target.constrain(x, ("batch", "seq", "mlp")))(x)
    assert y.sharding.spec == P("data", "seq", "model")
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("target", [_target(1), ProgramTarget("cpu", "cpu")], ids=["1", "none"])
def test_one_device_is_left_alone_but_names_are_checked(target):
    x = jnp.ones((3, 5))
    jaxpr = jax.make_jaxpr(lambda x: target.constrain(x, ("batch", "embed")))(x)
    assert not jaxpr.eqns
    with pytest.raises(ShardingError, match="unknown logical axis 'embde'"):
        target.constrain(x, ("batch", "embde"))
    with pytest.raises(ShardingError, match="'model' is used twice"):
        target.constrain(x, ("mlp", "vocab"))
    with pytest.raises(ShardingError, match="got 1 axis names"):
        target.constrain(x, ("batch",))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ShardingError, match=r"dim 0 \('batch'\) of size 6 .* 4 parts"):
        _target(data=4, model=2).constrain(jnp.ones((6, 8)), ("batch", "embed"))


def test_inside_shard_map_only_the_other_mesh_axes_are_constrained():
    target = _target(data=4, model=2)
    x = jnp.arange(8 * 4.0).reshape(8, 4)

    def body(x, axes):
        return 2 * target.constrain(x, axes)

    everything = jax.shard_map(
        partial(body, axes=("batch", "mlp")),
        mesh=target.mesh,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
    )
    np.testing.assert_array_equal(jax.jit(everything)(x), 2 * x)
    only_data = jax.shard_map(
        partial(body, axes=("batch", "mlp")),
        mesh=target.mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    y = jax.jit(only_data)(x)
    np.testing.assert_array_equal(y, 2 * x)
    assert y.sharding.shard_shape(y.shape) == (2, 2)


def test_constrain_works_under_vmap_scan_and_grad():
    def loss(target, w, x):
        def step(h, w):
            return target.constrain(jnp.tanh(h @ w), ("batch", "mlp")), None

        return jnp.sum(jax.lax.scan(step, x, w)[0])

    def gradient(target):
        fn = jax.vmap(partial(loss, target), in_axes=(None, 0))
        return jax.jit(jax.grad(lambda w, x: jnp.sum(fn(w, x))))

    w, x = jnp.linspace(-1, 1, 3 * 16).reshape(3, 4, 4), jnp.ones((2, 8, 4))
    got = gradient(_target(data=2, fsdp=2, model=2))(w, x)
    np.testing.assert_allclose(got, gradient(ProgramTarget("cpu", "cpu"))(w, x), rtol=1e-5)


def test_mesh_axes_are_those_with_several_devices():
    target = _target(data=4, model=2)
    assert target.mesh_axes("batch") == ("data",)
    assert target.mesh_axes("heads") == ("model",)
    assert target.mesh_axes("embed") == ()
    assert target.mesh_axes("kv_heads", size=1) == ()
    assert ProgramTarget("cpu", "cpu").mesh_axes("batch") == ()


def test_inside_shard_map_mesh_axes_are_the_others_and_sizes_are_divided_already():
    target = _target(data=2, fsdp=4)

    def body(x):
        assert x.shape == (4,)
        assert target.mesh_axes("batch", x.shape[0]) == ("fsdp",)
        return x

    outer = jax.shard_map(
        body, mesh=target.mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    assert jax.jit(outer)(jnp.ones(8)).shape == (8,)
    assert target.mesh_axes("batch", 8) == ("data", "fsdp")


def test_the_digest_tells_programs_apart_and_survives_a_new_value():
    target = _target(data=8)
    rules = ShardingRules(activation_rules={"embed": ("model",)})
    others = [
        _target(fsdp=8),
        _target(4, data=4),
        _target(data=8, rules=rules),
        dataclasses.replace(target, instance="cpu"),
        dataclasses.replace(target, platform="tpu"),
        dataclasses.replace(target, kernels={"attention": ("pallas_splash",)}),
        dataclasses.replace(target, fallbacks={"attention"}),
        dataclasses.replace(target, options={"quantization": "int8"}),
    ]
    assert len({t.digest() for t in [target, *others]}) == 1 + len(others)
    assert _target(data=8).digest() == target.digest()


def test_rules_that_name_unknown_axes_make_no_target():
    with pytest.raises(ShardingError, match="unknown logical axis 'mpl'"):
        _target(data=8, rules=ShardingRules(activation_rules={"mpl": ()}))


def test_a_target_of_an_instance_takes_its_name_and_platform():
    target = ProgramTarget.for_instance(resolve_instance("cpu-8"), None)
    assert (target.instance, target.platform, target.mesh) == ("cpu-8", "cpu", None)
    with pytest.raises(ShardingError, match="has no mesh"):
        target.shardings({})
