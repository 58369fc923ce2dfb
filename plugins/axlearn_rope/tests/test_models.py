"""RoPE inside models: cached decode, packed documents, per-layer bases, the modifier, training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore import experiments, functional
from axcore.checkpoint.stack_form import restack
from axcore.collection import apply_state_updates, total_loss
from axcore.config import Config
from axcore.errors import ConfigError
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    LearnedPositions,
    QKNorm,
    QueryKeyChain,
    RepeatedTransformer,
    StackedTransformer,
    TransformerLayer,
    init_cache,
    merge_state,
)
from axcore.train.assemble import edited
from axlearn_rope import DynamicNTKScaling, LinearScaling, MultiAxis, RoPE, RoPEModifier

VOCAB, LAYERS = 40, 4


def layer(transform):
    return TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2, query_key_transform=transform)
    )


def model(layers, stack=None, num_layers=2):
    return CausalLM.Config(
        vocab_size=VOCAB,
        model_dim=32,
        max_seq_len=16,
        position=None,
        decoder=Decoder.Config(
            num_layers=num_layers, layer=layers, stack=stack or RepeatedTransformer.Config()
        ),
    )


def ids(batch=2, seq=12):
    return jax.random.randint(jax.random.key(1), (batch, seq), 0, VOCAB)


@functools.cache
def compiled(module, method):
    """Returns ``call(state, *inputs)``, which gives the result and the state after it."""

    @jax.jit
    def run(state, *inputs):
        call = dict(state=state, inputs=inputs, is_training=False, method=method)
        out, col = functional(module, **call)
        return out, apply_state_updates(state, col)

    return run


def logits(module, params, *inputs):
    return compiled(module, "logits")(params, *inputs)[0]


def test_cached_decode_equals_the_full_forward():
    """Prompts of several lengths; queries and keys are normalized first and a seq_len is fixed."""
    rope = RoPE.Config(rotary_fraction=0.5, scaling=DynamicNTKScaling(2.0, 4, seq_len=12))
    module = model(layer(QueryKeyChain.Config(transforms=(QKNorm.Config(), rope))))
    module = module.instantiate(name="m")
    params, tokens = module.initialize(jax.random.key(0)), ids()
    full = logits(module, params, tokens)
    lengths, at = np.array([3, 5]), np.arange(6)[None]
    positions = jnp.asarray(np.where(at < lengths[:, None], at, -1))
    state = merge_state(params, init_cache(module, 2, 16))
    out, state = compiled(module, "prefill")(state, tokens[:, :6], positions)
    row = np.arange(2)
    np.testing.assert_allclose(out, full[row, lengths - 1], rtol=1e-4, atol=1e-4)
    for i in range(7):
        now = lengths + i
        step = tokens[row, now][:, None], jnp.asarray(now[:, None])
        out, state = compiled(module, "decode")(state, *step)
        np.testing.assert_allclose(out, full[row, now], rtol=1e-4, atol=1e-4)


def test_cached_decode_on_several_axes_equals_the_full_forward():
    """Text, an image of 2 x 2 tokens, text: positions on the axes are not the cache's slots."""
    rope = RoPE.Config(axes=MultiAxis((2, 1, 1)))
    module = model(layer(rope), num_layers=1).instantiate(name="m")
    params, tokens = module.initialize(jax.random.key(0)), ids(batch=1, seq=9)
    text, image = [[i] * 3 for i in (0, 1)], [[2, 2 + i, 2 + j] for i in (0, 1) for j in (0, 1)]
    axes = jnp.asarray([[*text, *image, *[[i] * 3 for i in (4, 5, 6)]]])
    slots = jnp.arange(9)[None]

    @functools.partial(jax.jit, static_argnums=1)
    def run(state, first, tokens, slots, axes):
        values = {"rope_positions": axes}
        inputs = dict(input_ids=tokens, positions=slots, token_values=values)
        call = dict(state=state, inputs=inputs, is_training=False)
        if first is None:
            return functional(module, method="logits", **call)[0], state
        out, col = functional(module, method="prefill" if first else "decode", **call)
        return out, apply_state_updates(state, col)

    full, _ = run(params, None, tokens, slots, axes)
    plain, _ = run(params, None, tokens, slots, jnp.repeat(slots[..., None], 3, -1))
    assert np.abs(full - plain).max() > 1e-3
    state = merge_state(params, init_cache(module, 1, 16))
    for lo, hi in ((0, 5), (5, 7), (7, 9)):
        part = (x[:, lo:hi] for x in (tokens, slots, axes))
        out, state = run(state, lo == 0, *part)
        np.testing.assert_allclose(out, full[:, hi - 1], rtol=1e-4, atol=1e-4)


def test_packed_documents_equal_separate_ones():
    module = model(layer(RoPE.Config(base=100.0)), num_layers=1).instantiate(name="m")
    params, tokens = module.initialize(jax.random.key(0)), ids(batch=1)[0]
    segments = jnp.asarray([[1] * 5 + [2] * 7])
    positions = jnp.asarray([[*range(5), *range(7)]])
    packed = logits(module, params, tokens[None], segments, positions)[0]
    # Each document first in a row of its own; a causal model does not see what follows it.
    separate = logits(module, params, jnp.stack([tokens, jnp.roll(tokens, -5)]))
    np.testing.assert_allclose(packed[:5], separate[0, :5], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(packed[5:], separate[1, :7], rtol=1e-4, atol=1e-4)


def test_one_scanned_stack_of_differing_layers_equals_an_unrolled_period():
    """Local and global bases, scaling in global layers only, and a layer without positions."""
    local, wide = RoPE.Config(base=100.0), RoPE.Config(base=5000.0, scaling=LinearScaling(2.0))
    period = (layer(local), layer(None), layer(local), layer(wide))
    unrolled = model(period, StackedTransformer.Config(), LAYERS).instantiate(name="m")
    values = {
        "rope_base": (100.0, 100.0, 100.0, 5000.0),
        "rope_enabled": (1, 0, 1, 1),
        "rope_scaling_enabled": (0, 0, 0, 1),
    }
    one = RoPE.Config(scaling=LinearScaling(2.0))
    scanned = model(layer(one), RepeatedTransformer.Config(layer_values=values), LAYERS)
    scanned = scanned.instantiate(name="m")
    params = unrolled.initialize(jax.random.key(0))
    stacked = restack(params, scanned.parameter_specs())
    expected = logits(unrolled, params, ids())
    np.testing.assert_allclose(logits(scanned, stacked, ids()), expected, rtol=1e-4, atol=1e-4)
    # The values are what makes the layers differ.
    plain = model(layer(one), None, LAYERS).instantiate(name="m")
    assert np.abs(logits(plain, stacked, ids()) - expected).max() > 1e-2


def test_three_lines_give_rope_to_a_config_tree():
    cfg = experiments.get("tiny-lm")
    for attention in cfg.find(Attention.Config).values():
        attention.query_key_transform = RoPE.Config(base=500_000.0)
    same = edited(experiments.get("tiny-lm"), modifiers=["axlearn-rope:rope:base=500000"])
    assert same == cfg
    experiment = experiments.get("tiny-lm")
    experiment.modifiers = (RoPEModifier.Config(base=500_000.0),)
    assert edited(experiment) == cfg


def test_the_modifier_takes_a_scaling_and_reads_back():
    flag = (
        'axlearn-rope:rope:pairing=interleaved,scaling=data("axlearn_rope.LinearScaling", factor=8)'
    )
    cfg = edited(experiments.get("tiny-lm"), modifiers=[flag])
    (rope,) = cfg.find(RoPE.Config).values()
    assert rope == RoPE.Config(pairing="interleaved", scaling=LinearScaling(8.0))
    assert Config.from_text(cfg.to_text(), trusted=("axlearn_rope",)) == cfg


def test_the_modifier_keeps_what_transforms_queries_and_keys_already():
    cfg = model((layer(QKNorm.Config()), layer(RoPE.Config(rotary_fraction=0.5)), layer(None)))
    cfg = RoPEModifier.Config(base=50.0).instantiate()(cfg)
    transforms = [each.attention.query_key_transform for each in cfg.decoder.layer]
    chain = QueryKeyChain.Config(transforms=(QKNorm.Config(), RoPE.Config(base=50.0)))
    assert transforms == [
        chain,
        RoPE.Config(base=50.0, rotary_fraction=0.5),
        RoPE.Config(base=50.0),
    ]
    again = RoPEModifier.Config(base=60.0).instantiate()(cfg)
    assert [rope.base for rope in again.find(RoPE.Config).values()] == [60.0] * 3
    longer = QueryKeyChain.Config(transforms=(QKNorm.Config(), QKNorm.Config()))
    (made,) = (
        RoPEModifier.Config()
        .instantiate()(model(layer(longer)))
        .find(QueryKeyChain.Config)
        .values()
    )
    assert made.transforms == (*longer.transforms, RoPE.Config())


def test_the_modifier_removes_learned_positions_only_when_asked():
    for asked in (False, True):
        modifier = RoPEModifier.Config(remove_learned_positions=asked).instantiate()
        cfg = modifier(experiments.get("tiny-lm"))
        assert bool(cfg.find(LearnedPositions.Config)) is not asked


def test_the_modifier_takes_a_place_and_refuses_a_config_without_attention():
    cfg = model((layer(None), layer(None)))
    cfg = RoPEModifier.Config(where="decoder.layer.1.**").instantiate()(cfg)
    assert list(cfg.find(RoPE.Config)) == ["decoder.layer.1.attention.query_key_transform"]
    for where, refused in (("**", RoPE.Config()), ("encoder.**", cfg)):
        with pytest.raises(ConfigError, match="no attention with a query_key_transform"):
            RoPEModifier.Config(where=where).instantiate()(refused)


def test_a_model_trains_with_the_modifier():
    """tiny-lm's model learns a sequence that repeats, which needs positions."""
    flag = "axlearn-rope:rope:base=1000,remove_learned_positions=true"
    cfg = edited(experiments.get("tiny-lm"), modifiers=[flag]).model.set(max_seq_len=24)
    module = cfg.instantiate(name="model")
    params = module.initialize(jax.random.key(0))
    assert not any("rope" in name or "position" in name for name in _paths(params))
    tokens = jnp.tile(jax.random.randint(jax.random.key(1), (4, 8), 0, 264), (1, 3))
    optimizer = optax.adam(3e-3)

    def loss_of(params):
        inputs = tokens, jnp.roll(tokens, -1, axis=1)
        call = dict(state=params, inputs=inputs, key=jax.random.key(0), is_training=True)
        _, col = functional(module, **call)
        return total_loss(col)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(20):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[0] > 5 and losses[-1] < 0.5 * losses[0], losses


def _paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
