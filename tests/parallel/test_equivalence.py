"""A small network gives the same losses and weights on every mesh as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.module import ParameterSpec
from axcore.parallel import (
    MeshShape,
    ProgramTarget,
    ShardingRules,
    batch_sharding,
    build_mesh,
    bytes_per_device,
    compile_step,
    make_global_array,
    replicated,
)

EMBED, MLP, VOCAB, BATCH, SEQ, STEPS = 16, 32, 24, 8, 4, 3


def _normal(key, spec):
    return 0.3 * jax.random.normal(key, spec.shape, spec.dtype)


def _spec(shape, axes):
    return ParameterSpec(shape=shape, dtype="float32", axes=axes, initializer=_normal)


SPECS = {
    "embedding": _spec((VOCAB, EMBED), ("vocab", "embed")),
    "up": _spec((EMBED, MLP), ("embed", "mlp")),
    "down": _spec((MLP, EMBED), ("mlp", "embed")),
    "bias": _spec((EMBED,), (None,)),
}


def _loss(target, params, tokens):
    x = params["embedding"][tokens]
    x = target.constrain(x, ("batch", "seq", "embed"))
    h = target.constrain(jax.nn.gelu(x @ params["up"]), ("batch", "seq", "mlp"))
    x = target.constrain(x + h @ params["down"] + params["bias"], ("batch", "seq", "embed"))
    logits = target.constrain(x @ params["embedding"].T, ("batch", "seq", "vocab"))
    targets = jnp.roll(tokens, -1, axis=1)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def _train(target):
    """Returns losses and final parameters of a few steps of gradient descent."""
    shardings = target.shardings(SPECS)
    rows = batch_sharding(target.mesh, target.rules)

    def step(params, tokens):
        loss, grads = jax.value_and_grad(lambda p: _loss(target, p, tokens))(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    keys = dict(zip(SPECS, jax.random.split(jax.random.key(0), len(SPECS)), strict=True))
    params = {n: jax.device_put(_normal(keys[n], s), shardings[n]) for n, s in SPECS.items()}
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ), dtype=np.int32)
    batch = make_global_array(tokens, rows, tokens.shape)
    compiled = compile_step(
        step,
        params,
        batch,
        in_shardings=(shardings, rows),
        out_shardings=(shardings, replicated(target.mesh)),
        donate=(0,),
    )
    losses = []
    for _ in range(STEPS):
        params, loss = compiled(params, batch)
        losses.append(float(loss))
    return losses, params


def _target(num_devices=8, rules=None, **sizes):
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[:num_devices])
    return ProgramTarget("cpu-8", "cpu", mesh, rules or ShardingRules())


@pytest.fixture(scope="module")
def alone():
    return _train(_target(1))


ZERO_1 = ShardingRules(param_rules={"embed": ()}, optimizer_rules={"embed": ("fsdp",)})
CASES = {
    "dp": dict(data=8),
    "fsdp": dict(fsdp=8),
    "tp": dict(model=8),
    "sp": dict(seq=4, data=2),
    "ep": dict(expert=8),
    "dp-fsdp": dict(data=2, fsdp=4),
    "dp-tp": dict(data=4, model=2),
    "fsdp-tp": dict(fsdp=4, model=2),
    "dp-fsdp-tp": dict(data=2, fsdp=2, model=2),
    "fsdp-sp-tp": dict(fsdp=2, seq=2, model=2),
    "zero-1": dict(fsdp=8, rules=ZERO_1),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_device(case, alone):
    losses, params = _train(_target(**CASES[case]))
    expected_losses, expected = alone
    # Sums over shards run in another order; three steps leave a few float32 ulps.
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    for name in SPECS:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_each_device_holds_its_share_of_the_parameters(case):
    sizes = dict(CASES[case])
    target = _target(**sizes)
    fsdp = 1 if "rules" in sizes else sizes.get("fsdp", 1)
    parts = fsdp * sizes.get("model", 1)
    matrices = 4 * (VOCAB * EMBED + 2 * EMBED * MLP)
    shardings = target.shardings(SPECS)
    counted = bytes_per_device(SPECS, shardings)
    assert counted.per_device == matrices // parts + 4 * EMBED
    params = {n: jax.device_put(jnp.zeros(s.shape), shardings[n]) for n, s in SPECS.items()}
    on_first = sum(
        shard.data.nbytes
        for p in params.values()
        for shard in p.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert on_first == counted.per_device


def test_losses_go_down(alone):
    assert alone[0][-1] < alone[0][0]
