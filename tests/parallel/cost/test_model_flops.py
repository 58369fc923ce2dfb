"""Model FLOPs from configs, against hand counts, traced programs and published MFUs."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from models_for_tests import MODELS, Experts, language_model, trainer

from axcore.config import config_for
from axcore.errors import ShardingError
from axcore.layers import CausalLM, EncoderDecoder, RepeatedTransformer
from axcore.layers.multi_token import MultiTokenPrediction
from axcore.ops import DotGeneral
from axcore.ops.masks import Causal, Full, PrefixLM, SegmentIds, SlidingWindow, TracedWindow
from axcore.parallel.cost import count_function, count_pairs, mfu, model_flops
from axcore.plugins import Instance
from axcore.remat import Remat

SMALL = dict(layers=3, dim=32, heads=8, kv_heads=2, hidden=48, vocab=128)
# Per token and layer: q and output 32 x 32, k and v 32 x 8, three of 32 x 48.
SMALL_WEIGHTS = 3 * (2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 48)


def machine(chips: int, peak: float, **peaks: float) -> Instance:
    return Instance(
        name=f"test-{chips}",
        family="test",
        platform="test",
        num_hosts=1,
        devices_per_host=chips,
        hbm_bytes=2**34,
        peak_flops={"bfloat16": peak, **peaks},
    )


# Published: model, tokens per row, seconds per step of 1,024 rows, chips, bf16 peak, MFU in %.
ROWS = [
    ("7B", 4096, 1.4, 256, 989e12, 54.2),
    ("7B", 4096, 2.5, 256, 459e12, 66.2),
    ("7B", 4096, 1.2, 1024, 667e12, 24.2),
    ("70B", 4096, 9.2, 512, 989e12, 40.0),
    ("70B", 4096, 11.6, 512, 459e12, 68.0),
    ("70B", 4096, 11.2, 1024, 667e12, 25.0),
    ("30B-A3B", 16384, 12.9, 512, 459e12, 31.6),
    ("30B-A3B", 16384, 4.3, 512, 2250e12, 19.2),
]
IDS = [f"{row[0]}-{row[3]}x{row[4] / 1e12:.0f}T" for row in ROWS]


@pytest.mark.parametrize(
    ("size", "seq_len", "seconds", "chips", "peak", "published"), ROWS, ids=IDS
)
def test_published_mfus_follow_within_1_3_points(size, seq_len, seconds, chips, peak, published):
    flops = model_flops(MODELS[size](), seq_len)
    rate = 1024 * seq_len / seconds
    short_form = 100 * flops.train_with_embeddings.full * rate / (chips * peak)
    assert short_form == pytest.approx(published, abs=1.3)
    # Without the look-up tables, which multiply nothing, they come nearer still.
    found = mfu(flops, rate, machine(chips, peak), dtype="bfloat16")
    assert found is not None and found.causal < found.full
    assert 100 * found.full == pytest.approx(published, abs=0.7)


@pytest.mark.parametrize(
    ("size", "total", "active"),
    [("7B", 6.738e9, 6.738e9), ("70B", 68.977e9, 68.977e9), ("30B-A3B", 30.53e9, 3.35e9)],
)
def test_parameters_are_those_published(size, total, active):
    flops = model_flops(MODELS[size](), 1024)
    assert flops.num_parameters == pytest.approx(total, rel=1e-3)
    assert flops.num_active_parameters == pytest.approx(active, rel=5e-3)
    assert not flops.notes


def test_a_training_token_costs_six_flops_a_weight_and_attention():
    flops = model_flops(language_model(**SMALL), 16)
    head = 32 * 128
    attention = 3 * 12 * 8 * 4  # layers x 12 x heads x head_dim, for each key
    assert flops.train.full == 6 * (SMALL_WEIGHTS + head) + attention * 16
    assert flops.train.causal == 6 * (SMALL_WEIGHTS + head) + attention * 17 / 2
    assert flops.forward.full * 3 == flops.train.full
    by_kind = flops.train_by("kind")
    assert by_kind["head"].full == 6 * head
    assert by_kind["attention"].full == attention * 16
    norms = (2 * 3 + 1) * 32
    assert flops.num_parameters == SMALL_WEIGHTS + 2 * head + norms
    assert flops.train_with_embeddings.full == 6 * flops.num_parameters + attention * 16


def test_a_tied_head_counts_as_a_product_and_its_table_once():
    tied = model_flops(language_model(**SMALL, tied=True), 16)
    untied = model_flops(language_model(**SMALL), 16)
    assert tied.train == untied.train
    assert untied.num_parameters - tied.num_parameters == 32 * 128
    assert tied.num_embedding_parameters == 32 * 128


@pytest.mark.parametrize(
    "remat",
    [
        Remat(),
        Remat("full"),
        Remat("sites", save=("qkv_proj", "attn_out")),
        Remat("dots_no_batch"),
        Remat("dots"),
    ],
    ids=["none", "full", "published-gpu-sites", "products-with-weights", "products"],
)
def test_hardware_flops_are_those_of_the_traced_step(remat):
    model = language_model(**SMALL)
    model.decoder.stack = RepeatedTransformer.Config(remat=remat)
    cfg = trainer(model, batch_size=2, seq_len=16)
    built = cfg.instantiate(name="trainer")
    batch = {name: jax.ShapeDtypeStruct((2, 16), jnp.int32) for name in ("input_ids", "target_ids")}
    traced = count_function(built.train_step, built.abstract_state(), batch)
    # The reference looks at all keys of so short a row.
    assert traced.matmul_flops == model_flops(cfg).hardware.full * 2 * 16


def test_a_window_bounds_what_a_query_sees():
    mask = Causal() & SlidingWindow(left=3)
    local = model_flops(language_model(**SMALL, mask=mask), 16)
    full = model_flops(language_model(**SMALL), 16)
    each = 3 * 12 * 8 * 4
    assert full.train.full - local.train.full == each * (16 - 4)
    # The first queries see 1, 2, 3 keys, the other 13 four each.
    seen = (1 + 2 + 3 + 13 * 4) / 16
    assert local.train_by("kind")["attention"].causal == each * seen


def test_layers_of_one_scan_have_windows_of_their_own():
    model = language_model(**SMALL, mask=Causal() & TracedWindow())
    model.decoder.stack = RepeatedTransformer.Config(layer_values={"window": (3.0, math.inf, 3.0)})
    attention = model_flops(model, 16).train_by("kind")["attention"]
    assert attention.full == 12 * 8 * 4 * (4 + 16 + 4)


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Full(),
        Causal() & SlidingWindow(left=5),
        SlidingWindow(left=2, right=4),
        PrefixLM(7),
        Causal() & SegmentIds(),
    ],
    ids=str,
)
def test_pairs_are_those_of_the_dense_mask(mask):
    row = jnp.arange(24)
    # A row is one document.
    parts = [p for p in mask.parts() if not isinstance(p, SegmentIds)]
    dense = jnp.stack([p.dense(row, row) for p in parts]).all(axis=0)
    assert count_pairs(mask, 24, 24).causal == int(dense.sum())


def test_experts_count_as_often_as_a_token_goes_to_one():
    def moe(top_k: int) -> CausalLM.Config:
        experts = Experts.Config(num_experts=16, top_k=top_k, hidden_dim=48)
        return language_model(**{**SMALL, "hidden": 0}, feed_forward=experts)

    one, four = model_flops(moe(1), 16), model_flops(moe(4), 16)
    assert four.num_parameters == one.num_parameters
    assert four.num_active_parameters - one.num_active_parameters == 3 * 3 * (3 * 32 * 48)
    assert four.train.full - one.train.full == 6 * 3 * 3 * (3 * 32 * 48)
    # The router is met by every token.
    dense = model_flops(language_model(**SMALL), 16)
    assert one.train.full - dense.train.full == 6 * 3 * 32 * 16


def test_experts_that_nobody_states_count_in_full_and_are_noted(monkeypatch):
    monkeypatch.delattr(Experts, "experts_per_token")
    experts = Experts.Config(num_experts=4, top_k=1, hidden_dim=48)
    flops = model_flops(language_model(**{**SMALL, "hidden": 0}, feed_forward=experts), 16)
    assert flops.num_active_parameters == flops.num_parameters
    assert "no layer states experts_per_token" in flops.notes[0]


def test_further_predicted_tokens_use_the_head_again():
    model = language_model(**SMALL)
    with_depth = model.copy()
    with_depth.multi_token = MultiTokenPrediction.Config(depth=2, layer=model.decoder.layer)
    base, deep = model_flops(model, 16), model_flops(with_depth, 16)
    more = deep.train_by("kind")["head"].full - base.train_by("kind")["head"].full
    assert more == 2 * 6 * 32 * 128
    layer = (SMALL_WEIGHTS // 3) + 2 * 32 * 32  # and the projection of both inputs
    assert deep.train_by("kind")["projection"].full == 6 * (SMALL_WEIGHTS + 2 * layer)


def test_an_encoder_decoder_counts_each_side_with_its_tokens():
    model = EncoderDecoder.Config(
        vocab_size=64,
        model_dim=32,
        encoder_position=None,
        decoder_position=None,
    )
    model.encoder.num_layers = model.decoder.num_layers = 2
    flops = model_flops(model, 16, target_len=4)
    square = 32 * 32
    encoder = 2 * (4 + 8) * square
    decoder, of_memory = 2 * (2 + 2 + 2 + 8) * square, 2 * 2 * square
    rows = encoder * 16 + decoder * 4 + of_memory * 16 + 32 * 64 * 4
    pairs_full = 2 * (16 * 16 + 4 * 4 + 4 * 16)
    pairs_causal = 2 * (16 * 16 + 4 * 5 / 2 + 4 * 16)
    assert flops.train.full * 16 == 6 * rows + 12 * 32 * pairs_full
    assert flops.train.causal * 16 == 6 * rows + 12 * 32 * pairs_causal


def test_a_frozen_weight_has_no_gradient_of_its_own():
    cfg = trainer(language_model(**SMALL), batch_size=2, seq_len=16)
    every = model_flops(cfg)
    cfg.learner.frozen_params = ("decoder/layer/0/**",)
    # One layer of three: 4 instead of 6 FLOPs a weight.
    assert every.train.full - model_flops(cfg).train.full == 2 * SMALL_WEIGHTS / 3


class Int8Dot(DotGeneral):
    """A product in int8, as a quantization recipe would put in."""

    class Config(DotGeneral.Config):
        """No fields."""

    operand_dtype = "int8"


def test_a_quantized_product_is_measured_by_its_own_peak():
    model = language_model(**SMALL)
    model.compute_dtype = "bfloat16"
    model.decoder.layer.feed_forward.up.dot = Int8Dot.Config()
    flops = model_flops(model, 16)
    parts = flops.train_by("dtype")
    assert parts["int8"].full == 6 * 3 * 32 * 48
    instance = machine(2, 100.0, int8=400.0)
    found = mfu(flops, 1.0, instance)
    plain = mfu(flops, 1.0, instance, dtype="bfloat16")
    assert found is not None and plain is not None
    assert found.full == pytest.approx(
        (parts["int8"].full / 400 + parts["bfloat16"].full / 100) / 2
    )
    assert plain.full == pytest.approx(flops.train.full / 100 / 2)
    assert mfu(flops, 1.0, dataclasses.replace(instance, peak_flops={"bfloat16": 1.0})) is None


def test_bad_input_is_refused():
    with pytest.raises(ShardingError, match="seq_len is None, expected the tokens of a row"):
        model_flops(language_model(**SMALL))
    with pytest.raises(ShardingError, match="expected a trainer's or model's config"):
        model_flops(config_for, 16)
    flops = model_flops(language_model(**SMALL), 16)
    with pytest.raises(ShardingError, match="tokens_per_second is 0"):
        mfu(flops, 0, machine(1, 1.0))
