"""A language model trained as a pipeline: the trajectory of one device, and where things are."""

import re

import jax
import numpy as np
import optax
import pytest

from axcore import experiments
from axcore.checkpoint.stack_form import canonical, flatten
from axcore.collection import total_loss
from axcore.context import functional
from axcore.errors import ConfigError
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    PipelinedTransformer,
    RepeatedTransformer,
    TransformerLayer,
)
from axcore.module import flatten_specs
from axcore.parallel import (
    MeshShape,
    PipelineModifier,
    ProgramTarget,
    ShardingRules,
    batch_sharding,
    build_mesh,
    compile_step,
    make_global_array,
    replicated,
)
from axcore.remat import Remat

BATCH, SEQ, LAYERS, STEPS = 16, 8, 4, 5
OVER_STAGES = ShardingRules(activation_rules={"batch": ("pipeline", "data", "expert", "fsdp")})


def language_model(stack):
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2))
    decoder = Decoder.Config(num_layers=LAYERS, layer=layer, stack=stack)
    return CausalLM.Config(
        vocab_size=32, max_seq_len=SEQ, model_dim=16, decoder=decoder
    ).instantiate(name="model")


def packed_batch():
    tokens = np.random.default_rng(0).integers(1, 32, (BATCH, SEQ + 1), dtype=np.int32)
    # Two documents and some padding in each row.
    row = np.array([1, 1, 1, 2, 2, 2, 2, 0], np.int32)
    return {
        "input_ids": tokens[:, :-1],
        "target_ids": tokens[:, 1:],
        "segment_ids": np.tile(row, (BATCH, 1)),
        "positions": np.tile(np.array([0, 1, 2, 0, 1, 2, 3, 0], np.int32), (BATCH, 1)),
        "target_mask": np.tile((row > 0).astype(np.float32), (BATCH, 1)),
    }


class Training:
    """A few steps of AdamW, and the compiled step."""

    def __init__(self, stack, rules=None, num_devices=8, **sizes):
        self.model = language_model(stack)
        self.mesh = build_mesh(MeshShape(**sizes), jax.devices()[:num_devices])
        self.target = ProgramTarget("cpu-8", "cpu", self.mesh, rules or ShardingRules())
        self.specs = self.model.parameter_specs()
        self.shardings = self.target.shardings(self.specs)
        rows = batch_sharding(self.mesh, self.target.rules)
        # A key's bias has no gradient but rounding, which a small eps would make a step of.
        optimizer = optax.adamw(1e-2, eps=1e-4)

        def step(params, moments, batch):
            def loss(p):
                _, collection = functional(
                    self.model, state=p, inputs=batch, is_training=True, target=self.target
                )
                return total_loss(collection)

            value, grads = jax.value_and_grad(loss)(params)
            updates, moments = optimizer.update(grads, moments, params)
            return optax.apply_updates(params, updates), moments, value

        params = jax.device_put(self.model.initialize(jax.random.key(0)), self.shardings)
        moments = jax.tree.map(
            lambda m: m if m.ndim else jax.device_put(m, replicated(self.mesh)),
            optimizer.init(params),  # zeros lie like their parameters
        )
        batch = {k: make_global_array(v, rows, v.shape) for k, v in packed_batch().items()}
        self.compiled = compile_step(
            step,
            params,
            moments,
            batch,
            in_shardings=(
                self.shardings,
                jax.tree.map(lambda x: x.sharding, moments),
                dict.fromkeys(batch, rows),
            ),
            out_shardings=(
                self.shardings,
                jax.tree.map(lambda x: x.sharding, moments),
                replicated(self.mesh),
            ),
        )
        self.losses = []
        for _ in range(STEPS):
            params, moments, value = self.compiled(params, moments, batch)
            self.losses.append(float(value))
        self.params = canonical(flatten(params))


@pytest.fixture(scope="module")
def alone():
    return Training(RepeatedTransformer.Config(), num_devices=1)


def assert_same_trajectory(got, expected):
    # Sums over shards and microbatches run in another order; AdamW divides by small moments.
    np.testing.assert_allclose(got.losses, expected.losses, rtol=2e-5)
    assert got.params.keys() == expected.params.keys()
    for path, value in got.params.items():
        np.testing.assert_allclose(value, expected.params[path], rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def staged():
    stack = PipelinedTransformer.Config(num_microbatches=4, remat=Remat("full"))
    return Training(stack, pipeline=2, fsdp=2, model=2)


@pytest.mark.xdist_group("pipeline_model")
def test_training_in_stages_with_fsdp_and_tensor_parallel_equals_one_device(staged, alone):
    assert_same_trajectory(staged, alone)


@pytest.mark.xdist_group("pipeline_model")
def test_no_device_sees_all_layers_of_a_weight(staged):
    text = staged.compiled.call.as_text()
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    stacked = {p: s for p, s in flatten_specs(staged.specs).items() if s.num_stacked}
    for path, spec in stacked.items():
        # Its other dims may be whole or divided by fsdp or model.
        for rest in (spec.shape[1:], tuple(n // 2 for n in spec.shape[1:])):
            assert ",".join(map(str, (LAYERS, *rest))) not in shapes, path
    assert "collective-permute" in text


@pytest.mark.xdist_group("pipeline_model")
def test_each_device_stores_the_layers_of_its_stage(staged):
    layers = {p: s for p, s in flatten_specs(staged.specs).items() if s.num_stacked}
    assert layers
    for path, sharding in staged.target.shardings(layers).items():
        assert sharding.shard_shape(layers[path].shape)[0] == LAYERS // 2, path


SLOW = {
    "circular-data-fsdp": (dict(num_microbatches=4, num_repeats=2), None, dict(data=2, fsdp=2)),
    "rows-over-stages": (dict(num_microbatches=4), OVER_STAGES, dict(data=4)),
}


@pytest.mark.slow
@pytest.mark.xdist_group("pipeline_model")
@pytest.mark.parametrize("case", SLOW)
def test_training_in_stages_equals_one_device(case, alone):
    fields, rules, sizes = SLOW[case]
    num = 2 * int(np.prod(list(sizes.values())))
    got = Training(PipelinedTransformer.Config(**fields), rules, num, pipeline=2, **sizes)
    assert_same_trajectory(got, alone)


# -- the modifier --------------------------------------------------------------------------


def test_the_modifier_keeps_what_was_set_on_the_stack():
    cfg = experiments.get("tiny-lm")
    cfg.model.decoder.stack.set(remat=Remat("full"))
    cfg = PipelineModifier.Config(num_microbatches=4, num_repeats=2).instantiate()(cfg)
    stack = cfg.model.decoder.stack
    assert (stack.num_microbatches, stack.num_repeats, stack.remat) == (4, 2, Remat("full"))
    assert cfg.sharding_rules.activation_rules["batch"] == ("pipeline", "data", "expert", "fsdp")


def test_the_modifier_can_leave_the_batch_alone():
    modifier = PipelineModifier.Config(num_microbatches=4, split_batch=False).instantiate()
    cfg = modifier(experiments.get("tiny-lm"))
    assert "batch" not in cfg.sharding_rules.activation_rules


def test_the_modifier_is_applied_once():
    modifier = PipelineModifier.Config(num_microbatches=4).instantiate()
    with pytest.raises(ConfigError):
        modifier(modifier(experiments.get("tiny-lm")))
