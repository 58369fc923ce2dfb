"""How far two models' logits differ, whatever sequences they read."""

from __future__ import annotations

import jax
import numpy as np

from axcore.inference import compare_logits
from axcore.layers import (
    CrossAttention,
    CrossTransformerLayer,
    Decoder,
    Encoder,
    EncoderDecoder,
)


def encoder_decoder():
    layer = CrossTransformerLayer.Config(cross_attention=CrossAttention.Config(num_heads=2))
    layer.attention.num_heads = 2
    encoder = Encoder.Config(num_layers=1)
    encoder.layer.attention.num_heads = 2
    decoder = Decoder.Config(num_layers=1, layer=layer)
    cfg = EncoderDecoder.Config(
        vocab_size=30, model_dim=8, max_seq_len=6, encoder=encoder, decoder=decoder
    )
    return cfg.instantiate(name="model")


def test_an_encoder_decoder_gets_a_sequence_to_read_and_one_to_continue():
    model = encoder_decoder()
    params = model.initialize(jax.random.key(0))
    same = compare_logits((model, params), (model, params))
    assert same["max_abs_logit_difference"] == 0.0 and same["next_token_agreement"] == 1.0

    # Only what it reads changes: the encoder's last norm shifts all that the decoder attends to.
    other = dict(params, encoder=jax.tree.map(lambda x: x + 0.5, params["encoder"]))
    moved = compare_logits((model, params), (model, other))["max_abs_logit_difference"]
    assert moved is not None and np.isfinite(moved) and moved > 1e-3
