"""The language model of core, with all its constraints, on one device and on every kind of mesh."""

import jax
import numpy as np
import pytest

from axcore.collection import total_loss
from axcore.context import functional
from axcore.layers import Attention, CausalLM, Decoder, TransformerLayer
from axcore.parallel import (
    MeshShape,
    ProgramTarget,
    batch_sharding,
    build_mesh,
    compile_step,
    make_global_array,
    replicated,
)

BATCH, SEQ = 8, 8


@pytest.fixture(scope="module")
def model():
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2))
    return CausalLM.Config(
        vocab_size=32,
        max_seq_len=SEQ,
        model_dim=16,
        decoder=Decoder.Config(num_layers=2, layer=layer),
    ).instantiate(name="model")


def _batch():
    tokens = np.random.default_rng(0).integers(1, 32, (BATCH, SEQ + 1), dtype=np.int32)
    return {
        "input_ids": tokens[:, :-1],
        "target_ids": tokens[:, 1:],
        "segment_ids": np.ones((BATCH, SEQ), np.int32),
        "positions": np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1)),
        "target_mask": np.ones((BATCH, SEQ), np.float32),
    }


def _loss_and_gradient(lm, **sizes):
    shape = MeshShape(**sizes)
    mesh = build_mesh(shape, jax.devices()[: 8 if sizes else 1])
    target = ProgramTarget("cpu-8", "cpu", mesh)

    def loss(params, batch):
        _, collection = functional(lm, state=params, inputs=batch, is_training=True, target=target)
        return total_loss(collection)

    shardings, rows = target.shardings(lm.parameter_specs()), batch_sharding(mesh, target.rules)
    params = jax.device_put(lm.initialize(jax.random.key(0)), shardings)
    batch = {k: make_global_array(v, rows, v.shape) for k, v in _batch().items()}
    step = compile_step(
        jax.value_and_grad(loss),
        params,
        batch,
        in_shardings=(shardings, dict.fromkeys(batch, rows)),
        out_shardings=(replicated(mesh), shardings),
    )
    return step(params, batch)


@pytest.fixture(scope="module")
def alone(model):
    return _loss_and_gradient(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [dict(data=2, fsdp=2, model=2), dict(fsdp=4, seq=2)], ids=["dp-fsdp-tp", "fsdp-sp"]
)
def test_loss_and_gradient_equal_those_of_one_device(model, alone, sizes):
    loss, gradient = _loss_and_gradient(model, **sizes)
    np.testing.assert_allclose(loss, alone[0], rtol=1e-6)
    # The largest entries are about 0.1; sums over shards run in another order.
    jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6),
        gradient,
        alone[1],
    )
