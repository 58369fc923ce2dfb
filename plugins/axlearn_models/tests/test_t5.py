"""T5: published settings, training, and transformers' outputs, both directions."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

from axcore import experiments, functional
from axcore.checkpoint.convert import load_family
from axcore.collection import apply_state_updates
from axcore.errors import CheckpointError
from axcore.layers import ALiBi, LayerNorm, init_cache, merge_state

NAME = "hf:T5ForConditionalGeneration"
# config.json of google-t5/t5-small, without the prompts of its tasks, and of google/t5-v1_1-small.
T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
T5_1_1_SMALL = dict(
    T5_SMALL,
    d_ff=1024,
    num_layers=8,
    num_decoder_layers=8,
    num_heads=6,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
)


def computed(cfg: Any) -> dict[str, str]:
    left_out = ("compute_dtype", "rate", "max_seq_len")
    return {p: v for p, v in cfg.model.lines().items() if not p.endswith(left_out)}


@pytest.mark.parametrize(
    ("settings", "member"), [(T5_SMALL, "t5-small"), (T5_1_1_SMALL, "t5-v1.1-small")]
)
def test_published_settings_give_the_member_of_the_catalog(settings, member):
    cfg = load_family(NAME).config(settings, {})
    assert computed(cfg) == computed(experiments.get(member))


@pytest.mark.parametrize("member", [n for n in experiments.names() if n.startswith("t5-")])
def test_a_member_survives_the_way_through_foreign_settings(member):
    cfg, family = experiments.get(member), load_family(NAME)
    assert computed(family.config(family.foreign_config(cfg), {})) == computed(cfg)


@pytest.mark.parametrize(
    "change",
    [
        {"feed_forward_proj": "gated-swish"},
        {"is_decoder": True},
        {"dense_act_fn": "gelu"},
        {"surprise": 1},
        {"model_type": "mt5"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_implemented_is_refused_by_name(change):
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        load_family(NAME).config({**T5_SMALL, **change}, {})
    assert caught.value.code == "AX614"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("embedding.head_scale", 1.0),
        ("encoder.layer.attention.bias", ALiBi.Config()),
        ("decoder.layer.cross_attention.logit_scale", None),
        ("decoder.layer.cross_attention_norm", LayerNorm.Config()),
        ("decoder.layer.feed_forward.hidden_dim", 32),
    ],
    ids=lambda value: value.rsplit(".", 1)[-1] if isinstance(value, str) else "",
)
def test_what_a_foreign_config_cannot_say_is_not_exported(path, value):
    cfg = experiments.get("t5-test")
    cfg.model.set_path(path, value)
    with pytest.raises(CheckpointError) as caught:
        load_family(NAME).foreign_config(cfg)
    assert caught.value.code == "AX622"


def test_a_full_member_reads_the_embedded_text():
    cfg = experiments.get("t5-base").set(batch_size=2)
    data = cfg.instantiate(name="trainer").cfg.input.instantiate()
    with data.iterator() as iterator:
        batch = next(iterator)
    assert batch["source_ids"].shape == (2, 512)
    assert batch["target_ids"].shape == (2, 114)
    assert batch["target_ids"][:, 0].tolist() == [32_099, 32_099]


@pytest.mark.parametrize(
    "member", ["t5-test", pytest.param("t5-v1.1-test", marks=pytest.mark.slow)]
)
def test_a_test_member_trains_and_evaluates(member, cli, tmp_path):
    out = tmp_path / "run"
    few = ("--set", "evalers.heldout.max_documents=2")
    done = cli("train", member, "--max-step", 3, "--out", out, *few)
    assert done["step"] == 3
    assert 3.0 < done["eval"]["loss"] < 8.0  # near the logarithm of 288
    assert 0 <= done["eval"]["accuracy"] <= 1
    assert "bits_per_byte" not in done["eval"]
    again = cli("eval", "--from", out)
    assert again["metrics"]["loss"] == pytest.approx(done["eval"]["loss"], rel=1e-5)


# -- against transformers --------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    d_model=32,
    d_kv=6,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
)
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
SOURCE, TARGET = 20, 16


def inputs() -> dict[str, np.ndarray]:
    """Three pairs, of which two end in padding; longer than the farthest distance."""
    rng = np.random.default_rng(1)

    def valid(length: int, *lengths: int) -> np.ndarray:
        return (np.arange(length)[None] < np.array(lengths)[:, None]).astype(np.int32)

    return {
        "source_ids": rng.integers(2, 96, (3, SOURCE)).astype(np.int32),
        "input_ids": rng.integers(2, 96, (3, TARGET)).astype(np.int32),
        "source_segment_ids": valid(SOURCE, SOURCE, 13, 5),
        "segment_ids": valid(TARGET, 11, TARGET, 7),
    }


def run(model: Any, data: dict[str, np.ndarray]) -> Any:
    import torch

    tensors = {name: torch.from_numpy(array.astype(np.int64)) for name, array in data.items()}
    return model(
        input_ids=tensors["source_ids"],
        attention_mask=tensors["source_segment_ids"],
        decoder_input_ids=tensors["input_ids"],
        decoder_attention_mask=tensors["segment_ids"],
    ).logits


def greedy(ours: Any, source: np.ndarray, count: int) -> list[int]:
    """Tokens after the start token, through the caches, up to the end token."""

    def compiled(method: str) -> Any:
        @jax.jit
        def call(state: Any, inputs: Any) -> Any:
            out, collection = functional(
                ours.model, state=state, inputs=inputs, method=method, is_training=False
            )
            return out, apply_state_updates(state, collection)

        return call

    memory, _ = compiled("encode")(ours.params, {"source_ids": source})
    cache = init_cache(ours.model, 1, count + 1, memory_len=source.shape[1])
    state, decode = merge_state(ours.params, cache), compiled("decode")
    step = {"input_ids": np.zeros((1, 1), np.int32), "positions": np.zeros((1, 1), np.int32)}
    logits, state = compiled("prefill")(state, {**step, "memory": memory})
    tokens = [int(np.argmax(logits[0]))]
    while len(tokens) < count and tokens[-1] != 1:
        at = np.full((1, 1), len(tokens), np.int32)
        last = np.full((1, 1), tokens[-1], np.int32)
        logits, state = decode(state, {"input_ids": last, "positions": at})
        tokens.append(int(np.argmax(logits[0])))
    return tokens


def untied(model: Any, directory: Any) -> None:
    """Gives a model of 1.1 a head of its own, as the published files have, and saves it."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    head = torch.empty_like(model.shared.weight).normal_(0.0, 0.2, generator=generator)
    model.lm_head.weight = torch.nn.Parameter(head)
    left_out = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n not in left_out}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("extra", [{}, GATED], ids=["t5", "t5-1.1"])
@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_an_imported_model_computes_and_generates_the_same(
    extra, random_model, close, close_gradients, read_model
):
    import torch

    theirs, directory = random_model("T5ForConditionalGeneration", "T5Config", **{**SIZES, **extra})
    if extra:
        untied(theirs, directory)
    ours, data = read_model(directory), inputs()
    valid = data["segment_ids"] != 0
    logits = run(theirs, data)
    close(ours.call("logits", **data)[valid], logits.detach().numpy()[valid])

    targets = np.random.default_rng(2).integers(0, 96, (3, TARGET))
    chosen = torch.from_numpy(valid)
    loss = torch.nn.functional.cross_entropy(logits[chosen], torch.from_numpy(targets)[chosen])
    loss.backward()
    our_loss, gradients = ours.loss_and_gradients(
        **data, target_ids=targets.astype(np.int32), target_mask=valid
    )
    assert our_loss == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    close_gradients(gradients, expected)

    source = data["source_ids"][:1]
    # Its cache takes decoders for as deep as encoders.
    made = theirs.generate(
        torch.from_numpy(source.astype(np.int64)),
        max_new_tokens=16,
        do_sample=False,
        num_beams=1,
        use_cache=False,
    )
    tokens = made[0, 1:].tolist()
    assert greedy(ours, source, 16) == tokens
    if extra:  # tied, a random model repeats itself
        assert len(set(tokens)) > 1


@pytest.mark.parametrize("member", ["t5-test", "t5-v1.1-test"])
@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_an_exported_model_computes_the_same(
    member, transformers, of_config, write_model, close, tmp_path
):
    ours = of_config(experiments.get(member), load_family(NAME))
    directory = write_model(ours, tmp_path / "exported")
    theirs, report = transformers.T5ForConditionalGeneration.from_pretrained(
        directory, output_loading_info=True, local_files_only=True
    )
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    data = inputs()
    valid = data["segment_ids"] != 0
    expected = run(theirs.eval(), data).detach().numpy()
    close(ours.call("logits", **data)[valid], expected[valid])


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_the_command_converts_both_ways_with_evidence(random_model, cli, tmp_path):
    _, directory = random_model("T5ForConditionalGeneration", "T5Config", **SIZES)
    done = cli("convert", directory, "--out", tmp_path / "ours", "--verify", "always")
    assert done["family"] == NAME
    assert done["max_abs_logit_difference"] < 1e-4
    back = cli("convert", tmp_path / "ours", "--export", "hf", "--out", tmp_path / "back")
    assert back["max_abs_logit_difference"] < 1e-4
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_decoder_layers"] == 3
