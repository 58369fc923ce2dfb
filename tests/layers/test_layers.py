"""Layers against closed forms and against each other."""

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
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    LMHead,
    RMSNorm,
    SequenceInfo,
    StackedTransformer,
    TransformerLayer,
)
from axcore.ops import PrefixLM

KEY = jax.random.key(0)


def call(module, *inputs, state=None, **kwargs):
    state = module.initialize(KEY) if state is None else state
    kwargs.setdefault("is_training", False)
    return functional(module, state=state, inputs=inputs, **kwargs)[0]


def info(batch, seq):
    return SequenceInfo(jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq)))


def test_linear_contracts_several_trailing_dims():
    layer = Linear.Config(
        input_dim=(2, 3), output_dim=(4, 5), axes=("heads", "head_dim", None, None)
    ).instantiate(name="m")
    state = layer.initialize(KEY)
    x = jax.random.normal(KEY, (7, 2, 3))
    expected = np.einsum("bij,ijkl->bkl", x, state["weight"]) + state["bias"]
    np.testing.assert_allclose(call(layer, x, state=state), expected, rtol=1e-5, atol=1e-6)


def test_norms_match_their_formulas():
    x = np.asarray(jax.random.normal(KEY, (4, 16)) * 3 + 1, np.float64)
    rms = call(RMSNorm.Config(input_dim=16).instantiate(name="m"), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(rms, x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6), rtol=1e-5)
    ln = call(LayerNorm.Config(input_dim=16).instantiate(name="m"), jnp.asarray(x, jnp.float32))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(ln, expected, rtol=1e-4, atol=1e-5)


def test_dropout_keeps_the_mean_and_acts_in_training_only():
    layer = Dropout.Config(rate=0.25).instantiate(name="m")
    x = jnp.ones((400, 400))
    y = call(layer, x, is_training=True, key=KEY)
    # 160,000 draws: standard error of the mean 0.0014.
    np.testing.assert_allclose(jnp.mean(y), 1.0, atol=0.006)
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    np.testing.assert_array_equal(call(layer, x), x)
    with pytest.raises(ModuleError, match=r"not in \[0, 1\)"):
        Dropout.Config(rate=1.0).instantiate(name="m")


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_attention_matches_a_plain_formula(num_kv_heads):
    dim, heads, head_dim, batch, seq = 16, 4, 4, 2, 6
    layer = Attention.Config(input_dim=dim, num_heads=heads, num_kv_heads=num_kv_heads).instantiate(
        name="m"
    )
    state = layer.initialize(KEY)
    x = jax.random.normal(jax.random.key(1), (batch, seq, dim))
    got = call(layer, x, info(batch, seq), state=state)

    p = jax.tree.map(lambda a: np.asarray(a, np.float64), state)
    xs = np.asarray(x, np.float64)
    q, k, v = (
        np.einsum("btd,dnh->bnth", xs, p["qkv"][n]["weight"]) + p["qkv"][n]["bias"][None, :, None]
        for n in ("query", "key", "value")
    )
    k, v = (np.repeat(a, heads // num_kv_heads, axis=1) for a in (k, v))
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(head_dim)
    logits = np.where(np.tril(np.ones((seq, seq))), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bnth,nhd->btd", weights @ v, p["output"]["weight"]) + p["output"]["bias"]
    np.testing.assert_allclose(got, out, rtol=1e-4, atol=1e-5)


def test_swiglu_matches_its_formula():
    layer = FeedForward.Config(
        input_dim=8,
        hidden_dim=12,
        activation="silu",
        up=Linear.Config(bias=False),
        gate=Linear.Config(bias=False),
        down=Linear.Config(bias=False),
    ).instantiate(name="m")
    state = layer.initialize(KEY)
    x = jax.random.normal(KEY, (1, 5, 8))
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), state)
    gate = np.asarray(x, np.float64) @ w["gate"]["weight"]
    hidden = gate / (1 + np.exp(-gate)) * (np.asarray(x, np.float64) @ w["up"]["weight"])
    np.testing.assert_allclose(
        call(layer, x, info(1, 5), state=state), hidden @ w["down"]["weight"], rtol=1e-4, atol=1e-5
    )


def lm(**fields):
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2, num_kv_heads=1))
    cfg = CausalLM.Config(
        vocab_size=40,
        model_dim=16,
        max_seq_len=12,
        decoder=Decoder.Config(num_layers=2, layer=layer),
        **fields,
    )
    return cfg.instantiate(name="m")


@pytest.mark.parametrize("head", [None, LMHead.Config()], ids=["tied", "untied"])
def test_the_loss_is_the_cross_entropy_of_the_logits(head):
    module = lm(lm_head=head, z_loss_weight=0.5)
    state = module.initialize(KEY)
    ids = jax.random.randint(KEY, (3, 12), 0, 40)
    targets = jnp.roll(ids, -1, axis=1)
    mask = jnp.arange(12)[None, :] < jnp.array([12, 5, 0])[:, None]
    logits = call(module, ids, state=state, method="logits").astype(jnp.float32)
    inputs = dict(input_ids=ids, target_ids=targets, target_mask=mask)
    _, col = functional(module, state=state, inputs=inputs, is_training=False)
    log_z = jax.nn.logsumexp(logits, -1)
    nll = log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    ce = jnp.sum(nll * mask) / 17
    np.testing.assert_allclose(col.losses["cross_entropy"].result(), ce, rtol=1e-5)
    z = jnp.sum(log_z**2 * mask) / 17
    np.testing.assert_allclose(total_loss(col), ce + 0.5 * z, rtol=1e-5)
    hits = jnp.sum((jnp.argmax(logits, -1) == targets) * mask) / 17
    np.testing.assert_allclose(col.summaries["accuracy"].result(), hits, rtol=1e-6)


def test_packed_documents_do_not_see_each_other():
    module = lm()
    state = module.initialize(KEY)
    ids = jax.random.randint(KEY, (1, 12), 0, 40)
    segments = jnp.array([[1] * 5 + [2] * 7])
    positions = jnp.array([[*range(5), *range(7)]])
    packed = call(module, ids, segments, positions, state=state, method="logits")
    first = call(module, ids[:, :5], state=state, method="logits")
    second = call(module, ids[:, 5:], state=state, method="logits")
    np.testing.assert_allclose(packed, jnp.concatenate([first, second], 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [PrefixLM(2), PrefixLM()], ids=["static", "by-row"])
def test_every_packed_document_has_its_prefix(mask):
    module = Attention.Config(input_dim=8, num_heads=2, mask=mask).instantiate(name="m")
    state = module.initialize(KEY)
    x = jax.random.normal(KEY, (2, 4, 8))
    alone = call(module, x, SequenceInfo(info(2, 4).positions, prefix_lengths=jnp.full(2, 2)))
    packed_info = SequenceInfo(
        info(2, 4).positions.reshape(1, 8),
        jnp.array([[1] * 4 + [2] * 4]),
        prefix_lengths=jnp.full(1, 2),
    )
    packed = call(module, x.reshape(1, 8, 8), packed_info, state=state)
    np.testing.assert_allclose(packed[0], alone.reshape(8, 8), rtol=1e-4, atol=1e-5)


def test_full_logits_never_exist_in_training():
    """By the shapes in the program: no array of (tokens, vocab) for a vocabulary past the chunk."""
    cfg = CausalLM.Config(
        vocab_size=65536,
        model_dim=8,
        max_seq_len=512,
        decoder=Decoder.Config(
            num_layers=1, layer=TransformerLayer.Config(attention=Attention.Config(num_heads=1))
        ),
    )
    module = cfg.instantiate(name="m")
    state = jax.eval_shape(module.initialize, KEY)
    ids = jax.ShapeDtypeStruct((4, 512), jnp.int32)

    def loss(p, ids):
        inputs = dict(input_ids=ids, target_ids=ids)
        return total_loss(functional(module, state=p, inputs=inputs, is_training=True)[1])

    text = str(jax.make_jaxpr(jax.grad(loss))(state, ids))
    assert "65536" in text
    for shape in ("4,512,65536", "2048,65536"):
        assert shape not in text


def test_wrong_sizes_are_refused_with_the_path():
    with pytest.raises(ModuleError, match="no multiple of num_heads 3"):
        Attention.Config(input_dim=16, num_heads=3).instantiate(name="m")
    with pytest.raises(ModuleError, match="num_kv_heads 3"):
        Attention.Config(input_dim=16, num_heads=4, num_kv_heads=3).instantiate(name="m")
    with pytest.raises(ModuleError, match="must be positive"):
        Linear.Config(input_dim=0, output_dim=3).instantiate(name="m")


def test_bfloat16_compute_keeps_float32_parameters_and_losses():
    module = lm(compute_dtype="bfloat16")
    state = module.initialize(KEY)
    assert {a.dtype for a in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    ids = jax.random.randint(KEY, (2, 12), 0, 40)
    half = call(module, ids, state=state, method="logits")
    full = call(lm(), ids, state=state, method="logits")
    assert half.dtype == jnp.float32
    # bfloat16 has 8 bits: errors of a few 2^-8 of logits of order 1.
    np.testing.assert_allclose(half, full, atol=0.05)


def test_the_embedding_and_the_tied_head_are_one_module():
    module = Embedding.Config(input_dim=4, vocab_size=9).instantiate(name="m")
    state = module.initialize(KEY)
    rows = call(module, jnp.array([[1, 8]]), state=state)
    np.testing.assert_array_equal(rows[0], state["weight"][jnp.array([1, 8])])
    logits = call(module, rows, state=state, method="logits")
    np.testing.assert_allclose(logits[0], rows[0] @ state["weight"].T, rtol=1e-6)


def test_switching_the_stack_is_one_field_and_keeps_layer_edits():
    cfg = CausalLM.Config(vocab_size=40, model_dim=16, max_seq_len=12)
    cfg.decoder.set(num_layers=2)
    cfg.decoder.layer.attention.num_heads = 4
    cfg.decoder.stack = StackedTransformer.Config()
    module = cfg.instantiate(name="m")
    assert list(module.decoder.layer.children) == ["0", "1"]
    assert module.decoder.layer.children["1"].attention.cfg.num_heads == 4


@pytest.mark.parametrize("name", ["float99", "int32", ""])
def test_a_precision_that_is_no_floating_dtype_is_refused(name):
    with pytest.raises(ModuleError, match="AX345"):
        Linear.Config(input_dim=2, output_dim=2, compute_dtype=name).instantiate(name="m")


def test_a_sequence_longer_than_the_positions_is_refused():
    model = CausalLM.Config(
        vocab_size=16,
        model_dim=8,
        max_seq_len=4,
        decoder=Decoder.Config(
            num_layers=1, layer=TransformerLayer.Config(attention=Attention.Config(num_heads=2))
        ),
    ).instantiate(name="m")
    ids = np.zeros((1, 8), np.int32)
    with pytest.raises(ModuleError, match=r"8 tokens exceeds the 4"):
        functional(
            model, state=model.initialize(jax.random.key(0)), inputs=(ids, ids), is_training=False
        )


@pytest.mark.parametrize("result", [None, jnp.ones((2, 3)), jnp.ones((2, 4, 16), jnp.int32)])
def test_a_branch_that_cannot_be_added_is_named(result):
    class Odd(FeedForward):
        def forward(self, x, info):
            return result

    layer = TransformerLayer.Config(
        input_dim=16, attention=Attention.Config(num_heads=2), feed_forward=Odd.Config()
    ).instantiate(name="m")
    with pytest.raises(ModuleError, match=r"m\.feed_forward: Odd returned .* expected float32"):
        call(layer, jnp.ones((2, 4, 16)), info(2, 4))
