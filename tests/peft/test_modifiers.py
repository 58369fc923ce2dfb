"""Modifiers for fine-tuning: which layers they adapt, what then trains, and on which devices."""

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.config import Config, apply_modifier
from axcore.errors import ConfigError, TrainError
from axcore.layers import DoRA, FusedQKV, LoRA, StackedTransformer
from axcore.module import flatten_specs
from axcore.parallel import MeshShape, resolve_instance, select_devices
from axcore.peft import DoRAModifier, FreezeModifier, LoRAModifier, detach
from axcore.remat import Remat
from axcore.train._paths import flatten
from axcore.train._program import Program
from axcore.train.assemble import edited

# What the tests that compile adapt: a projection to heads, and one that contracts the hidden dim.
SOME = DoRAModifier.Config(rank=2, alpha=32.0, targets=("**/query", "**/down"))
ALL = {"query", "key", "value", "output", "up", "down"}


def tiny(**decoder):
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=8, seq_len=8, max_step=4, sample_prompt=None)
    cfg.model.set(model_dim=16)
    cfg.model.decoder.layer.attention.set(num_heads=2)
    cfg.model.decoder.set(**decoder)
    return cfg


def unrolled(**decoder):
    return tiny(stack=StackedTransformer.Config(), **decoder)


def adapted(cfg):
    """Layer names by number that have an adapter."""
    specs = flatten_specs(cfg.model.instantiate(name="m").parameter_specs())
    found = {}
    for path in specs:
        if path.endswith("/dot/lora_a"):
            parts = path.split("/")
            found.setdefault(parts[2], set()).add(parts[-3])
    return found


def test_all_linear_layers_get_an_adapter_and_the_learner_trains_only_those():
    cfg = apply_modifier(tiny(), LoRAModifier.Config(rank=2))
    assert adapted(cfg) == {"0:2:1": ALL}
    trainer = cfg.instantiate(name="t")
    trained = flatten_specs(trainer.learner.trainable_specs(trainer.model.parameter_specs()))
    assert {path.split("/")[-2:][0] for path in trained} == {"dot"}
    assert len(trained) == 2 * len(ALL)
    assert Config.from_text(cfg.to_text()) == cfg


def test_targets_choose_by_path_and_further_parameters_may_train():
    cfg = apply_modifier(
        tiny(),
        DoRAModifier.Config(targets=("**/qkv/query", "**/down"), train="**/final_norm/*"),
    )
    assert adapted(cfg) == {"0:2:1": {"query", "down"}}
    trainer = cfg.instantiate(name="t")
    trained = flatten_specs(trainer.learner.trainable_specs(trainer.model.parameter_specs()))
    assert {"decoder/final_norm/scale", "decoder/final_norm/bias"} <= set(trained)
    assert isinstance(cfg.model.decoder.layer.feed_forward.down.dot, DoRA.Config)


def test_layers_of_an_unrolled_stack_may_differ():
    cfg = apply_modifier(
        unrolled(num_layers=3), LoRAModifier.Config(targets="decoder/layer/1/attention/**")
    )
    assert adapted(cfg) == {"1": {"query", "key", "value", "output"}}
    detach(cfg)
    cfg.learner.frozen_params = ()
    assert cfg.to_text() == unrolled(num_layers=3).to_text()


def test_layers_of_a_scan_may_differ_where_they_repeat_and_otherwise_the_error_says_why():
    cfg = apply_modifier(
        tiny(num_layers=4),
        LoRAModifier.Config(targets="decoder/layer/[13]/**/up"),
    )
    assert adapted(cfg) == {"1:4:2": {"up"}}
    with pytest.raises(ConfigError, match="layers 0-1 of 4 only") as caught:
        apply_modifier(tiny(num_layers=4), LoRAModifier.Config(targets="decoder/layer/[01]/**"))
    assert "StackedTransformer" in (caught.value.hint or "")


def test_a_fused_projection_is_adapted():
    cfg = tiny()
    cfg.model.decoder.layer.attention.qkv = FusedQKV.Config()
    cfg = apply_modifier(cfg, LoRAModifier.Config(targets="**/projection", rank=2))
    specs = flatten_specs(cfg.model.instantiate(name="m").parameter_specs())
    a = "decoder/layer/0:2:1/attention/qkv/projection/dot/lora_a"
    assert specs[a].shape == (2, 16, 2)
    assert specs[a.replace("_a", "_b")].shape == (2, 2, 2, 3, 8)


def test_modifiers_are_flags():
    cfg = edited(
        tiny(), modifiers=["lora:rank=2,alpha=4,targets=('**/query','**/value'),dropout=0.1"]
    )
    dot = cfg.model.decoder.layer.attention.qkv.query.dot
    assert (dot.rank, dot.alpha, dot.dropout.rate) == (2, 4.0, 0.1)
    assert edited(tiny(), modifiers=["freeze:train=**/bias"]).learner.frozen_params == (
        "**",
        "!**/bias",
    )


def test_a_models_own_config_takes_adapters_too():
    cfg = experiments.get("tiny-lm").model.set(max_seq_len=8)
    cfg = apply_modifier(cfg, LoRAModifier.Config(targets="**/up"))
    assert isinstance(cfg.decoder.layer.feed_forward.up.dot, LoRA.Config)
    assert not isinstance(cfg.decoder.layer.feed_forward.down.dot, LoRA.Config)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="matches none of 12 linear layers") as caught:
        apply_modifier(tiny(), LoRAModifier.Config(targets="decoder/layer/0/attention/quer"))
    assert caught.value.hint
    once = apply_modifier(tiny(), LoRAModifier.Config(rank=2))
    with pytest.raises(ConfigError, match="has an adapter already"):
        apply_modifier(once, DoRAModifier.Config(rank=4))
    with pytest.raises(ConfigError, match="no parameters to train"):
        apply_modifier(tiny(), FreezeModifier.Config())
    detach(once)  # by some later modifier: the learner says that nothing is left to train
    trainer = once.instantiate(name="t")
    with pytest.raises(TrainError, match="lora_"):
        trainer.learner.trainable_specs(trainer.model.parameter_specs())


def batch(rows=8, seq=8):
    tokens = np.asarray(jax.random.randint(jax.random.key(3), (rows, seq + 1), 1, 200), np.int32)
    return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}


def run(cfg, instance="cpu", steps=2):
    """Losses and the first and last state of a few steps as the trainer takes them."""
    machine = resolve_instance(instance)
    program = Program(cfg.instantiate(name="trainer"), machine, select_devices(machine))
    state = program.initial_state()
    before = jax.device_get(state)
    rows = program.put(batch())
    call = program.compile_train(state, rows).call
    losses = []
    for _ in range(steps):
        state, metrics = call(state, rows)
        losses.append(float(metrics["loss"]))
    return losses, before, state


@pytest.fixture(scope="module")
def on_one_device():
    return run(apply_modifier(tiny(), SOME), steps=6)


def test_training_lowers_the_loss_and_leaves_the_base_bitwise_alone(on_one_device):
    losses, before, after = on_one_device
    assert losses[-1] < losses[0] - 2e-3
    moved = {
        path
        for path, value in flatten(before.model).items()
        if not np.array_equal(value, np.asarray(flatten(after.model)[path]))
    }
    assert {path[-1] for path in moved} == {"lora_a", "lora_b", "lora_magnitude"}
    assert len(moved) == 3 * 2


def test_optimizer_state_exists_for_adapters_only(on_one_device):
    _, _, state = on_one_device
    shapes = {x.shape for x in jax.tree.leaves(state.learner.optimizer) if x.shape}
    adapters = {x.shape for p, x in flatten(state.model).items() if p[-1].startswith("lora_")}
    assert shapes == adapters
    size = sum(x.size for x in jax.tree.leaves(state.learner.optimizer))
    total = sum(x.size for p, x in flatten(state.model).items() if p[-1].startswith("lora_"))
    assert size <= 2 * total + 10


def test_sharded_training_equals_training_on_one_device(on_one_device):
    cfg = apply_modifier(tiny(), SOME).set(mesh_shape=MeshShape(fsdp=4, model=2))
    losses, _, state = run(cfg, "cpu-8", steps=3)
    np.testing.assert_allclose(losses, on_one_device[0][:3], rtol=2e-5)
    query = flatten(state.model)[
        "decoder", "layer", "0:2:1", "attention", "qkv", "query", "dot", "lora_a"
    ]
    assert query.sharding.shard_shape(query.shape) == (2, 4, 2)  # embed over fsdp


@pytest.mark.slow
def test_unrolled_and_scanned_stacks_agree_with_remat_and_dropout():
    losses = []
    for cfg in (unrolled(), tiny()):
        cfg.model.decoder.stack.set(remat=Remat("full"))
        modifier = LoRAModifier.Config(rank=2, dropout=0.2, targets="**/qkv/*")
        losses.append(run(apply_modifier(cfg, modifier), steps=2)[0])
    np.testing.assert_allclose(*losses, rtol=1e-5)
