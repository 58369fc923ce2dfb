"""Eight simulated devices train like one, and hold an eighth of what can be divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint import BaseCheckpointer
from axcore.parallel import MeshShapeModifier
from axcore.train import JsonlWriter, assemble, read_metrics, train

STEPS = 5
# Every kind of parallelism that core has: replicas, sharded parameters, split tensors.
MESHES = {
    "fsdp": {"fsdp": 8},
    "data-fsdp-model": {"data": 2, "fsdp": 2, "model": 2},
}


class Measures(BaseCheckpointer):
    """Saves nothing and notes how the state lies on the devices."""

    seen: ClassVar[dict] = {}

    def open(self, directory):
        self.key = str(directory)

    def save(self, step, arrays, extra=None):
        bytes_on, whole = {d: 0 for d in jax.devices()}, 0
        for array in jax.tree.leaves((arrays.model, arrays.learner)):
            whole += array.nbytes
            for shard in array.addressable_shards:
                bytes_on[shard.device] += shard.data.nbytes
        self.seen[self.key] = SimpleNamespace(bytes_on=bytes_on, whole=whole, state=arrays)

    def steps(self):
        return []

    def latest_good(self):
        return None

    def restore(self, step, abstract, *, allow_unexpected=False):
        raise NotImplementedError

    def check(self):
        pass

    def wait(self):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains on a machine with a mesh, once each; XLA compiles in a hurry."""
    runs = {}

    def trained(instance, mesh=None):
        if (instance, mesh) not in runs:
            cfg = experiments.get("tiny-lm")
            cfg.model.model_dim = 16
            cfg.model.decoder.num_layers = 2
            cfg.model.decoder.layer.attention.num_heads = 2
            cfg.set(max_step=STEPS, batch_size=8, seq_len=16, sample_prompt=None)
            cfg.evalers["heldout"].set(max_documents=1, every_n_steps=STEPS)
            cfg.checkpointer = Measures.Config(save_every_n_steps=STEPS)
            cfg.writers = {"jsonl": JsonlWriter.Config()}
            if mesh is not None:
                cfg.mesh_rules = [("cpu-8", [MeshShapeModifier.Config(mesh_shape=MESHES[mesh])])]
            a = assemble(cfg, instance=instance)
            out = tmp_path_factory.mktemp("run") / "out"
            report = train(a.cfg, out=out, instance=a.instance).report
            losses = [r["loss"] for r in read_metrics(out / "metrics.jsonl")]
            memory = Measures.seen.pop(str(out / "checkpoints"))
            runs[instance, mesh] = SimpleNamespace(report=report, losses=losses, memory=memory)
        return runs[instance, mesh]

    jax.config.update("jax_disable_most_optimizations", True)
    yield trained
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(
    "mesh",
    ["data-fsdp-model", pytest.param("fsdp", marks=pytest.mark.slow)],
)
def test_eight_devices_train_like_one(run, mesh):
    one, eight = run("cpu"), run("cpu-8", mesh)
    assert eight.report["mesh"] == {**dict.fromkeys(one.report["mesh"], 1), **MESHES[mesh]}
    assert len(one.losses) == STEPS and one.losses[-1] < one.losses[0]
    # Sums over devices run in another order: float32, through five updates of AdamW, whose first
    # ones are of the gradients' signs, so that the smallest gradients count as much as the largest.
    np.testing.assert_allclose(eight.losses, one.losses, rtol=5e-5)
    np.testing.assert_allclose(eight.report["eval"]["loss"], one.report["eval"]["loss"], rtol=5e-5)


def test_parameters_and_optimizer_state_are_divided_among_devices(run):
    one, eight = run("cpu").memory, run("cpu-8", "data-fsdp-model").memory
    assert one.bytes_on[jax.devices()[0]] == one.whole == eight.whole
    assert sum(map(bool, one.bytes_on.values())) == 1
    shares = {bytes_on / eight.whole for bytes_on in eight.bytes_on.values()}
    assert len(shares) == 1  # every device holds the same amount
    # fsdp x model is a quarter; norms, biases along one axis only and counters are the rest.
    assert 0.25 <= shares.pop() < 0.3


def test_moments_of_the_optimizer_lie_as_their_parameters_do(run):
    state = run("cpu-8", "data-fsdp-model").memory.state
    by_shape = {x.shape: x.sharding.spec for x in jax.tree.leaves(state.model) if x.ndim > 1}
    moments = [x for x in jax.tree.leaves(state.learner.optimizer) if x.ndim > 1]
    assert len(moments) >= 2 * len(by_shape)
    for moment in moments:
        assert moment.sharding.spec == by_shape[moment.shape]
    weight = state.model["decoder"]["layer"]["0:2:1"]["feed_forward"]["up"]["weight"]
    assert weight.addressable_shards[0].data.shape == (2, 16 // 2, 64 // 2)
