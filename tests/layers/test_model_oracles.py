"""Whole models against transformers: random small ones of the same weights, in float32."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.collection import apply_state_updates
from axcore.layers import (
    QKV,
    Attention,
    CrossAttention,
    CrossTransformerLayer,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    EncoderModel,
    FeedForward,
    FirstTokenPooler,
    HeadTransform,
    LayerNorm,
    Linear,
    PostNormTransformerLayer,
    RelativePositionBias,
    RelativePositionTable,
    RMSNorm,
    StackedTransformer,
    TransformerLayer,
    VisionTransformer,
    init_cache,
    merge_state,
)
from axcore.layers.attention_bias import alibi_slopes, relative_position_buckets
from axcore.ops import Full

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("transformers")]

DIM, HEADS, HEAD_DIM = 24, 4, 6


@pytest.fixture(scope="module")
def hf():
    """transformers, offline."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    pytest.importorskip("torch", reason="the oracle needs torch")
    return pytest.importorskip("transformers", reason="the oracle needs transformers")


def randomized(model):
    """A torch model in evaluation mode whose parameters are all drawn, and these as numpy."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    model.eval()
    return model, {n: p.detach().numpy() for n, p in model.state_dict().items()}


def linear(w, name):
    out = {"weight": w[f"{name}.weight"].T}
    return out | ({"bias": w[f"{name}.bias"]} if f"{name}.bias" in w else {})


def norm(w, name):
    out = {"scale": w[f"{name}.weight"]}
    return out | ({"bias": w[f"{name}.bias"]} if f"{name}.bias" in w else {})


def heads_out(w, name):
    out = {"weight": w[f"{name}.weight"].T.reshape(-1, HEADS, HEAD_DIM)}
    if f"{name}.bias" in w:
        out["bias"] = w[f"{name}.bias"].reshape(HEADS, HEAD_DIM)
    return out


def heads_in(w, name):
    out = {"weight": w[f"{name}.weight"].T.reshape(HEADS, HEAD_DIM, -1)}
    return out | ({"bias": w[f"{name}.bias"]} if f"{name}.bias" in w else {})


def run(module, state, method, **inputs):
    fn = jax.jit(
        lambda s, i: functional(module, state=s, inputs=i, is_training=False, method=method)[0]
    )
    return np.asarray(fn(state, inputs))


def close(got, expected, tolerance=1e-4):
    expected = expected.detach().numpy()
    assert np.abs(got - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def test_alibi_slopes_and_relative_buckets(hf):
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.t5.modeling_t5 import T5Attention

    for num_heads in (1, 3, 8, 12, 40):
        theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
        np.testing.assert_allclose(alibi_slopes(num_heads), theirs.numpy(), rtol=1e-6)
    for num_buckets, farthest in ((32, 128), (16, 50), (8, 100)):
        distance = torch.arange(-farthest, farthest + 1)
        for both in (True, False):
            theirs = T5Attention._relative_position_bucket(distance, both, num_buckets, farthest)
            ours = relative_position_buckets(num_buckets, farthest, bidirectional=both)
            np.testing.assert_array_equal(ours, theirs.numpy())


def test_bert(hf):
    import torch

    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=40,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    theirs, w = randomized(hf.BertForPreTraining(config))
    e = "bert.embeddings"
    ln = LayerNorm.Config(eps=1e-12)
    ours = EncoderModel.Config(
        vocab_size=50,
        model_dim=DIM,
        max_seq_len=16,
        num_token_types=2,
        embedding=Embedding.Config(head_bias=True),
        embedding_norm=ln,
        encoder=Encoder.Config(
            num_layers=2,
            layer=PostNormTransformerLayer.Config(
                attention=Attention.Config(num_heads=HEADS, mask=Full()),
                attention_norm=ln,
                feed_forward=FeedForward.Config(hidden_dim=40, activation="gelu"),
                feed_forward_norm=ln,
            ),
            stack=StackedTransformer.Config(),
            final_norm=None,
        ),
        pooler=FirstTokenPooler.Config(dense=Linear.Config()),
        head_transform=HeadTransform.Config(norm=ln),
    ).instantiate(name="m")

    def layer(i):
        p = f"bert.encoder.layer.{i}"
        return {
            "attention": {
                "qkv": {
                    n: heads_out(w, f"{p}.attention.self.{n}") for n in ("query", "key", "value")
                },
                "output": heads_in(w, f"{p}.attention.output.dense"),
            },
            "attention_norm": norm(w, f"{p}.attention.output.LayerNorm"),
            "feed_forward": {
                "up": linear(w, f"{p}.intermediate.dense"),
                "down": linear(w, f"{p}.output.dense"),
            },
            "feed_forward_norm": norm(w, f"{p}.output.LayerNorm"),
        }

    head = "cls.predictions"
    state = {
        "embedding": {
            "weight": w[f"{e}.word_embeddings.weight"],
            "head_bias": w[f"{head}.bias"],
        },
        "token_types": w[f"{e}.token_type_embeddings.weight"],
        "position": {"weight": w[f"{e}.position_embeddings.weight"]},
        "embedding_norm": norm(w, f"{e}.LayerNorm"),
        "encoder": {"layer": {str(i): layer(i) for i in range(2)}},
        "pooler": {"dense": linear(w, "bert.pooler.dense")},
        "head_transform": {
            "dense": linear(w, f"{head}.transform.dense"),
            "norm": norm(w, f"{head}.transform.LayerNorm"),
        },
    }
    rng = np.random.default_rng(0)
    ids, types = rng.integers(0, 50, (2, 9)), rng.integers(0, 2, (2, 9))
    padding = np.arange(9)[None] < np.array([[9], [5]])
    with torch.no_grad():
        out = theirs.bert(
            torch.tensor(ids),
            attention_mask=torch.tensor(padding.astype(int)),
            token_type_ids=torch.tensor(types),
        )
        logits = theirs.cls(out.last_hidden_state, out.pooler_output)[0]
    inputs = dict(
        input_ids=ids.astype(np.int32),
        segment_ids=padding.astype(np.int32),
        token_types=types.astype(np.int32),
    )
    close(run(ours, state, "hidden", **inputs)[padding], out.last_hidden_state[padding])
    close(run(ours, state, "pooled", **inputs), out.pooler_output)
    close(run(ours, state, "logits", **inputs)[padding], logits[padding])


def test_vit(hf):
    import torch

    config = hf.ViTConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=40,
        image_size=12,
        patch_size=4,
        num_labels=5,
        attn_implementation="eager",
    )
    theirs, w = randomized(hf.ViTForImageClassification(config))
    ln = LayerNorm.Config(eps=1e-12)
    ours = VisionTransformer.Config(
        model_dim=DIM,
        image_size=12,
        patch_size=4,
        num_classes=5,
        encoder=Encoder.Config(
            num_layers=2,
            layer=TransformerLayer.Config(
                attention_norm=ln,
                attention=Attention.Config(num_heads=HEADS, mask=Full()),
                feed_forward_norm=ln,
                feed_forward=FeedForward.Config(hidden_dim=40, activation="gelu"),
            ),
            stack=StackedTransformer.Config(),
            final_norm=ln,
        ),
    ).instantiate(name="m")
    names = _vit_names(w)

    def layer(i):
        p = {k: v.format(i=i) for k, v in names.items()}
        return {
            "attention_norm": norm(w, p["norm1"]),
            "attention": {
                "qkv": {n: heads_out(w, p[n]) for n in ("query", "key", "value")},
                "output": heads_in(w, p["output"]),
            },
            "feed_forward_norm": norm(w, p["norm2"]),
            "feed_forward": {"up": linear(w, p["up"]), "down": linear(w, p["down"])},
        }

    e = "vit.embeddings"
    state = {
        "patches": {
            "projection": {
                # (out, channels, height, width) -> (height, width, channels, out)
                "weight": w[f"{e}.patch_embeddings.projection.weight"].transpose(2, 3, 1, 0),
                "bias": w[f"{e}.patch_embeddings.projection.bias"],
            }
        },
        "class_token": w[f"{e}.cls_token"][0, 0],
        "position": {"weight": w[f"{e}.position_embeddings"][0]},
        "encoder": {
            "layer": {str(i): layer(i) for i in range(2)},
            "final_norm": norm(w, "vit.layernorm"),
        },
        "classifier": linear(w, "classifier"),
    }
    images = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(images.transpose(0, 3, 1, 2))).logits
    close(run(ours, state, "logits", images=images), expected)


def _vit_names(w):
    """Parameter names of transformers' ViT, which differ between its versions."""
    old = "vit.encoder.layer.{i}"
    if old.format(i=0) + ".layernorm_before.weight" in w:
        attention = f"{old}.attention"
        return {
            "norm1": f"{old}.layernorm_before",
            "norm2": f"{old}.layernorm_after",
            **{n: f"{attention}.attention.{n}" for n in ("query", "key", "value")},
            "output": f"{attention}.output.dense",
            "up": f"{old}.intermediate.dense",
            "down": f"{old}.output.dense",
        }
    new = "vit.layers.{i}"
    return {
        "norm1": f"{new}.layernorm_before",
        "norm2": f"{new}.layernorm_after",
        "query": f"{new}.attention.q_proj",
        "key": f"{new}.attention.k_proj",
        "value": f"{new}.attention.v_proj",
        "output": f"{new}.attention.o_proj",
        "up": f"{new}.mlp.fc1",
        "down": f"{new}.mlp.fc2",
    }


def t5():
    """A T5 v1.0: no biases, no scaling of logits, one bias table a stack, a scaled tied head."""
    rms, plain = RMSNorm.Config(), Linear.Config(bias=False)

    def attention(*, bidirectional):
        return Attention.Config(
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            qkv=QKV.Config(query=plain, key=plain, value=plain),
            output=plain,
            logit_scale=1.0,
            bias=RelativePositionBias.Config(
                num_buckets=8, max_distance=16, bidirectional=bidirectional, table="bias"
            ),
            **({"mask": Full()} if bidirectional else {}),
        )

    ffn = FeedForward.Config(hidden_dim=40, activation="relu", up=plain, down=plain)
    shared = dict(
        num_layers=2,
        stack=StackedTransformer.Config(),
        final_norm=rms,
        shared=RelativePositionTable.Config(num_heads=HEADS, num_buckets=8, table="bias"),
    )
    return EncoderDecoder.Config(
        vocab_size=50,
        model_dim=DIM,
        max_seq_len=16,
        embedding=Embedding.Config(head_scale=DIM**-0.5),
        encoder_position=None,
        decoder_position=None,
        encoder=Encoder.Config(
            layer=TransformerLayer.Config(
                attention_norm=rms,
                attention=attention(bidirectional=True),
                feed_forward_norm=rms,
                feed_forward=ffn,
            ),
            **shared,
        ),
        decoder=Decoder.Config(
            layer=CrossTransformerLayer.Config(
                attention_norm=rms,
                attention=attention(bidirectional=False),
                cross_attention_norm=rms,
                cross_attention=CrossAttention.Config(
                    num_heads=HEADS,
                    head_dim=HEAD_DIM,
                    query=plain,
                    key=plain,
                    value=plain,
                    output=plain,
                    logit_scale=1.0,
                ),
                feed_forward_norm=rms,
                feed_forward=ffn,
            ),
            **shared,
        ),
    )


def t5_state(w):
    def projections(name):
        return {n: heads_out(w, f"{name}.{n[0]}") for n in ("query", "key", "value")}

    def stack(name, ffn):
        def layer(i):
            p = f"{name}.block.{i}.layer"
            out = {
                "attention_norm": norm(w, f"{p}.0.layer_norm"),
                "attention": {
                    "qkv": projections(f"{p}.0.SelfAttention"),
                    "output": heads_in(w, f"{p}.0.SelfAttention.o"),
                },
                "feed_forward_norm": norm(w, f"{p}.{ffn}.layer_norm"),
                "feed_forward": {
                    "up": linear(w, f"{p}.{ffn}.DenseReluDense.wi"),
                    "down": linear(w, f"{p}.{ffn}.DenseReluDense.wo"),
                },
            }
            if ffn == 2:
                out["cross_attention_norm"] = norm(w, f"{p}.1.layer_norm")
                out["cross_attention"] = {
                    **projections(f"{p}.1.EncDecAttention"),
                    "output": heads_in(w, f"{p}.1.EncDecAttention.o"),
                }
            return out

        table = w[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        return {
            "layer": {str(i): layer(i) for i in range(2)},
            "shared": {"weight": table},
            "final_norm": norm(w, f"{name}.final_layer_norm"),
        }

    return {
        "embedding": {"weight": w["shared.weight"]},
        "encoder": stack("encoder", 1),
        "decoder": stack("decoder", 2),
    }


def test_t5(hf):
    import torch

    config = hf.T5Config(
        vocab_size=50,
        d_model=DIM,
        d_kv=HEAD_DIM,
        d_ff=40,
        num_layers=2,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=1000,  # none: generation goes on
    )
    theirs, w = randomized(hf.T5ForConditionalGeneration(config))
    ours, state = t5().instantiate(name="m"), t5_state(w)
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 50, (2, 11)), rng.integers(0, 50, (2, 7))
    padding = (np.arange(11)[None] < np.array([[11], [6]])).astype(int)
    expected = theirs(
        torch.tensor(source),
        attention_mask=torch.tensor(padding),
        decoder_input_ids=torch.tensor(target),
    ).logits
    inputs = dict(
        source_ids=source.astype(np.int32),
        input_ids=target.astype(np.int32),
        source_segment_ids=padding.astype(np.int32),
    )
    close(run(ours, state, "logits", **inputs), expected)

    # Gradients of a weighted sum of logits, for the tables that many places use.
    weights = rng.normal(size=expected.shape).astype(np.float32)
    (expected * torch.tensor(weights)).sum().backward()

    @jax.jit
    def loss(state):
        logits, _ = functional(ours, state=state, inputs=inputs, is_training=False, method="logits")
        return jnp.sum(logits * weights)

    grads = jax.grad(loss)(state)
    close(np.asarray(grads["embedding"]["weight"]), theirs.shared.weight.grad, 1e-3)
    table = theirs.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    close(np.asarray(grads["decoder"]["shared"]["weight"]), table.grad, 1e-3)

    # Greedy generation through the caches, token for token.
    reference = theirs.generate(
        torch.tensor(source),
        attention_mask=torch.tensor(padding),
        max_new_tokens=6,
        do_sample=False,
    )[:, 1:]
    assert greedy(ours, state, inputs, 6) == reference.tolist()


def greedy(module, state, inputs, num_tokens):
    padding = inputs["source_segment_ids"]
    memory = run(
        module,
        state,
        "encode",
        source_ids=inputs["source_ids"],
        source_segment_ids=padding,
    )
    batch, source = padding.shape
    state = merge_state(state, init_cache(module, batch, num_tokens, memory_len=source))

    def step(state, method, **more):
        logits, col = functional(module, state=state, inputs=more, is_training=False, method=method)
        return jnp.argmax(logits, -1).astype(jnp.int32), apply_state_updates(state, col)

    decode = jax.jit(lambda s, t, p: step(s, "decode", input_ids=t, positions=p))
    at = jnp.zeros((batch, 1), jnp.int32)
    token, state = jax.jit(lambda s, **k: step(s, "prefill", **k))(
        state, input_ids=at, positions=at, memory=memory, memory_segment_ids=padding
    )
    out = [token]
    for i in range(1, num_tokens):
        token, state = decode(state, token[:, None], at + i)
        out.append(token)
    return np.stack(out, axis=1).tolist()
