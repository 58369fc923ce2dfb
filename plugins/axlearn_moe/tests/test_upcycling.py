"""A mixture made of a dense model computes what that did, until something is changed on purpose."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import CATALOG, batch_of, random_params, small

from axcore import functional
from axcore.checkpoint import stack_form
from axcore.cli import main
from axcore.collection import total_loss
from axcore.config import apply_modifier
from axcore.errors import CheckpointError, ConfigError
from axcore.inference import compare_logits, load_model, quantize_state, write_model
from axcore.layers import FeedForward, Linear, RepeatedTransformer, StackedTransformer
from axcore.quantization import QuantizeModifier
from axlearn_moe import (
    MoE,
    MoEModifier,
    upcycle_directory,
    upcycle_state,
)

KEY = jax.random.key(3)
pytestmark = pytest.mark.xdist_group("upcycling")


def models(name="fuji-test-v3", **moe):
    """A dense model, random parameters of it, and the mixture."""
    cfg = small(name)
    dense = cfg.copy().instantiate(name="trainer").model
    mixed = MoE.Config(**{"num_experts": 4, **moe})
    every = MoEModifier.Config(moe=mixed, every=2 if name == "fuji-test-v3" else 1)
    mixture = apply_modifier(cfg, every).instantiate(name="trainer").model
    return dense, random_params(dense), mixture


@pytest.fixture(scope="module")
def fuji():
    return models()


def flat(tree):
    return {p: np.asarray(x) for p, x in stack_form.canonical(stack_form.flatten(tree)).items()}


@pytest.mark.parametrize("name", CATALOG)
def test_copies_compute_what_the_dense_model_does(name):
    """A token's weights sum to 1, so equal experts give what each of them gives."""
    dense, params, mixture = models(name)
    made = upcycle_state(params, mixture, KEY)
    batch = batch_of(name)

    def loss(module, state):
        _, collection = functional(module, state=state, inputs=batch, is_training=False)
        return total_loss(collection)

    expected = jax.jit(lambda s: loss(dense, s))(params)
    got = jax.jit(lambda s: loss(mixture, s))(made.state)
    # Four experts' rows are summed in another order, in float32.
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert made.copied and all("/experts/" in path for path in made.copied)
    assert all(path.endswith("/router/weight") for path in made.initialized)


def test_every_second_layer_stays_dense(fuji):
    _, params, mixture = fuji
    before, after = flat(params), flat(upcycle_state(params, mixture, KEY).state)
    layer = "decoder/layer/{}/feed_forward/{}up/weight"
    np.testing.assert_array_equal(after[layer.format(0, "")], before[layer.format(0, "")])
    for expert in after[layer.format(1, "experts/")]:
        np.testing.assert_array_equal(expert, before[layer.format(1, "")])


def test_noise_has_the_deviation_asked_for(fuji):
    _, params, mixture = fuji
    before = flat(params)["decoder/layer/1/feed_forward/up/weight"]
    made = flat(upcycle_state(params, mixture, KEY, noise=0.1).state)
    noise = made["decoder/layer/1/feed_forward/experts/up/weight"] - before
    # 4 * 64 * 170-odd draws: the deviation is known to under a percent, five times over.
    np.testing.assert_allclose(np.std(noise, axis=(1, 2)), 0.1 * np.std(before), rtol=0.05)
    assert not np.array_equal(noise[0], noise[1])


def test_dropped_units_begin_anew_with_the_statistics_they_had(fuji):
    _, params, mixture = fuji
    params = jax.tree.map(lambda x: x + 0.3, params)  # a mean that is not zero
    before = flat(params)
    after = flat(upcycle_state(params, mixture, KEY, drop_ratio=0.25).state)
    path = "decoder/layer/1/feed_forward/"
    of_expert = []
    for name, axis in (("up", 0), ("gate", 0), ("down", 1)):
        old = before[f"{path}{name}/weight"]
        new = after[f"{path}experts/{name}/weight"]
        changed = np.any(new != old, axis=1 + axis)  # (experts, hidden)
        assert np.all(np.sum(changed, axis=1) == round(0.25 * old.shape[1 - axis]))
        of_expert.append(changed)
        units = np.moveaxis(old, 1 - axis, 0)
        for expert, which in zip(np.moveaxis(new, 2 - axis, 1), changed, strict=True):
            assert np.array_equal(expert[~which], units[~which])
            # About 2,700 draws each: their mean within 3 / sqrt(n), their deviation within 6 %.
            np.testing.assert_allclose(expert[which].mean(), units[which].mean(), atol=0.03)
            np.testing.assert_allclose(expert[which].std(), units[which].std(), rtol=0.06)
    np.testing.assert_array_equal(of_expert[0], of_expert[1])  # the same units in all three
    np.testing.assert_array_equal(of_expert[0], of_expert[2])
    assert not np.array_equal(of_expert[0][0], of_expert[0][1])  # others in each expert


def test_the_seed_decides_and_the_form_of_stacks_does_not():
    cfg = small("fuji-test-v3")
    params = random_params(cfg.copy().instantiate(name="trainer").model)
    made = []
    for stack in (RepeatedTransformer, StackedTransformer):
        mixed = cfg.copy()
        mixed.replace(FeedForward.Config, MoE.Config(num_experts=2))
        mixed.model.decoder.stack = stack.Config()
        mixture = mixed.instantiate(name="trainer").model
        made.append(upcycle_state(params, mixture, KEY, noise=0.1, drop_ratio=0.5))
    one, other = (flat(m.state) for m in made)
    assert sorted(one) == sorted(other)
    for path in one:
        np.testing.assert_array_equal(one[path], other[path])
    again = upcycle_state(params, mixture, jax.random.key(4), noise=0.1)
    name = "decoder/layer/0/feed_forward/experts/up/weight"
    assert not np.array_equal(flat(again.state)[name], one[name])


def test_biases_and_precision_come_along():
    cfg = small("bert-test")
    dense = cfg.copy().instantiate(name="trainer").model
    params = random_params(dense)
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=2, param_dtype="bfloat16"))
    mixture = cfg.instantiate(name="trainer").model
    made = flat(upcycle_state(params, mixture, KEY).state)
    name = next(path for path in made if path.endswith("/experts/up/bias"))
    assert made[name].dtype == jnp.bfloat16
    wanted = flat(params)[name.replace("/experts", "")].astype(jnp.bfloat16)
    np.testing.assert_array_equal(made[name], np.stack([wanted] * 2))


def test_what_does_not_fit_is_refused(fuji):
    dense, params, mixture = fuji
    with pytest.raises(ConfigError, match="AX930"):
        upcycle_state(params, mixture, KEY, noise=-1.0)
    with pytest.raises(ConfigError, match="AX930"):
        upcycle_state(params, mixture, KEY, drop_ratio=1.5)
    with pytest.raises(ConfigError, match="AX931"):
        upcycle_state(params, dense, KEY)
    _, _, narrow = models(hidden_dim=8)
    with pytest.raises(CheckpointError, match=r"an expert's is \[8, 64\]"):
        upcycle_state(params, narrow, KEY)
    _, _, biased = models(up=Linear.Config(bias=True))
    with pytest.raises(CheckpointError, match=r"no 'decoder/layer/1/feed_forward/up/bias'"):
        upcycle_state(params, biased, KEY)
    _, _, other = models("bert-test")
    with pytest.raises(CheckpointError, match="AX932"):
        upcycle_state(params, other, KEY)


@pytest.fixture(scope="module")
def stored():
    """A dense model with weights of int8, and a mixture with the same product."""
    cfg = small("fuji-test-v3")
    plain = cfg.copy().instantiate(name="trainer").model
    recipe = QuantizeModifier.Config(recipe="int8-weights").instantiate().recipe_config()
    cfg = apply_modifier(cfg, recipe)
    dense = cfg.copy().instantiate(name="trainer").model
    state, _ = quantize_state(plain, random_params(plain), dense)
    mixture = apply_modifier(cfg, MoEModifier.Config(num_experts=2)).instantiate(name="trainer")
    return dense, state, mixture.model


def test_weights_in_few_bits_are_copied_with_their_scales(stored):
    dense, state, mixture = stored
    made = upcycle_state(state, mixture, KEY)
    compared = compare_logits((dense, state), (mixture, made.state))
    assert compared["max_abs_logit_difference"] <= 1e-5 * compared["max_abs_logit"]


@pytest.mark.parametrize("change", [dict(noise=0.1), dict(drop_ratio=0.5)], ids=str)
def test_weights_in_few_bits_take_no_noise_and_no_new_units(stored, change):
    _, state, mixture = stored
    with pytest.raises(ConfigError, match="AX972"):
        upcycle_state(state, mixture, KEY, **change)


# -- the command --------------------------------------------------------------------------------

SMALL = "model.model_dim=16,model.decoder.num_layers=2,batch_size=2,seq_len=16,sample_prompt=None"


def axcore(capsys, *args):
    assert main([*map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("upcycling") / "dense"
    flags = [part for text in SMALL.split(",") for part in ("--set", text)]
    assert main(["train", "tiny-lm", "--out", str(out), "--max-step", "2", *flags]) == 0
    return out


def test_the_directory_evaluates_generates_and_trains_on(run, tmp_path, capsys):
    out = tmp_path / "mixture"
    flag = "axlearn-moe:moe:num_experts=4,top_k=2"
    said = axcore(capsys, "upcycle", "--from", run, "--modifier", flag, "--out", out)
    assert said["equal"] is True and said["mixtures"] == 2
    assert said == {**json.loads((out / "upcycling.json").read_text()), "out": str(out)}
    dense, mixed = (axcore(capsys, "eval", "--from", path) for path in (run, out))
    ours, theirs = (d["metrics"]["loss"] for d in (mixed, dense))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # sums in another order, float32
    assert axcore(capsys, "generate", "--from", out, "--prompt", "a", "--max-tokens", "2")["text"]
    config = out / "config.txt"
    again = axcore(
        capsys, *("train", config, "--init-from", out, "--max-step", 1), "--out", tmp_path / "on"
    )
    assert again["step"] == 1


def test_weights_that_do_not_sum_to_one_are_warned_about(run, tmp_path, capsys):
    flag = "axlearn-moe:moe:num_experts=4,top_k=1"
    args = ("upcycle", "--from", run, "--out", tmp_path / "x", "--modifier", flag, "--json")
    assert main([*map(str, args)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["equal"] is False
    assert "warning: the experts are copies" in said.err and "router.normalize=True" in said.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--noise", "nan"], "AX930"),
        (["--drop-ratio", "1.5"], "AX930"),
        (["--seed", "-1"], "AX970"),
        (["--seed", "4294967296"], "AX970"),  # a key of 32 bits would be that of seed 0
        (["--noise", "1e39"], "AX930"),  # finite, and not so in float32
        (["--noise", "1e36"], "AX971"),  # the weights are finite, the logits are not
        (["--modifier", "axlearn-moe:moe:moe.param_dtype=int8"], "AX932"),
        (["--step", "77"], "AX605"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_refused_and_nothing_written(run, tmp_path, capsys, flags, told):
    out = tmp_path / "mixture"
    assert main(["upcycle", "--from", str(run), "--out", str(out), *flags]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("error: ") == 1
    assert not out.exists() and not list(tmp_path.iterdir())


def test_a_dense_model_that_is_not_finite_is_named(run, tmp_path):
    loaded = load_model(run)
    broken = jax.tree.map(lambda x: x * jnp.nan, loaded.state)
    write_model(tmp_path / "broken", loaded.cfg, broken, like=loaded)
    with pytest.raises(CheckpointError, match="the dense model has weights that are not finite"):
        upcycle_directory(tmp_path / "broken", MoEModifier.Config(), tmp_path / "out")


def test_routers_that_would_never_train_are_told(run, tmp_path, capsys):
    cfg = load_model(run).cfg.copy()
    cfg.learner.frozen_params = ("**", "!**/bias")
    loaded = load_model(run)
    write_model(tmp_path / "frozen", cfg, loaded.state, like=loaded)
    flags = ("upcycle", "--from", tmp_path / "frozen", "--out", tmp_path / "out", "--json")
    assert main([*map(str, flags)]) == 0
    said = capsys.readouterr()
    routers = [f"decoder/layer/{i}/feed_forward/router/weight" for i in (0, 1)]
    assert json.loads(said.out)["frozen"] == routers
    assert "learner.frozen_params" in said.err
    plain = axcore(capsys, "upcycle", "--from", run, "--out", tmp_path / "plain")
    assert plain["frozen"] == []


def test_modifiers_are_applied_in_order_as_elsewhere(run, tmp_path, capsys):
    moe = "axlearn-moe:moe:num_experts="
    flags = ("--modifier", f"{moe}2,every=2", "--modifier", f"{moe}3")
    said = axcore(capsys, "upcycle", "--from", run, "--out", tmp_path / "out", *flags)
    assert said["equal"] is True and len(said["modifiers"]) == 2
    layers = load_model(tmp_path / "out").cfg.model.decoder.layer
    assert [layer.feed_forward.num_experts for layer in layers] == [3, 2]


def test_a_mixture_is_not_upcycled_again(run, tmp_path, capsys):
    first = tmp_path / "first"
    axcore(capsys, "upcycle", "--from", run, "--out", first, "--drop-ratio", "0.5")
    assert main(["upcycle", "--from", str(first), "--out", str(tmp_path / "second")]) == 2
    error = capsys.readouterr().err
    assert "has a mixture of experts already" in error and not (tmp_path / "second").exists()
