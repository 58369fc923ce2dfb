"""Optimizer state in host memory: it lies there between updates, and nothing else changes."""

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.errors import ModuleError, TrainError
from axcore.parallel import MeshShape, resolve_instance, select_devices
from axcore.plugins import Instance
from axcore.train._program import Program

STEPS = 4


def config(**learner):
    cfg = experiments.get("tiny-lm").set(max_step=STEPS, batch_size=8, seq_len=8)
    cfg.model.set(model_dim=16, vocab_size=32)
    cfg.model.decoder.num_layers = 1
    cfg.model.decoder.layer.attention.num_heads = 2
    cfg.mesh_shape = MeshShape(data=2, fsdp=-1)
    cfg.learner.set(**learner)
    return cfg


def trained(**learner):
    """Returns the program, losses and the last state of a few steps on eight devices."""
    instance = resolve_instance("cpu-8")
    program = Program(
        config(**learner).instantiate(name="trainer"), instance, select_devices(instance)
    )
    tokens = np.random.default_rng(0).integers(1, 32, (8, 9), dtype=np.int32)
    batch = {
        "input_ids": tokens[:, :-1],
        "target_ids": tokens[:, 1:],
        "segment_ids": np.ones((8, 8), np.int32),
        "positions": np.tile(np.arange(8, dtype=np.int32), (8, 1)),
        "target_mask": np.ones((8, 8), np.float32),
    }
    state = program.initial_state()
    step = program.compile_train(state, program.put(batch))
    losses = []
    for _ in range(STEPS):
        state, metrics = step.call(state, program.put(batch))
        losses.append(float(metrics["loss"]))
    return program, losses, state


@pytest.fixture(scope="module")
def runs():
    jax.config.update("jax_disable_most_optimizations", True)
    yield {
        memory: trained(state_memory=memory, ema_decay=0.5, state_dtype="bfloat16")
        for memory in ("device", "host")
    }
    jax.config.update("jax_disable_most_optimizations", False)


def test_moments_and_averages_lie_in_host_memory_between_steps(runs):
    for memory, kind in (("device", "device"), ("host", "pinned_host")):
        _, _, state = runs[memory]
        arrays = [
            x for x in jax.tree.leaves((state.learner.optimizer, state.learner.ema)) if x.ndim
        ]
        assert {x.sharding.memory_kind for x in arrays} == {kind}
        counters = [x for x in jax.tree.leaves(state.learner) if not x.ndim]
        assert {x.sharding.memory_kind for x in (*counters, *jax.tree.leaves(state.model))} == {
            "device"
        }


def test_they_are_divided_among_devices_there_too(runs):
    def shards(state):
        return [x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.learner)]

    assert shards(runs["host"][2]) == shards(runs["device"][2])


def test_what_is_learned_is_the_same_to_the_bit(runs):
    (_, losses, state), (_, expected, expected_state) = runs["host"], runs["device"]
    assert losses == expected and losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)


def test_averaged_parameters_are_on_the_device_for_evaluation(runs):
    program, _, state = runs["host"]
    trainer = program.trainer
    averaged = trainer.learner.ema_params(
        state.learner, state.model, trainer.model.parameter_specs()
    )
    assert {x.sharding.memory_kind for x in jax.tree.leaves(averaged)} == {"device"}


def test_a_platform_without_host_memory_is_refused():
    instance = Instance(name="acme-8", family="acme", platform="acme", num_hosts=1,
                        devices_per_host=8, hbm_bytes=1)  # fmt: skip
    trainer = config(state_memory="host").instantiate(name="trainer")
    with pytest.raises(ModuleError, match="AX348") as error:
        Program(trainer, instance, jax.devices())
    assert error.value.where == "learner.state_memory"


@pytest.mark.parametrize("dtype", ["bfloat", "int8"])
def test_a_dtype_that_cannot_hold_state_is_refused(dtype):
    with pytest.raises(TrainError, match=f"'{dtype}'") as error:
        config(state_dtype=dtype).instantiate(name="trainer")
    assert error.value.where == "learner.state_dtype"
