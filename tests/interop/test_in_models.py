"""Foreign layers inside a transformer: both stack forms, training, sharding, checkpoints, roles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_foreign import apply_mlp, init_mlp, make_nnx_mlp

from axcore import experiments, functional
from axcore.checkpoint import OrbaxCheckpointer, stack_form
from axcore.cli._explain import explained, text
from axcore.collection import total_loss
from axcore.config import partial_for, scaled
from axcore.errors import ConfigError, ModuleError
from axcore.interop import EquinoxLayer, ForeignFeedForward, ForeignNorm, FunctionLayer, NNXLayer
from axcore.layers import StackedTransformer
from axcore.module import flatten_specs
from axcore.parallel import MeshShape, resolve_instance, select_devices
from axcore.train._program import Program
from axcore.train.assemble import assemble

pytestmark = pytest.mark.xdist_group("interop")
DIM = scaled(1, of="input_dim")
TOKENS = np.random.default_rng(0).integers(1, 250, (8, 9), dtype=np.int32)
BATCH = {"input_ids": TOKENS[:, :-1], "target_ids": TOKENS[:, 1:]}


def foreign(kind):
    if kind == "function":
        return FunctionLayer.Config(
            init=partial_for(init_mlp, features=DIM),
            apply=apply_mlp,
            axes={"layers/0": ("embed", "mlp"), "layers/1": ("mlp", "embed")},
        )
    if kind == "nnx":
        pytest.importorskip("flax", reason="needs flax")
        return NNXLayer.Config(
            module=partial_for(make_nnx_mlp, features=DIM, rate=0.1),
            axes={"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed")},
        )
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    sizes = dict(in_size=DIM, out_size=DIM, width_size=8, depth=1)
    return EquinoxLayer.Config(module=partial_for(eqx.nn.MLP, **sizes), batch_dims=2)


def experiment(kind, **decoder):
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=8, seq_len=8, max_step=4, sample_prompt=None)
    cfg.model.set(model_dim=16)
    cfg.model.decoder.set(**decoder)
    layer = cfg.model.decoder.layer
    layer.attention.set(num_heads=2)
    layer.feed_forward = ForeignFeedForward.Config(layer=foreign(kind))
    return cfg


def loss(model, state):
    @jax.jit
    def run(state):
        _, collection = functional(model, state=state, inputs=BATCH, is_training=False)
        return total_loss(collection)

    return float(run(state))


@pytest.mark.parametrize(
    "kind",
    [
        "function",
        pytest.param("nnx", marks=pytest.mark.slow),
        pytest.param("equinox", marks=pytest.mark.slow),
    ],
)
def test_both_stack_forms_start_alike_and_compute_alike(kind):
    scanned = experiment(kind).instantiate(name="t").model
    unrolled = experiment(kind, stack=StackedTransformer.Config()).instantiate(name="t").model
    key = jax.random.key(0)
    state, other = scanned.initialize(key), unrolled.initialize(key)
    restacked = stack_form.restack(other, state)
    jax.tree.map(np.testing.assert_array_equal, state, restacked)
    path = next(p for p in flatten_specs(scanned.parameter_specs()) if "feed_forward/layer/" in p)
    assert path.startswith("decoder/layer/0:2:1/feed_forward/layer/")
    layers = state["decoder"]["layer"]["0:2:1"]["feed_forward"]["layer"]
    weights = [x for x in jax.tree.leaves(layers) if x.ndim > 2]
    assert all(np.abs(w[0] - w[1]).max() > 1e-3 for w in weights)  # a draw for each layer
    np.testing.assert_allclose(loss(scanned, state), loss(unrolled, other), rtol=1e-6)


def test_explain_lists_what_no_rule_can_shard():
    explanation = explained(assemble(experiment("function"), instance="cpu-8"))
    path = "decoder/layer/0:2:1/feed_forward/layer/bias"
    assert [p for p in explanation["replicated"] if "feed_forward/layer" in p] == [
        path,
        path.replace("bias", "steps"),
    ]
    assert path in text(explanation)


def run(cfg, instance, steps=3):
    machine = resolve_instance(instance)
    program = Program(cfg.instantiate(name="trainer"), machine, select_devices(machine))
    state = program.initial_state()
    before = jax.device_get(state.model)
    rows = program.put(BATCH)
    call = program.compile_train(state, rows).call
    losses = []
    for _ in range(steps):
        state, metrics = call(state, rows)
        losses.append(float(metrics["loss"]))
    return losses, before, state, program


@pytest.fixture(scope="module")
def trained():
    return run(experiment("nnx"), "cpu")


def test_a_foreign_layer_trains_and_its_statistics_follow(trained):
    losses, before, state, _ = trained
    assert losses[-1] < losses[0]
    was = before["decoder"]["layer"]["0:2:1"]["feed_forward"]["layer"]
    now = jax.device_get(state.model["decoder"]["layer"]["0:2:1"]["feed_forward"]["layer"])
    for layer in (0, 1):
        assert np.abs(now["up"]["kernel"][layer] - was["up"]["kernel"][layer]).max() > 0
        assert np.abs(now["norm"]["mean"][layer]).max() > 0
    # Statistics are state: no optimizer state belongs to them.
    assert not any("mean" in p for p in stack_form.flatten(state.learner.optimizer))


@pytest.mark.slow
def test_it_is_sharded_by_its_logical_axes_and_trains_the_same(trained):
    cfg = experiment("nnx").set(mesh_shape=MeshShape(fsdp=4, model=2))
    losses, _, state, _ = run(cfg, "cpu-8")
    np.testing.assert_allclose(losses, trained[0], rtol=1e-4)
    layer = state.model["decoder"]["layer"]["0:2:1"]["feed_forward"]["layer"]
    kernel = layer["up"]["kernel"]
    assert kernel.shape == (2, 16, 8)
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 4, 4)
    assert layer["up"]["bias"].sharding.is_fully_replicated


def test_a_checkpoint_brings_it_back(trained, tmp_path):
    _, _, state, program = trained
    checkpointer = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
    checkpointer.open(tmp_path)
    checkpointer.save(3, state)
    checkpointer.wait()
    restored, _ = checkpointer.restore(3, program.wanted_state())
    checkpointer.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_a_layer_that_breaks_its_roles_promise_is_refused():
    cfg = experiment("function")
    layer = cfg.model.decoder.layer.feed_forward.layer
    layer.apply = apply_sum
    model = cfg.instantiate(name="t").model
    with pytest.raises(ModuleError, match="asks for the same shape") as caught:
        loss(model, model.initialize(jax.random.key(0)))
    assert "feed_forward" in (caught.value.where or "")
    with pytest.raises(ConfigError):  # a foreign layer alone has no role
        cfg.model.decoder.layer.feed_forward = foreign("function")


def apply_sum(params, x):
    return apply_mlp(params, x).sum(-1)


def init_scale(key, features):
    del key
    return jnp.ones(features)


def apply_scale(scale, x):
    return x * scale * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def test_a_function_is_a_norm():
    norm = ForeignNorm.Config(
        input_dim=6,
        layer=FunctionLayer.Config(init=partial_for(init_scale, features=DIM), apply=apply_scale),
    ).instantiate(name="m")
    state = norm.initialize(jax.random.key(0))
    assert list(flatten_specs(norm.parameter_specs())) == ["layer/value"]
    x = jax.random.normal(jax.random.key(1), (3, 6))
    y, _ = functional(norm, state=state, inputs=(x,), is_training=False)
    np.testing.assert_allclose(jnp.sqrt(jnp.mean(y * y, -1)), 1.0, rtol=1e-4)
