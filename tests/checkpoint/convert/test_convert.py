"""convert: what the foreign model computes, the converted one computes; nothing is lost unsaid."""

from __future__ import annotations

import hashlib
import importlib
import json

import ml_dtypes
import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint import OrbaxCheckpointer
from axcore.checkpoint.convert import convert, export
from axcore.checkpoint.convert._evidence import model_logits
from axcore.config import Config
from axcore.data import ByteTokenizer, find_tokenizer
from axcore.errors import CheckpointError
from axcore.inference import load_model, quantize_directory
from axcore.layers import Linear, RepeatedTransformer
from axcore.quantization import QuantizeModifier

IDS = np.random.default_rng(1).integers(0, 264, (2, 9)).astype(np.int32)
BYTES = ByteTokenizer.Config().instantiate()


def oracle(tensors):
    return importlib.import_module("toy_family").forward(tensors, IDS, 2)


def logits(directory):
    loaded = load_model(directory)
    return model_logits(loaded.model, loaded.state, IDS)


def conversion(directory):
    return json.loads((directory / "conversion.json").read_text())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def edit(directory, change):
    """Edits the config that a directory holds."""
    cfg = Config.from_text((directory / "config.txt").read_text())
    change(cfg)
    (directory / "config.txt").write_text(cfg.to_text())


def scanned(cfg):
    cfg.model.decoder.set(stack=RepeatedTransformer.Config())


def quick(source, out, **kwargs):
    return convert(source, out, tokenizer=BYTES, **{"verify": "never", **kwargs})


# -- the result -------------------------------------------------------------------------------


def test_the_converted_model_computes_what_the_source_does(write_hf, tensors, out):
    report = convert(write_hf(tensors), out, tokenizer=BYTES)
    assert report.comparison.max_abs_difference < 1e-5
    np.testing.assert_allclose(logits(out), oracle(tensors), atol=1e-5)
    said = conversion(out)
    assert said["max_abs_logit_difference"] == report.comparison.max_abs_difference
    assert said["tensors"] == len(tensors) and said["unused"] == said["unmapped"] == []


def test_shards_and_one_file_give_the_same_checkpoint(write_hf, tensors, out, tmp_path):
    quick(write_hf(tensors), out)
    quick(write_hf(tensors, shards=3, name="sharded"), tmp_path / "other")
    one, other = conversion(out)["mapped"], conversion(tmp_path / "other")["mapped"]
    assert [m["sha256"] for m in one] == [m["sha256"] for m in other]


def test_an_untied_head_is_one_of_its_own(write_hf, tensors, out):
    tensors["head"] = tensors["wte"][::-1].copy()
    convert(write_hf(tensors, tie_word_embeddings=False), out, tokenizer=BYTES)
    np.testing.assert_allclose(logits(out), oracle(tensors), atol=1e-5)


def test_npz_gives_the_same_model(tensors, tmp_path, out):
    settings = {"model_type": "toy", "activation": "gelu_tanh", "vocab_size": 264}
    settings |= {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_length": 32}
    np.savez_compressed(tmp_path / "toy.npz", __config__=json.dumps(settings), **tensors)
    assert quick(tmp_path / "toy.npz", out).family["name"] == "npz:toy"
    np.testing.assert_allclose(logits(out), oracle(tensors), atol=1e-5)


def test_a_scanned_stack_restores_from_the_converted_layers(write_hf, tensors, out):
    quick(write_hf(tensors), out)
    edit(out, scanned)
    np.testing.assert_allclose(logits(out), oracle(tensors), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrower_dtype_rounds_to_nearest_and_says_so(write_hf, tensors, out, dtype):
    quick(write_hf(tensors), out, dtype=dtype)
    stored = load_model(out).state["embedding"]["weight"]
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert np.array_equal(np.asarray(stored), tensors["wte"].astype(kind))
    (row,) = [m for m in conversion(out)["mapped"] if m["path"] == ["embedding/weight"]]
    assert (row["foreign_dtypes"], row["dtypes"]) == (["float32"], [dtype])


def test_dtype_source_keeps_the_stored_one(write_hf, tensors, out):
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    assert quick(write_hf(half), out, dtype="source").dtype == "bfloat16"
    stored = load_model(out).state["embedding"]["weight"]
    assert np.array_equal(np.asarray(stored), half["wte"])


def test_every_tensor_is_hashed_on_both_sides(write_hf, tensors, out):
    quick(write_hf(tensors), out)
    rows = {m["path"][0]: m for m in conversion(out)["mapped"]}
    up = tensors["h.1.up.weight"]
    row = rows["decoder/layer/1/feed_forward/up/weight"]
    assert row["foreign_sha256"] == [hashlib.sha256(up.tobytes()).hexdigest()]
    assert row["sha256"] == [hashlib.sha256(up.T.tobytes()).hexdigest()]
    assert row["foreign_shapes"] == [[64, 16]] and row["shapes"] == [[16, 64]]
    assert {
        "foreign": ["h.1.up.weight"],
        "path": row["path"],
        "from": [[64, 16]],
        "to": [[16, 64]],
    } in (conversion(out)["shape_changes"])


def test_the_checkpoint_is_whole_and_damage_is_seen(write_hf, tensors, out):
    quick(write_hf(tensors), out)
    checkpointer = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
    checkpointer.open(out / "checkpoints")
    assert checkpointer.latest_good() == 0
    checkpointer.close()
    (chunk,) = (out / "checkpoints/0/arrays/model.embedding.weight").glob("[0-9]*")
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        load_model(out)


def test_the_experiment_reads_with_the_tokenizer_that_came_along(write_hf, tensors, out):
    quick(write_hf(tensors), out)
    assert find_tokenizer(out).vocab_size == BYTES.vocab_size
    assert "ByteTokenizer" in (out / "config.txt").read_text()


def test_settings_that_nobody_read_are_listed(write_hf, tensors, out):
    quick(write_hf(tensors, dropout=0.1), out)
    assert conversion(out)["settings_unread"] == ["architectures", "dropout"]


# -- nothing is lost unsaid -------------------------------------------------------------------


def test_an_unused_tensor_is_an_error_that_names_it(write_hf, tensors, out):
    tensors["extra.gate"] = np.ones((2, 3), np.float32)
    with pytest.raises(CheckpointError, match=r"nothing uses: extra.gate \[2, 3\]") as caught:
        quick(write_hf(tensors), out)
    assert caught.value.code == "AX615" and "--allow 'extra.gate'" in str(caught.value)
    assert not out.exists()


def test_allow_goes_on_and_is_recorded(write_hf, tensors, out):
    tensors["extra.gate"] = np.ones((2, 3), np.float32)
    del tensors["h.1.up.bias"]
    allow = ["extra.*", "decoder/layer/1/feed_forward/up/bias"]
    quick(write_hf(tensors), out, allow=allow)
    said = conversion(out)
    assert said["unused"] == ["extra.gate"] and said["unmapped"] == allow[1:]
    assert said["allow"] == allow
    bias = load_model(out).state["decoder"]["layer"]["1"]["feed_forward"]["up"]["bias"]
    assert not np.asarray(bias).any()  # its initial value


def test_a_missing_tensor_is_an_error_that_names_the_parameter(write_hf, tensors, out):
    del tensors["h.1.up.bias"]
    message = r"does not hold: decoder/layer/1/feed_forward/up/bias \[64\] \(from h.1.up.bias\)"
    with pytest.raises(CheckpointError, match=message):
        quick(write_hf(tensors), out)


def test_a_default_fills_what_the_source_may_lack(write_hf, tensors, out):
    del tensors["lnf.bias"]
    quick(write_hf(tensors), out)
    np.testing.assert_allclose(logits(out), oracle(tensors), atol=1e-5)


def test_constants_are_left_out_with_the_reason(write_hf, tensors, out):
    tensors["h.0.mask"] = np.ones((4, 4), np.float32)
    quick(write_hf(tensors), out)
    assert conversion(out)["ignored"] == {"h.0.mask": "a constant"}


def test_a_tied_head_is_checked_before_it_is_left_out(write_hf, tensors, out, tmp_path):
    tensors["head"] = tensors["wte"].copy()
    quick(write_hf(tensors), out)
    assert conversion(out)["tied"] == {"head": "wte"}
    tensors["head"][3, 3] += 1
    with pytest.raises(CheckpointError, match="head should repeat wte"):
        quick(write_hf(tensors, name="other"), tmp_path / "refused")


def test_a_wrong_shape_is_named(write_hf, tensors, out):
    tensors["h.0.up.weight"] = tensors["h.0.up.weight"].T.copy()
    message = r"h.0.up.weight has shape \[16, 64\], expected \[64, 16\]"
    with pytest.raises(CheckpointError, match=message):
        quick(write_hf(tensors), out)


def test_a_setting_that_is_not_implemented_is_refused(write_hf, tensors, out):
    with pytest.raises(CheckpointError, match="'activation' is 'relu'; implemented: 'gelu_tanh'"):
        quick(write_hf(tensors, activation="relu"), out)


def test_a_model_that_computes_something_else_is_refused(write_hf, tensors, out, monkeypatch):
    family = importlib.import_module("toy_family").HuggingFaceToy
    swapped = {"h.0.ln1.weight": "h.0.ln2.weight", "h.0.ln2.weight": "h.0.ln1.weight"}

    def oracle(self, source):
        arrays = {name: source.read(swapped.get(name, name)) for name in source.infos}
        return lambda ids: importlib.import_module("toy_family").forward(arrays, ids, 2)

    monkeypatch.setattr(family, "oracle", oracle)
    with pytest.raises(CheckpointError, match="computes something else"):
        convert(write_hf(tensors), out, tokenizer=BYTES)
    assert not out.exists() and not out.with_name("out.partial").exists()


def test_a_source_that_cannot_be_run_says_why(write_hf, tensors, out, tmp_path, monkeypatch):
    family = importlib.import_module("toy_family").HuggingFaceToy
    monkeypatch.setattr(family, "oracle", lambda self, source: None)
    source = write_hf(tensors)
    convert(source, out, tokenizer=BYTES)
    said = conversion(out)
    assert said["max_abs_logit_difference"] is None
    assert "no oracle" in said["comparison"]["reason"]
    with pytest.raises(CheckpointError, match="no oracle"):
        convert(source, tmp_path / "second", tokenizer=BYTES, verify="always")


# -- and back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_an_export_gives_the_source_back(write_hf, tensors, out, tmp_path, shard_bytes):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    quick(write_hf(tensors), out)
    back = tmp_path / "back"
    report = export(out, back, max_shard_bytes=shard_bytes)
    assert report.comparison.max_abs_difference < 1e-5
    files = sorted(back.glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes > 10**6)
    got = {name: x for file in files for name, x in numpy.load_file(file).items()}
    assert got.keys() == tensors.keys()
    assert all(np.array_equal(got[name], tensors[name]) for name in tensors)
    settings = json.loads((back / "config.json").read_text())
    assert settings["architectures"] == ["ToyForCausalLM"] and settings["hidden_size"] == 16
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == 257
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (BYTES.bos_id, BYTES.eos_id)
    quick(back, tmp_path / "again")
    np.testing.assert_array_equal(logits(tmp_path / "again"), logits(out))


def test_a_scanned_stack_is_exported_layer_by_layer(write_hf, tensors, out, tmp_path):
    """A run that was trained, not converted: its arrays hold all layers."""
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    from axcore.checkpoint import stack_form

    quick(write_hf(tensors), out)
    edit(out, scanned)
    (out / "conversion.json").unlink()
    loaded = load_model(out)
    checkpointer = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
    checkpointer.open(out / "checkpoints")
    checkpointer.save(7, {"model": loaded.state}, {})
    checkpointer.close()
    assert any(":" in path for path in stack_form.flatten(loaded.state))
    export(out, tmp_path / "back", verify="never", dtype="bfloat16", family="ToyForCausalLM")
    got = numpy.load_file(tmp_path / "back" / "model.safetensors")
    for name, value in tensors.items():
        assert np.array_equal(got[name], value.astype(ml_dtypes.bfloat16)), name


def test_a_padded_vocabulary_is_ours_alone(write_hf, tensors, out, tmp_path, monkeypatch):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    toy = importlib.import_module("toy_family")
    plain = toy.experiment

    def padded(*args, **kwargs):
        cfg = plain(*args, **kwargs)
        cfg.model.embedding.set(vocab_multiple_of=100)
        return cfg

    monkeypatch.setattr(toy, "experiment", padded)
    quick(write_hf(tensors), out)
    weight = load_model(out).state["embedding"]["weight"]
    assert weight.shape == (300, 16) and not np.asarray(weight[264:]).any()
    # The foreign model's own logits, of 264 tokens.
    np.testing.assert_allclose(logits(out), oracle(tensors), atol=1e-5)
    report = json.loads((out / "report.json").read_text())
    assert report["num_parameters"] == sum(x.size for x in tensors.values())
    export(out, tmp_path / "back", verify="never")
    got = numpy.load_file(tmp_path / "back" / "model.safetensors")
    np.testing.assert_array_equal(got["wte"], tensors["wte"])


def test_what_no_family_can_say_is_not_exported(tmp_path, write_hf, tensors, out):
    quick(write_hf(tensors), out)
    edit(out, lambda cfg: cfg.model.decoder.layer.feed_forward.set(gate=Linear.Config()))
    with pytest.raises(CheckpointError, match="it is gated"):
        export(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_weights_in_few_bits_are_not_exported_as_if_they_were_plain(
    tmp_path, write_hf, tensors, out
):
    quick(write_hf(tensors), out)
    recipe = QuantizeModifier.Config(recipe="int8-weights").instantiate().recipe_config()
    quantize_directory(out, [recipe], tmp_path / "stored")
    with pytest.raises(CheckpointError, match="AX975") as raised:
        export(tmp_path / "stored", tmp_path / "back", family="ToyForCausalLM", verify="never")
    assert "quantized from" in str(raised.value) and not (tmp_path / "back").exists()


def test_an_experiment_of_core_is_exported_where_a_family_fits():
    """The family's settings and config are inverses of each other."""
    toy = importlib.import_module("toy_family")
    cfg = toy.experiment(264, 16, 2, 2, 32, tied=True)
    family = toy.HuggingFaceToy()
    from axcore.checkpoint.convert import Settings

    settings = family.foreign_config(cfg.instantiate(name="t").cfg)
    assert family.config(Settings(settings), {}).to_text() == cfg.to_text()
    assert experiments.get("tiny-lm").to_text() != cfg.to_text()


# -- whole or not at all ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError], ids=lambda e: e.__name__)
def test_what_breaks_off_leaves_nothing(write_hf, tensors, tmp_path, error):
    out = tmp_path / "deep" / "down" / "out"

    def progress(done, total, name):
        assert out.with_name("out.partial").exists() and not out.exists()
        if done > total / 2:
            raise error("stop")

    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        quick(write_hf(tensors), out, progress=progress)
    assert not (tmp_path / "deep").exists()


def test_two_conversions_into_one_directory_do_not_mix(write_hf, tensors, out):
    source = write_hf(tensors)

    def progress(done, total, name):
        if done == 0:
            with pytest.raises(CheckpointError, match="another process is writing it"):
                quick(source, out)

    quick(source, out, progress=progress)
    np.testing.assert_allclose(logits(out), oracle(tensors), atol=1e-5)


def test_a_disk_that_is_too_small_is_seen_before_it_is_full(write_hf, tensors, out, monkeypatch):
    monkeypatch.setattr("axcore.checkpoint._failure.free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        quick(write_hf(tensors), out)
    assert caught.value.code == "AX602" and not out.exists()
