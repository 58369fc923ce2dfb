"""Multi-token prediction: what it predicts, from what, and that it is nothing when off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.collection import total_loss
from axcore.errors import ModuleError
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    MultiTokenPrediction,
    SequenceInfo,
    TransformerLayer,
    init_cache,
)

LAYER = TransformerLayer.Config(attention=Attention.Config(num_heads=2))
VOCAB, DIM, SEQ = 20, 8, 7
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, (2, SEQ + 1)).astype(np.int32)
BATCH = dict(
    input_ids=IDS[:, :-1],
    target_ids=IDS[:, 1:],
    target_mask=np.array([[1] * 7, [1] * 5 + [0] * 2], bool),
    segment_ids=np.array([[1] * 3 + [2] * 4, [1] * 5 + [0] * 2], np.int32),
    positions=np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0]], np.int32),
)


def config(depth=2):
    multi_token = MultiTokenPrediction.Config(depth=depth, layer=LAYER) if depth else None
    return CausalLM.Config(
        vocab_size=VOCAB,
        model_dim=DIM,
        max_seq_len=SEQ,
        decoder=Decoder.Config(num_layers=1, layer=LAYER),
        multi_token=multi_token,
    )


@pytest.fixture(scope="module")
def made():
    module = config().instantiate(name="m")
    state = jax.tree.map(
        lambda spec: RNG.normal(0, 0.4, spec.shape).astype(np.float32), module.parameter_specs()
    )

    @jax.jit
    def losses(state, batch):
        _, col = functional(
            module, state=state, inputs=batch, is_training=True, key=jax.random.key(0)
        )
        return {n: e.result() for n, e in col.losses.items()}, total_loss(col)

    return module, state, losses


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def test_each_depth_predicts_one_token_further(made):
    """Equation (21) to (25) of arXiv:2412.19437, token by token and document by document."""
    _, state, losses = made
    found, total = losses(state, BATCH)
    table = state["embedding"]["weight"]
    layer = LAYER.copy().set(input_dim=DIM).instantiate(name="l")

    @jax.jit
    def padded_block(params, x):
        info = SequenceInfo(jnp.arange(SEQ)[None])
        return functional(layer, state=params, inputs=(x, info), is_training=False)[0]

    def block(params, x):  # what follows does not show, so one length serves all documents
        padded = np.pad(x, ((0, SEQ - len(x)), (0, 0)))[None]
        return np.asarray(padded_block(params, padded))[0, : len(x)]

    def documents():
        yield IDS[0, :4]  # the last of each is a target only
        yield IDS[0, 3:8]
        yield IDS[1, :6]

    sums, counts = {1: 0.0, 2: 0.0}, {1: 0, 2: 0}
    for tokens in documents():
        inputs = tokens[:-1]
        x = table[inputs] + state["position"]["weight"][: len(inputs)]
        (only,) = state["decoder"]["layer"].values()
        h = block(jax.tree.map(lambda a: a[0], only), x)
        norm = state["decoder"]["final_norm"]
        h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
        h = h * norm["scale"] + norm["bias"]
        for k in (1, 2):
            p = state["multi_token"][f"depth_{k}"]
            h = h[: len(inputs) - k]  # the tokens i that have an i + k
            if not len(h):
                break
            e = table[inputs[k:]]
            both = [rms(h, p["hidden_norm"]["scale"]), rms(e, p["embedding_norm"]["scale"])]
            h = block(p["layer"], np.concatenate(both, -1) @ p["projection"]["weight"])
            logits = rms(h, p["final_norm"]["scale"]) @ table.T
            log_p = np.asarray(jax.nn.log_softmax(logits))
            targets = tokens[k + 1 :]
            sums[k] -= log_p[np.arange(len(targets)), targets].sum()
            counts[k] += len(targets)
    assert counts == {1: 2 + 3 + 4, 2: 1 + 2 + 3}
    for k in (1, 2):
        np.testing.assert_allclose(found[f"multi_token_{k}"], sums[k] / counts[k], rtol=1e-4)
    expected = found["cross_entropy"] + 0.3 / 2 * (sums[1] / counts[1] + sums[2] / counts[2])
    np.testing.assert_allclose(total, expected, rtol=1e-4)


def test_it_is_nothing_when_off_and_outside_of_training(made):
    module, state, _ = made
    off = config(depth=0).instantiate(name="m")
    specs = module.parameter_specs()
    assert specs.pop("multi_token")
    assert off.parameter_specs() == specs
    batch = {n: v for n, v in BATCH.items() if n != "segment_ids"}
    _, col = functional(module, state=state, inputs=batch, is_training=False)
    assert set(col.losses) == {"cross_entropy"}
    assert "multi_token" not in init_cache(module, 2, SEQ)


def test_no_depth_is_refused():
    with pytest.raises(ModuleError, match="depth is 0"):
        config().set(multi_token=MultiTokenPrediction.Config(depth=0)).instantiate(name="m")
