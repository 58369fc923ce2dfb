"""The trainer's config: shapes of use, one horizon, rules for machines, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import (
    InvocationContext,
    Layer,
    config_for,
    current_context,
    experiments,
    functional,
    scaled,
)
from axcore.checkpoint import OrbaxCheckpointer
from axcore.config import Config
from axcore.data import TextInput
from axcore.errors import ConfigError, PluginError, PluginLookupError, TrainError
from axcore.layers import BaseFeedForward, CausalLM, Linear
from axcore.parallel import MeshShape, MeshShapeModifier, RematModifier, resolve_instance
from axcore.plugins import host
from axcore.remat import Remat
from axcore.train import Learner, Trainer, assemble, optimizers, schedules, train


def micro() -> Trainer.Config:
    """A trainer's config by keywords, nested configs as values."""
    return Trainer.Config(
        model=CausalLM.Config(vocab_size=264, model_dim=16),
        learner=Learner.Config(
            optimizer=config_for(
                optimizers.adamw,
                learning_rate=config_for(
                    schedules.linear_warmup_cosine,
                    peak=1.0,
                    warmup_steps=scaled(0.2, of="max_step"),
                    total_steps=scaled(1, of="max_step"),
                ),
            )
        ),
        input=TextInput.Config(),
        checkpointer=OrbaxCheckpointer.Config(),
        max_step=100,
        batch_size=4,
        seq_len=16,
    ).set(sample_prompt=None)


def test_keyword_construction_round_trips_through_text():
    cfg = micro()
    cfg.model.decoder.num_layers = 1
    assert Config.from_text(cfg.to_text()) == cfg


def test_making_a_trainer_builds_no_array():
    cfg = micro()
    cfg.model.decoder.num_layers = 1
    before = jax.live_arrays()
    trainer = cfg.instantiate(name="trainer")
    assert set(trainer.children) == {"model", "learner"}
    assert {id(a) for a in jax.live_arrays()} <= {id(a) for a in before}


# -- machines --------------------------------------------------------------------------------

SHAPE = {"data": -1, "fsdp": 2, "model": 2}


def test_mesh_rules_given_as_lists_are_stored_as_tuples():
    cfg = experiments.get("tiny-lm")
    cfg.mesh_rules = [("tpu-v5e-*", [MeshShapeModifier.Config(mesh_shape={"fsdp": 256})])]
    assert isinstance(cfg.mesh_rules, tuple) and isinstance(cfg.mesh_rules[0], tuple)
    assert cfg.mesh_rules[0][1] == (MeshShapeModifier.Config(mesh_shape={"fsdp": 256}),)
    with pytest.raises(ConfigError, match="mesh_rules"):
        cfg.mesh_rules = [("tpu-v5e-*", ["fsdp"])]


def test_only_the_rule_of_the_machine_applies():
    cfg = experiments.get("tiny-lm")
    cfg.mesh_rules = [
        ("tpu-v5e-*", [MeshShapeModifier.Config(mesh_shape={"fsdp": 256})]),
        (
            "cpu-8",
            [
                MeshShapeModifier.Config(mesh_shape=SHAPE),
                RematModifier.Config(remat=Remat(policy="full")),
            ],
        ),
    ]
    eight, two = (assemble(cfg, instance=name) for name in ("cpu-8", "cpu-2"))
    assert eight.cfg.mesh_shape == MeshShape(data=-1, fsdp=2, model=2)
    assert eight.cfg.model.decoder.stack.remat == Remat(policy="full")
    assert eight.cfg.set_by("mesh_shape").name == "mesh_rules[cpu-8]"
    assert two.cfg.mesh_shape == MeshShape(fsdp=-1)  # core's own rule for simulated devices
    assert two.cfg.model.decoder.stack.remat == Remat()
    assert cfg.mesh_shape == MeshShape(data=-1)  # the experiment itself stays as it is


def test_a_flag_wins_over_the_rule():
    cfg = experiments.get("tiny-lm")
    cfg.mesh_rules = [("cpu-8", [MeshShapeModifier.Config(mesh_shape=SHAPE)])]
    a = assemble(cfg, instance="cpu-8", sets=["mesh_shape.model=4"])
    assert a.cfg.mesh_shape.model == 4
    assert "mesh_shape" in {kept.path for kept in a.rules.kept}


# -- one horizon -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_step", [5, 100])
def test_save_evaluation_and_decay_follow_the_horizon(max_step):
    cfg = experiments.get("tiny-lm").set(max_step=max_step)
    trainer = cfg.instantiate(name="trainer")
    saves = trainer.cfg.checkpointer.instantiate()
    evaler = trainer.cfg.evalers["heldout"].instantiate()
    assert saves.cfg.save_every_n_steps == max(1, max_step // 10)
    assert evaler.cfg.every_n_steps == max(1, max_step // 4)
    assert saves.should_save(max_step, max_step) and evaler.should_run(max_step, max_step)
    rate = trainer.cfg.learner.optimizer.learning_rate.instantiate()
    # Cosine from its peak down to 5 % of it at the last step, and no sooner.
    last = 0.05 * experiments.get("tiny-lm").learner.optimizer.learning_rate.peak
    np.testing.assert_allclose(rate(max_step), last, rtol=1e-5)
    assert rate(max_step - 1) > last


def test_the_text_keeps_the_relation_and_not_its_value():
    text = experiments.get("tiny-lm").to_text()
    assert 'checkpointer.save_every_n_steps: scaled(0.1, of="max_step"' in text


def test_the_horizon_has_one_place():
    five, ten = (experiments.get("tiny-lm").set(max_step=n) for n in (5, 10))
    changed = [
        (a, b)
        for a, b in zip(five.to_text().splitlines(), ten.to_text().splitlines(), strict=True)
        if a != b
    ]
    assert changed == [("max_step: 5", "max_step: 10")]


# -- context ---------------------------------------------------------------------------------


class SeesParent(BaseFeedForward):
    """Reads a weight of the module that calls it, without a reference to it."""

    def forward(self, x, info):
        parent = InvocationContext.current().parent
        return x * parent.state["gain"]


class Owner(Layer):
    """Owns the weight."""

    class Config(Layer.Config):
        inner: BaseFeedForward.Config = SeesParent.Config(input_dim=2)

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        from axcore.layers import Ones

        self._add_weight("gain", (2,), (None,), Ones())
        self.inner = self._add_child("inner", cfg.inner)

    def forward(self, x):
        return self.inner(x, None)


def test_a_layer_finds_a_shared_weight_through_the_callers_context():
    module = Owner.Config().instantiate(name="m")
    state = {"gain": jnp.array([2.0, 3.0]), "inner": {}}
    y, _ = functional(module, state=state, inputs=(jnp.ones(2),), is_training=False)
    np.testing.assert_array_equal(y, [2.0, 3.0])
    assert InvocationContext.current() is None and current_context() is None


# -- what is refused, before anything is written or compiled -----------------------------------


def refused(cfg, tmp_path, instance="cpu"):
    """Runs what must fail, and checks that nothing was written."""
    out = tmp_path / "run"
    try:
        train(cfg, out=out, instance=resolve_instance(instance))
    finally:
        assert not out.exists()


@pytest.fixture
def tiny():
    return experiments.get("tiny-lm").set(max_step=2)


@pytest.mark.parametrize(
    "name", ["max_step", "batch_size", "seq_len", "accumulation_steps", "log_every_n_steps"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_counts_are_positive(tiny, tmp_path, name, value):
    tiny.set(**{name: value})
    with pytest.raises((TrainError, ConfigError), match=name) as caught:
        refused(tiny, tmp_path)
    assert caught.value.exit_code == 2


def test_accumulation_divides_the_batch(tiny, tmp_path):
    tiny.accumulation_steps = 3
    with pytest.raises(TrainError, match="batch_size 16 is no multiple of accumulation_steps 3"):
        refused(tiny, tmp_path)


def test_a_vocabulary_too_small_for_the_tokenizer_is_an_error(tiny, tmp_path):
    tiny.model.vocab_size = 256
    with pytest.raises(TrainError, match=r"the model's vocab_size is 256") as caught:
        refused(tiny, tmp_path)
    assert caught.value.where == "model.vocab_size"
    needed = TextInput.Config().tokenizer.instantiate().vocab_size
    assert f"model.vocab_size={needed}" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_missing_required_plugin_is_an_error(tiny, tmp_path):
    tiny.required_plugins = ["nobodys-kernels>=0.1,<0.2"]
    with pytest.raises(PluginError, match=r"'nobodys-kernels>=0\.1,<0\.2' is not installed") as e:
        refused(tiny, tmp_path)
    assert "pip install" in e.value.hint


def test_a_required_plugin_of_another_version_is_an_error(tiny, tmp_path):
    (version,) = {r.version for r in host().records if r.distribution == "axcore"}
    tiny.required_plugins = ["axcore>=99"]
    with pytest.raises(PluginError, match=f"'axcore>=99' is installed as {version}"):
        refused(tiny, tmp_path)


def test_using_a_distribution_that_is_not_there_is_an_error(tiny):
    with pytest.raises(PluginLookupError, match="use names 'nobodys-kernels', no active plugin"):
        assemble(tiny, instance="cpu", use=["nobodys-kernels"])


def test_a_layer_error_names_the_layer_and_its_config_path():
    cfg = experiments.get("tiny-lm")
    cfg.model.decoder.layer.attention.num_heads = 7
    with pytest.raises(ValueError, match="input_dim 64 is no multiple of num_heads 7") as caught:
        cfg.instantiate(name="trainer")
    assert caught.value.where == "model.decoder.layer.attention"


def test_an_unknown_field_is_an_error_with_near_misses():
    with pytest.raises(ConfigError, match="max_step"):
        Trainer.Config(max_steps=3)


def test_a_model_slot_takes_modules_only():
    with pytest.raises(ConfigError, match="model"):
        Trainer.Config(model=TextInput.Config())
    assert Trainer.Config(model=Linear.Config()).model == Linear.Config()


@pytest.mark.parametrize(
    ("name", "value"), [("max_step", 10**30), ("seed", 10**20), ("max_skipped_in_a_row", -1)]
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(TrainError, match="AX701") as caught:
        micro().set(**{name: value}).instantiate(name="trainer")
    assert caught.value.where == name
