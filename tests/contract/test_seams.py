"""Features that a plugin outside core adds by configuration alone: layers, caches, axes, sites.

Each is compared with an independent computation: a numpy model, or another execution. The plugin is
``seams/seam_plugin``; kernels are in ``test_seams_kernels.py``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axcore import functional
from axcore.collection import apply_state_updates, total_loss
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    RepeatedTransformer,
    StackedTransformer,
    TransformerLayer,
    init_cache,
    merge_state,
)
from axcore.ops import Causal, DotGeneral, SlidingWindow
from axcore.parallel import (
    MeshShape,
    ProgramTarget,
    ShardingRules,
    batch_sharding,
    build_mesh,
    make_global_array,
)
from axcore.remat import Remat

VOCAB, DIM, SEQ = 32, 16, 8
KEY = jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """The plugin's folder is on the path while these tests run, and XLA compiles in a hurry."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "seams"))
        yield
        jax.config.update("jax_disable_most_optimizations", False)
        for name in [n for n in sys.modules if n.startswith("seam_")]:
            del sys.modules[name]


@pytest.fixture
def layers(_importable):
    return importlib.import_module("seam_plugin.layers")


@pytest.fixture
def oracle(_importable):
    return importlib.import_module("seam_oracle")


def lm(*, stack=StackedTransformer, num_layers=1, **stack_fields) -> CausalLM.Config:
    """A language model of core alone."""
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=4, num_kv_heads=2))
    return CausalLM.Config(
        vocab_size=VOCAB,
        model_dim=DIM,
        max_seq_len=SEQ,
        decoder=Decoder.Config(
            num_layers=num_layers, layer=layer, stack=stack.Config(**stack_fields)
        ),
    )


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, SEQ + 1), dtype=np.int32)
    return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}


def loss_of(model, params, rows, target=None):
    """The total training loss."""
    _, collection = functional(model, state=params, inputs=rows, is_training=True, target=target)
    return total_loss(collection)


def initialize(model):
    """Parameters so large that what attention does shows in the loss."""
    draw = np.random.default_rng(1).normal
    shapes = jax.eval_shape(model.initialize, KEY)
    return jax.tree.map(lambda s: (0.2 * draw(size=s.shape) + (s.ndim == 1)).astype("f4"), shapes)


def train(model, *, steps=3):
    """Returns the losses before each step of descent, and the parameters before the last one."""
    loss_and_grads = jax.jit(jax.value_and_grad(lambda p: loss_of(model, p, batch())))
    params, losses = initialize(model), []
    while True:
        loss, grads = loss_and_grads(params)
        losses.append(float(loss))
        if len(losses) == steps:
            break
        params = jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), params, grads)
    assert losses[-1] < losses[0]
    return losses, params


def full_logits(model, params, ids, positions=None):
    inputs = {"input_ids": ids, "positions": positions}

    def run(params, inputs):
        return functional(model, state=params, inputs=inputs, is_training=False, method="logits")[0]

    return jax.jit(run)(params, inputs)


def decoded_logits(model, params, ids, *, prompt):
    """Logits of positions ``prompt - 1`` and on, through prefill and cached decode."""
    rows, length = ids.shape

    @functools.partial(jax.jit, static_argnames="method")
    def run(state, ids, positions, method):
        logits, collection = functional(
            model, state=state, inputs=(ids, positions), is_training=False, method=method
        )
        return logits, apply_state_updates(state, collection)

    state = merge_state(params, init_cache(model, rows, length))
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    out = []
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, length))]:
        method = "decode" if start else "prefill"
        logits, state = run(state, ids[:, start:stop], positions[:, start:stop], method)
        out.append(logits)
    return np.stack(out, axis=1), state


# -- a contraction ---------------------------------------------------------------------------


def _int_dot(bits):
    """Integer arithmetic in numpy: what an ``Int8Dot`` computes."""
    top = 2 ** (bits - 1) - 1

    def dot(spec, a, b):
        scales = [np.abs(x).max() / top for x in (a, b)]
        ints = [np.rint(x / s).astype(np.int64) for x, s in zip((a, b), scales, strict=True)]
        return np.einsum(spec, *ints) * scales[0] * scales[1]

    return dot


@pytest.mark.parametrize("bits", [8, 4])
def test_a_replaced_contraction_computes_every_product_of_the_model(layers, oracle, bits):
    cfg = lm()
    cfg.replace(DotGeneral.Config, layers.Int8Dot.Config(bits=bits))
    assert not any(type(node) is DotGeneral.Config for _, node in cfg.walk())
    losses, params = train(cfg.instantiate(name="m"))
    expected = oracle.loss(params, batch(), dot=_int_dot(bits))
    # One activation that float32 rounds to the other neighbour moves the loss by about 1e-5.
    np.testing.assert_allclose(losses[-1], expected, rtol=1e-4)
    if bits == 4:  # and the figure tells quantized from plain
        assert abs(oracle.loss(params, batch()) / expected - 1) > 1e-3


def test_a_replaced_contraction_is_used_in_decoding_too(layers):
    """Beside each plain product, which gives the gradient, the program has one of integers."""
    cfg = lm(stack=RepeatedTransformer, num_layers=2)
    cfg.replace(DotGeneral.Config, layers.Int8Dot.Config())
    model = cfg.instantiate(name="m")
    state = merge_state(initialize(model), init_cache(model, 2, SEQ))
    ids = np.zeros((2, 1), np.int32)

    def decode(state):
        return functional(model, state=state, inputs=(ids, ids), is_training=False, method="decode")

    text = str(jax.make_jaxpr(decode)(state))
    products = [line for line in text.splitlines() if "dot_general[" in line]
    ints = [line for line in products if ":i32[" in line]
    # query, key, value, logits, values, output, up, down in the scanned layer; then the head
    assert len(ints) == 9 and len(products) == 18


# -- a transform of queries and keys ---------------------------------------------------------


def _rotary(layers, **kwargs):
    cfg = lm(**kwargs).set(position=None)
    cfg.decoder.layer.attention.query_key_transform = layers.Rotary.Config()
    return cfg.instantiate(name="m")


def _rotate(base=100.0):
    """Rotary embedding as multiplication of complex numbers."""

    def rotate(x):
        half = x.shape[-1] // 2
        rates = base ** (-np.arange(half) / half)
        turns = np.exp(1j * np.arange(x.shape[1])[None, :, None, None] * rates)
        turned = (x[..., :half] + 1j * x[..., half:]) * turns
        return np.concatenate([turned.real, turned.imag], axis=-1)

    return rotate


def test_a_query_key_transform_is_that_of_the_formula(layers, oracle):
    model = _rotary(layers)
    losses, params = train(model)
    expected = oracle.loss(params, batch(), rotate=_rotate())
    np.testing.assert_allclose(losses[-1], expected, rtol=1e-5)
    assert abs(oracle.loss(params, batch()) - expected) > 1e-4


def test_a_query_key_transform_receives_positions(layers):
    """Rotary attention knows relative positions only: moving all of a row changes nothing."""
    model = _rotary(layers)
    params, ids, row = initialize(model), batch()["input_ids"], np.arange(SEQ, dtype=np.int32)
    here, moved, spread = (
        full_logits(model, params, ids, np.tile(p, (len(ids), 1))) for p in (row, row + 11, row * 2)
    )
    np.testing.assert_allclose(moved, here, rtol=1e-4, atol=1e-4)
    assert np.abs(spread - here).max() > 1e-2


def test_a_query_key_transform_works_through_the_cache(layers):
    model = _rotary(layers, stack=RepeatedTransformer, num_layers=2)
    params, ids = initialize(model), batch()["input_ids"]
    logits, _ = decoded_logits(model, params, ids, prompt=3)
    np.testing.assert_allclose(logits, full_logits(model, params, ids)[:, 2:], rtol=1e-4, atol=1e-5)


# -- a kind of cache -------------------------------------------------------------------------

WINDOW = 3


def _windowed(layers, **kwargs):
    cfg = lm(**kwargs)
    cfg.decoder.layer.attention.set(
        mask=Causal() & SlidingWindow(WINDOW - 1), kv_cache=layers.RingCache.Config(window=WINDOW)
    )
    return cfg.instantiate(name="m")


@pytest.mark.parametrize("prompt", [1, 2, 6])
def test_a_ring_cache_decodes_like_the_full_forward(layers, prompt):
    model = _windowed(layers, stack=RepeatedTransformer, num_layers=2)
    params, ids = initialize(model), batch()["input_ids"]
    logits, state = decoded_logits(model, params, ids, prompt=prompt)
    expected = full_logits(model, params, ids)[:, prompt - 1 :]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    cache = state["decoder"]["layer"]["0:2:1"]["attention"]["kv_cache"]
    assert cache["key"].shape == (2, 4, WINDOW, 2, 4)  # layers, rows, slots, kv heads, head_dim


def test_the_masked_model_is_that_of_the_formula(layers, oracle):
    model = _windowed(layers)
    params, ids = initialize(model), batch()["input_ids"]
    np.testing.assert_allclose(
        full_logits(model, params, ids),
        oracle.logits(params, ids, window=WINDOW),
        rtol=1e-4,
        atol=1e-4,
    )


# -- a logical axis --------------------------------------------------------------------------


WIDE = 48


def _wide_feed_forward(x, p, dot):
    h = np.tanh(dot("btd,dm->btm", x, p["up"]["weight"]) + p["up"]["bias"])
    return dot("btm,md->btd", np.sin(h), p["down"]["weight"]) + p["down"]["bias"]


def _wide(layers, **kwargs):
    cfg = lm(**kwargs)
    cfg.decoder.layer.feed_forward = layers.Wide.Config(hidden_dim=WIDE)
    return cfg.instantiate(name="m")


def _shards(model, rules=None):
    mesh = build_mesh(MeshShape(data=2, fsdp=2, model=2), jax.devices()[:8])
    target = ProgramTarget("cpu-8", "cpu", mesh, rules or ShardingRules())
    return target, target.shardings(model.parameter_specs())


def test_a_new_axis_goes_where_its_parent_goes(layers, oracle):
    model = _wide(layers)
    losses, params = train(model)
    expected = oracle.loss(params, batch(), feed_forward=_wide_feed_forward)
    np.testing.assert_allclose(losses[-1], expected, rtol=1e-5)

    target, shardings = _shards(model)
    up = shardings["decoder"]["layer"]["0"]["feed_forward"]["up"]["weight"]
    assert up.spec == PartitionSpec("fsdp", "model")
    placed = jax.device_put(params, shardings)
    weight = placed["decoder"]["layer"]["0"]["feed_forward"]["up"]["weight"]
    assert weight.addressable_shards[0].data.shape == (DIM // 2, WIDE // 2)
    rows = batch_sharding(target.mesh, target.rules)
    arrays = {k: make_global_array(v, rows, v.shape) for k, v in batch().items()}
    sharded = jax.jit(lambda p, b: loss_of(model, p, b, target))(placed, arrays)
    np.testing.assert_allclose(float(sharded), expected, rtol=1e-5)


def test_a_table_may_name_the_new_axis_alone(layers):
    rules = ShardingRules(param_rules={"wide_mlp": ()})
    model = _wide(layers)
    layer = _shards(model, rules)[1]["decoder"]["layer"]["0"]
    assert layer["feed_forward"]["up"]["weight"].spec == PartitionSpec("fsdp", None)
    heads = layer["attention"]["qkv"]["query"]["weight"].spec
    assert heads == PartitionSpec("fsdp", "model", None)


# -- a remat site ----------------------------------------------------------------------------


def _saved(model, params, capsys):
    """What the backward pass keeps, one line per array, by JAX's own report."""
    rows = batch()
    jax.ad_checkpoint.print_saved_residuals(lambda p: loss_of(model, p, rows), params)
    return capsys.readouterr().out


def test_a_declared_site_is_saved_when_a_policy_names_it(layers, capsys):
    def make(*save):
        return _wide(layers, remat=Remat(policy="sites", save=save))

    params = initialize(make())
    without, with_site = (_saved(make(*save), params, capsys) for save in ((), ("wide_hidden",)))
    shape = f"f32[4,{SEQ},{WIDE}]"
    assert shape not in without
    assert with_site.count(f"{shape} named 'wide_hidden'") == 1
    grads = [
        jax.jit(jax.grad(lambda p, m=model: loss_of(m, p, batch())))(params)
        for model in (_wide(layers), make("wide_hidden"))
    ]
    # Recomputing in another fusion rounds differently: float32, and some of the sums cancel.
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest), *grads
    )
