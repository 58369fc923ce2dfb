"""Experts in few bits: trained so, and stored so to serve, in both dispatches, on any devices."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import (
    IN_A_HURRY,
    assert_close,
    inputs,
    layer,
    random_params,
    sequence_info,
    weighted,
)
from test_expert_parallel import target_of

from axcore import experiments, functional
from axcore.checkpoint import stack_form
from axcore.cli import main
from axcore.config import Config, apply_modifier
from axcore.errors import CheckpointError, ConfigError, ShardingError
from axcore.inference import Generator, load_model, quantize_directory, quantize_state
from axcore.layers import Linear, LoRA
from axcore.ops import DotGeneral
from axcore.parallel import resolve_instance
from axcore.plugins import host
from axcore.quantization import (
    DelayedFp8Dot,
    QuantizeModifier,
    StoredDot,
    find_sites,
    quantize_weight,
)
from axcore.quantization._stored import unpack_int4
from axcore.train import JsonlWriter, train
from axlearn_moe import EinsumDispatch, ExpertChoiceRouter, GroupedDispatch, MoEModifier

pytestmark = pytest.mark.xdist_group("quantized-experts")
BATCH, SEQ, HIDDEN = 4, 6, 16
STORED = {
    "int8": StoredDot.Config(dtype="int8"),
    "int4": StoredDot.Config(dtype="int4", group=4),
    "fp8": StoredDot.Config(dtype="float8_e4m3fn"),
    "int8_activations": StoredDot.Config(dtype="int8", activations="int8"),
}
NAMES = ("up", "gate", "down")


def configs(dot, **fields):
    """A gated layer with biases, and the same with its experts stored in few bits."""
    fields = {"hidden_dim": HIDDEN, **fields}
    plain = layer(**dict.fromkeys(NAMES, Linear.Config()), **fields)
    return plain, layer(**dict.fromkeys(NAMES, Linear.Config(dot=dot)), **fields)


def stored(dot, **fields):
    """The second of them, and its state."""
    plain, few = (cfg.instantiate(name="layer") for cfg in configs(dot, **fields))
    state, dropped = quantize_state(plain, random_params(plain), few)
    assert not dropped
    return few, state


def call(module, state, x, info, target=None):
    """Output, and the gradient of the input."""

    def scalar(x, state):
        y, _ = functional(module, state=state, inputs=(x, info), is_training=False, target=target)
        return weighted(y, info), y

    step = jax.jit(jax.value_and_grad(scalar, has_aux=True))
    run = step.lower(x, state).compile(compiler_options=IN_A_HURRY)
    (_, y), grad = run(x, state)
    return y, grad


def rounded(params, dot):
    """Plain parameters with every expert's matrix rounded as if it were a layer's of its own."""

    def one(w):
        q = quantize_weight(w, 1, dot.dtype, dot.group)
        values = unpack_int4(q.values, 0) if dot.dtype == "int4" else q.values
        blocks = values.astype(jnp.float32).reshape(-1, dot.group or len(w), w.shape[1])
        return (blocks * q.scale.reshape(-1, 1, w.shape[1])).reshape(w.shape)

    experts = {
        name: {**own, "weight": jnp.stack([one(w) for w in own["weight"]])}
        for name, own in params["experts"].items()
    }
    return {**params, "experts": experts}


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dispatch", [None, EinsumDispatch.Config()], ids=["grouped", "einsum"])
def test_stored_experts_give_what_the_rounded_ones_give(name, dispatch):
    fields = {} if dispatch is None else {"dispatch": dispatch}
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    plain = configs(STORED[name], **fields)[0].instantiate(name="layer")
    params = random_params(plain)
    expected = call(plain, rounded(params, STORED[name]), x, info)
    # The scale comes after the sum instead of before it, which float32 rounds otherwise.
    assert_close(call(*stored(STORED[name], **fields), x, info), expected)
    assert not np.allclose(expected[0], call(plain, params, x, info)[0], atol=1e-3)


@pytest.mark.parametrize("router", [None, ExpertChoiceRouter.Config()], ids=["top_k", "choice"])
def test_quantized_rows_give_the_same_in_both_dispatches(router):
    fields = {} if router is None else {"router": router}
    dot = STORED["int8_activations"]
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    einsum = stored(dot, dispatch=EinsumDispatch.Config(), **fields)
    # Rounding to int8 has no gradient, so what comes back goes by the router alone.
    assert_close(call(*stored(dot, **fields), x, info)[0], call(*einsum, x, info)[0])


def test_an_adapter_of_each_expert_goes_with_what_is_stored():
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)

    def adapted(base, dispatch):
        linear = Linear.Config(dot=LoRA.Config(rank=2, base=base))
        cfg = layer(**dict.fromkeys(NAMES, linear), hidden_dim=HIDDEN, dispatch=dispatch)
        return cfg.instantiate(name="layer")

    def run(dispatch):
        plain, few = (adapted(base, dispatch) for base in (DotGeneral.Config(), STORED["int4"]))
        state, _ = quantize_state(plain, random_params(plain), few)
        return call(few, state, x, info)

    assert_close(run(GroupedDispatch.Config()), run(EinsumDispatch.Config()))


SPLITS = [
    ("int8", dict(expert=2)),
    ("int8_activations", dict(expert=2)),
    ("fp8", dict(expert=2, model=2)),
]


def over_devices(name, axes):
    module, state = stored(STORED[name])
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    target = target_of(**axes)
    places = target.shardings(module.parameter_specs())
    placed = jax.device_put(state, places)
    up = placed["experts"]["up"]
    for array in (up["weight"], up["dot"]["scale"]):
        assert array.addressable_shards[0].data.shape[0] == 4 // axes["expert"]
    assert_close(call(module, placed, x, info, target), call(module, state, x, info))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), SPLITS)
def test_stored_experts_over_devices_equal_one_device(name, axes):
    over_devices(name, axes)


def test_blocks_of_hidden_units_go_where_those_are():
    """Of ``down`` each device has some of the blocks that have a scale, and theirs."""
    over_devices("int4", dict(expert=2, model=2))


def test_blocks_that_do_not_divide_are_refused_with_a_way_out():
    module, state = stored(STORED["int4"], hidden_dim=12)
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    with pytest.raises(ShardingError, match="AX951") as raised:
        call(module, state, x, info, target_of(model=2))
    assert "down/dot/scale has 3 blocks" in str(raised.value)
    assert "int4-weights:options={'group':16}" in str(raised.value)


# -- float8 by what earlier steps have seen --------------------------------------------------------

DELAYED = {
    "tensor": DelayedFp8Dot.Config(history_length=2),
    "channel": DelayedFp8Dot.Config(history_length=2, granularity="channel"),
}


def first_step(dot, dispatch=None, target=None):
    """Output and gradients, parameters, and the states that a training step sets."""
    fields = dict.fromkeys(NAMES, Linear.Config(dot=dot)) | {"hidden_dim": HIDDEN}
    fields |= {} if dispatch is None else {"dispatch": dispatch}
    module = layer(**fields).instantiate(name="layer")
    state = random_params(module)
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    if target is not None:
        state = jax.device_put(state, target.shardings(module.parameter_specs()))

    def scalar(x, experts):
        y, collection = functional(
            module,
            state={**state, "experts": experts},
            inputs=(x, info),
            is_training=True,
            target=target,
        )
        updates = {p: e.result() for p, e in collection.state_updates.items()}
        return weighted(y, info), (y, updates)

    run = jax.jit(jax.value_and_grad(scalar, (0, 1), has_aux=True))
    run = run.lower(x, state["experts"]).compile(compiler_options=IN_A_HURRY)
    (_, (y, updates)), grads = run(x, state["experts"])
    return (y, grads), state["experts"], updates


@pytest.mark.parametrize("name", DELAYED)
def test_each_expert_has_a_history_of_its_own_in_both_dispatches(name):
    grouped, experts, updates = first_step(DELAYED[name])
    einsum, _, others = first_step(DELAYED[name], EinsumDispatch.Config())
    dims = {"rhs_amax": (1, 2), "rhs_out_amax": (1,), "rhs_in_amax": (2,)}
    kinds = ["rhs_amax"] if name == "tensor" else ["rhs_out_amax", "rhs_in_amax"]
    assert set(updates) == {f"experts/{n}/dot/{kind}" for n in NAMES for kind in kinds}
    for path, history in updates.items():
        _, linear, _, kind = path.split("/")
        largest = np.abs(experts[linear]["weight"]).max(dims[kind])
        np.testing.assert_array_equal(history, [largest, np.zeros_like(largest)])
        np.testing.assert_array_equal(history, others[path])
    # The gradients of matrices are quantized in the one-hot dispatch alone.
    assert_close((grouped[0], grouped[1][0]), (einsum[0], einsum[1][0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", DELAYED)
def test_histories_over_devices_are_those_of_one_device(name):
    """Hidden units stay whole: a row of parts of them has a scale for each part."""
    target = target_of(data=2, expert=2)
    assert_close(first_step(DELAYED[name], target=target), first_step(DELAYED[name]))


def test_an_adapter_leaves_the_history_to_the_product_inside():
    (y, _), _, updates = first_step(LoRA.Config(rank=2, base=DELAYED["tensor"]))
    (other, _), _, others = first_step(
        LoRA.Config(rank=2, base=DELAYED["tensor"]), EinsumDispatch.Config()
    )
    assert set(updates) == {f"experts/{n}/dot/base/rhs_amax" for n in NAMES}
    assert_close((y, updates), (other, others))


# -- whole models ------------------------------------------------------------------------------


def recipe(name, **fields):
    made = QuantizeModifier.Config(recipe=name, **fields)
    return made.instantiate().recipe_config()


@pytest.mark.parametrize("name", ["int8-weights", "int4-weights", "int8-serving"])
@pytest.mark.slow
def test_a_quantized_mixture_decodes_what_it_computes_at_once(name):
    """Token by token few rows meet many experts, most of whose matrices are left alone."""
    cfg = experiments.get("qwen3-moe-test")
    cfg.model.decoder.num_layers = 2
    plain = cfg.copy().instantiate(name="trainer").model
    few = apply_modifier(cfg, recipe(name)).instantiate(name="trainer").model
    state, _ = quantize_state(plain, random_params(plain), few)
    prompt = [3, 1, 4, 1, 5]
    generator = Generator(few, state, max_seq_len=32)
    (made,) = generator.generate([prompt], 8).tokens
    ids = jnp.asarray([[*prompt, *made]], jnp.int32)
    logits, _ = functional(few, state=state, inputs=(ids,), is_training=False, method="logits")
    assert np.argmax(logits[0], axis=-1)[len(prompt) - 1 : -1].tolist() == made


def experiment(**fields):
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=8, seq_len=32, sample_prompt=None, evalers={}, **fields)
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    cfg.model.set(model_dim=32)
    cfg.model.decoder.layer.attention.set(num_heads=2)
    return apply_modifier(cfg, MoEModifier.Config(num_experts=8, top_k=2))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps."""
    out = tmp_path_factory.mktemp("experts") / "run"
    train(experiment(max_step=2), out=out, instance=resolve_instance("cpu"))
    return out


def bytes_of_experts(directory):
    flat = stack_form.flatten(load_model(directory).state)
    return sum(x.nbytes for path, x in flat.items() if "/experts/" in path)


@pytest.mark.slow
@pytest.mark.parametrize(
    # A quarter or an eighth of float32, scales (of 32 inputs at least) and biases.
    ("name", "share"),
    [("int8-weights", 0.30), ("fp8-weights", 0.30), ("int8-serving", 0.30), ("int4-weights", 0.18)],
)
def test_a_directory_of_a_mixture_is_written_small_and_read_again(run, name, share, tmp_path):
    out = tmp_path / "served"
    arguments = ["quantize", "--from", str(run), "--recipe", name, "--out", str(out)]
    assert main(arguments) == 0
    report = json.loads((out / "quantization.json").read_text())
    assert report["products"] == 2 * (4 + 2)
    assert bytes_of_experts(out) < share * bytes_of_experts(run)
    assert report["bytes_after"] < 0.35 * report["bytes_before"]
    assert report["max_abs_logit_difference"] < 0.2 * report["max_abs_logit"]
    assert main(["generate", "--from", str(out), "--prompt", "The ", "--max-tokens", "4"]) == 0


@pytest.mark.slow
def test_experts_stay_out_when_told_to(run, tmp_path):
    report = quantize_directory(run, [recipe("int8-weights", grouped=False)], tmp_path / "out")
    assert report["products"] == 2 * 4
    assert bytes_of_experts(tmp_path / "out") == bytes_of_experts(run)


@pytest.mark.slow
def test_experts_have_no_static_scales_and_may_have_a_recipe_of_their_own(run, tmp_path):
    data = tmp_path / "text.txt"
    data.write_text("Some text to calibrate with. " * 100)
    with pytest.raises(ConfigError, match="AX950"):
        quantize_directory(run, [recipe("int8-static")], tmp_path / "out", data=data)
    recipes = [
        recipe("int8-static", grouped=False),
        recipe("int8-serving", include="**/experts/*"),
    ]
    report = quantize_directory(run, recipes, tmp_path / "out", data=data)
    assert (report["products"], report["calibrated"]) == (12, 8)


@pytest.mark.slow
def test_what_is_stored_is_neither_a_plain_model_nor_quantized_again(run, tmp_path):
    served, machine = tmp_path / "served", resolve_instance("cpu")
    quantize_directory(run, [recipe("int8-weights", include="**/experts/*")], served)
    with pytest.raises(CheckpointError, match="is int8 there, float32 here") as error:
        train(experiment(max_step=2), out=tmp_path / "new", instance=machine, init_from=served)
    assert error.value.code == "AX606"
    with pytest.raises(CheckpointError, match="AX952"):
        other = recipe("int4-weights", override=True)
        quantize_directory(served, [other], tmp_path / "again")
    # The rest may follow, and what was stored before stays what it was.
    rest = recipe("int8-weights", exclude=("**/experts/*", "**/router/**"))
    quantize_directory(served, [rest], tmp_path / "whole")
    quantize_directory(run, [recipe("int8-weights")], tmp_path / "at_once")
    one, other = (load_model(tmp_path / name).state for name in ("whole", "at_once"))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_run_goes_on_beside_stored_experts(run, tmp_path):
    """What is not stored in few bits trains; gradients pass through what is."""
    quantize_directory(run, [recipe("int4-weights", include="**/experts/*")], tmp_path / "served")
    text = (tmp_path / "served" / "config.txt").read_text()
    cfg = Config.from_text(text, trusted=tuple(host().trusted_packages()))
    train(
        cfg,
        out=tmp_path / "on",
        instance=resolve_instance("cpu"),
        init_from=tmp_path / "served",
    )
    before, after = (
        stack_form.flatten(load_model(tmp_path / name).state) for name in ("served", "on")
    )
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert any("attention" in path for path in changed)
    assert not any("experts" in path and "bias" not in path for path in changed)


# -- training ----------------------------------------------------------------------------------

STEPS, LAST = 80, 10


def final_loss(name, out):
    cfg = experiment(max_step=STEPS)
    cfg.model.compute_dtype = "bfloat16"
    cfg = apply_modifier(cfg, QuantizeModifier.Config(recipe=name))
    model = cfg.copy().instantiate(name="trainer").model
    kinds = {type(s.module).__name__ for p, s in find_sites(model).items() if "/experts/" in p}
    train(cfg, out=out, instance=resolve_instance("cpu"))
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    return kinds, losses[0], sum(losses[-LAST:]) / LAST


@pytest.mark.slow
def test_a_mixture_trained_in_int8_ends_where_that_in_bfloat16_does(tmp_path):
    """Within a percent, as dense models are held to; more steps and seeds are in docs/moe.md."""
    plain, start, want = final_loss("none", tmp_path / "plain")
    few, _, got = final_loss("int8", tmp_path / "int8")
    assert (plain, few) == ({"DotGeneral"}, {"Int8Dot"})
    assert want < 0.75 * start  # it has learned something
    assert abs(got / want - 1) < 0.01
