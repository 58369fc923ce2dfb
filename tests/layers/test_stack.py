"""Stacked and Repeated are two executions of one contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import current_context, functional
from axcore.checkpoint.stack_form import restack
from axcore.collection import apply_state_updates, total_loss
from axcore.errors import ModuleError
from axcore.layers import (
    Attention,
    BaseFeedForward,
    CausalLM,
    Decoder,
    Dropout,
    FeedForward,
    RepeatedTransformer,
    StackedTransformer,
    TransformerLayer,
    Zeros,
)
from axcore.module import ParameterSpec
from axcore.remat import Remat
from axcore.train.accumulation import loss_and_grads

FORMS = {"stacked": StackedTransformer, "repeated": RepeatedTransformer}


class Toy(BaseFeedForward):
    """A layer outside core that adds a loss, draws a key and keeps a max-reduced state."""

    class Config(BaseFeedForward.Config):
        inner: FeedForward.Config = FeedForward.Config()

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        self.inner = self._add_child("inner", cfg.inner, FeedForward, input_dim=cfg.input_dim)
        self._add_parameter("peak", ParameterSpec((), "float32", (), Zeros(), kind="state"))

    def forward(self, x, info):
        ctx = current_context()
        noise = jax.random.normal(ctx.key(), x.shape[:1])
        y = self.inner(x + 0.01 * noise[:, None, None], info)
        ctx.add_loss("toy", jnp.mean(jnp.square(y)), weight=0.1, num_items=x.shape[0])
        peak = jnp.max(jnp.abs(jax.lax.stop_gradient(y)))
        ctx.set_state("peak", jnp.maximum(ctx.state["peak"], peak), reduction="max")
        return y


def make(form, *, layer=None, num_layers=3, remat=None, prefix=(), **fields):
    layer = layer or TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), dropout=Dropout.Config(rate=0.1)
    )
    return CausalLM.Config(
        vocab_size=32,
        model_dim=16,
        max_seq_len=8,
        decoder=Decoder.Config(
            num_layers=num_layers,
            layer=layer,
            prefix=prefix,
            stack=FORMS[form].Config(remat=remat or Remat(), **fields),
        ),
    ).instantiate(name="m")


BATCH = dict(
    input_ids=np.arange(32, dtype=np.int32).reshape(4, 8) % 32,
    target_ids=np.arange(1, 33, dtype=np.int32).reshape(4, 8) % 32,
)
KEY = jax.random.key(7)


def train(module, state, batch=BATCH, **kwargs):
    """Returns (loss, grads by canonical path, collection written per layer)."""

    def losses(params, rows, key):
        return functional(module, state=params, inputs=rows, is_training=True, key=key)[1]

    run = jax.jit(lambda p: loss_and_grads(losses, p, batch, key=KEY, **kwargs))
    grads, collection = run(state)
    return total_loss(collection), grads, collection.expand()


@pytest.mark.parametrize(("period", "num_layers"), [(1, 2), (2, 3)])
def test_the_same_key_gives_bitwise_equal_parameters(period, num_layers):
    layers = tuple(
        TransformerLayer.Config(attention=Attention.Config(num_heads=2)) for _ in range(period)
    )
    stacked = make("stacked", layer=layers, num_layers=num_layers).initialize(KEY)
    repeated = make("repeated", layer=layers, num_layers=num_layers).initialize(KEY)
    jax.tree.map(np.testing.assert_array_equal, restack(repeated, stacked), stacked)
    query = [
        stacked["decoder"]["layer"][str(i)]["attention"]["qkv"]["query"]["weight"]
        for i in range(num_layers)
    ]
    assert not np.array_equal(query[0], query[1])


def test_rbg_keys_give_equal_parameters_too():
    key = jax.random.key(3, impl="rbg")
    stacked, repeated = make("stacked").initialize(key), make("repeated").initialize(key)
    jax.tree.map(np.testing.assert_array_equal, restack(repeated, stacked), stacked)


TOY_LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=2),
    feed_forward=Toy.Config(),
    dropout=Dropout.Config(rate=0.1),
)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("form", ["stacked", "repeated"])
def test_a_layer_outside_core_gives_equal_results_in_every_execution(form, remat):
    """Loss, gradients, dropout masks, auxiliary losses and state agree with the unrolled run."""
    plain = make("stacked", layer=TOY_LAYER)
    state = plain.initialize(KEY)
    loss, grads, col = train(plain, state)
    other = make(form, layer=TOY_LAYER, remat=Remat(policy=remat))
    other_state = restack(state, jax.eval_shape(other.initialize, KEY))
    other_loss, other_grads, other_col = train(other, other_state)
    # float32 sums in another order: 16 ulp of values near 1.
    np.testing.assert_allclose(other_loss, loss, rtol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6),
        restack(other_grads, grads),
        grads,
    )
    assert (
        set(other_col.losses)
        == set(col.losses)
        == {
            "cross_entropy",
            *(f"decoder/layer/{i}/feed_forward/toy" for i in range(3)),
        }
    )
    for path, entry in col.state_updates.items():
        np.testing.assert_allclose(other_col.state_updates[path].result(), entry.result(), 1e-5)


@pytest.mark.parametrize("form", ["stacked", "repeated"])
def test_microbatches_add_up_to_the_full_batch(form):
    """Without randomness: keys differ by microbatch, so dropout and noise are off."""
    layer = TOY_LAYER.copy().set(dropout=Dropout.Config(rate=0.0))
    module = make(form, layer=layer)
    state = module.initialize(KEY)

    class NoNoise(Toy):
        def forward(self, x, info):
            ctx = current_context()
            y = self.inner(x, info)
            ctx.add_loss("toy", jnp.mean(jnp.square(y)), weight=0.1, num_items=x.shape[0])
            peak = jnp.max(jnp.abs(jax.lax.stop_gradient(y)))
            ctx.set_state("peak", jnp.maximum(ctx.state["peak"], peak), reduction="max")
            return y

    layer.feed_forward = NoNoise.Config()
    module = make(form, layer=layer)
    mask = np.ones((4, 8), bool)
    mask[0, 3:], mask[1, :] = False, False  # microbatches of different token counts
    batch = {**BATCH, "target_mask": mask}
    loss, grads, col = train(module, state, batch)
    micro_loss, micro_grads, micro_col = train(module, state, batch, accumulation_steps=2)
    np.testing.assert_allclose(micro_loss, loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), micro_grads, grads
    )
    for path, entry in col.state_updates.items():
        np.testing.assert_allclose(micro_col.state_updates[path].result(), entry.result(), 1e-6)
    state = apply_state_updates(state, micro_col)


PREFIX = (
    TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), feed_forward=FeedForward.Config(hidden_dim=24)
    ),
)


def test_a_prefix_comes_first_and_counts_among_the_layers():
    layers = tuple(TransformerLayer.Config(attention=Attention.Config(num_heads=n)) for n in (2, 4))
    dims = dict(layer=layers, num_layers=6, prefix=PREFIX)
    stacked, repeated = (make(form, **dims) for form in ("stacked", "repeated"))
    assert list(repeated.decoder.layer.children) == ["0", "1:5:2", "2:5:2", "5"]
    state = stacked.initialize(KEY)
    scanned = repeated.initialize(KEY)
    jax.tree.map(np.testing.assert_array_equal, restack(scanned, state), state)
    layer = state["decoder"]["layer"]
    widths = [layer[str(i)]["feed_forward"]["up"]["weight"].shape[1] for i in range(6)]
    heads = [layer[str(i)]["attention"]["qkv"]["query"]["weight"].shape[1] for i in range(6)]
    assert (widths, heads) == ([24, *[64] * 5], [2, 2, 4, 2, 4, 2])
    found = {str(i): m.config_path for i, m in repeated.decoder.layer.children.items()}
    assert found["0"] == "decoder.prefix.0"
    assert found["2:5:2"] == "decoder.layer.1"


def test_layer_values_count_the_prefix_and_a_prefix_fits_into_the_stack():
    class Scale(BaseFeedForward):
        def forward(self, x, info):
            return x * info.layer_values["gain"]

    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), feed_forward=Scale.Config()
    )
    values = dict(layer_values={"gain": (0.5, 1.0, 2.0)}, prefix=(layer,))
    stacked, repeated = (make(f, layer=layer, **values) for f in ("stacked", "repeated"))
    state = stacked.initialize(KEY)
    got = train(repeated, restack(state, jax.eval_shape(repeated.initialize, KEY)))[0]
    np.testing.assert_allclose(got, train(stacked, state)[0], rtol=2e-6)
    with pytest.raises(ModuleError, match="AX343"):
        make("stacked", num_layers=2, prefix=PREFIX * 3)


def test_layer_values_are_scanned_arrays():
    class Scale(BaseFeedForward):
        def forward(self, x, info):
            return x * info.layer_values["gain"]

    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), feed_forward=Scale.Config()
    )
    values = dict(layer_values={"gain": (0.5, 1.0, 2.0)})
    stacked, repeated = (make(f, layer=layer, **values) for f in ("stacked", "repeated"))
    state = stacked.initialize(KEY)
    expected = train(stacked, state)[0]
    got = train(repeated, restack(state, jax.eval_shape(repeated.initialize, KEY)))[0]
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    other = make("stacked", layer=layer, layer_values={"gain": (2.5, 1.0, 2.0)})
    assert abs(train(other, state)[0] - expected) > 1e-4
    with pytest.raises(ModuleError, match="2 values for 3 layers"):
        make("stacked", layer=layer, layer_values={"gain": (1.0, 2.0)})


def test_compiled_depth_does_not_grow_the_scanned_program():
    def size(form, num_layers):
        module = make(form, num_layers=num_layers)
        state = jax.eval_shape(module.initialize, KEY)
        run = jax.jit(lambda p: functional(module, state=p, inputs=BATCH, is_training=False)[1])
        return len(run.lower(state).as_text().splitlines())

    assert size("repeated", 8) == size("repeated", 2)
    assert size("stacked", 8) > 2 * size("stacked", 2)


def test_a_scanned_template_cannot_be_called_outside_the_scan():
    class Peek(RepeatedTransformer):
        def forward(self, x, info):
            return self._templates[0](x, info)

    module = CausalLM.Config(
        vocab_size=32,
        model_dim=16,
        max_seq_len=8,
        decoder=Decoder.Config(
            num_layers=2,
            layer=TransformerLayer.Config(attention=Attention.Config(num_heads=2)),
            stack=Peek.Config(),
        ),
    ).instantiate(name="m")
    with pytest.raises(ModuleError, match="scan_layers"):
        functional(module, state=module.initialize(KEY), inputs=BATCH, is_training=False)


def test_a_shape_error_inside_a_scan_names_the_layer():
    class Bad(BaseFeedForward):
        def forward(self, x, info):
            return x @ jnp.ones((3, 3))

    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), feed_forward=Bad.Config()
    )
    module = make("repeated", layer=layer)
    with pytest.raises(TypeError) as caught:
        functional(module, state=module.initialize(KEY), inputs=BATCH, is_training=False)
    notes = "\n".join(caught.value.__notes__)
    assert "m.decoder.layer/0:3:1.feed_forward" in notes
    assert "config path: decoder.layer.feed_forward" in notes
