"""The text encoder and the image classifier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.collection import total_loss
from axcore.errors import ModuleError
from axcore.layers import (
    Attention,
    Embedding,
    Encoder,
    EncoderModel,
    HeadTransform,
    LMHead,
    MeanPooler,
    PatchEmbedding,
    StackedTransformer,
    TransformerLayer,
    VisionTransformer,
)
from axcore.ops import Causal, Full

LAYER = TransformerLayer.Config(attention=Attention.Config(num_heads=2, mask=Full()))
RNG = np.random.default_rng(0)


def drawn(module):
    return jax.tree.map(
        lambda spec: RNG.normal(0, 0.4, spec.shape).astype(np.float32), module.parameter_specs()
    )


@pytest.fixture(scope="module")
def text():
    module = EncoderModel.Config(
        vocab_size=20,
        model_dim=8,
        max_seq_len=6,
        num_token_types=2,
        embedding=Embedding.Config(head_bias=True),
        encoder=Encoder.Config(num_layers=2, layer=LAYER),
        pooler=MeanPooler.Config(normalize=True),
        head_transform=HeadTransform.Config(),
    ).instantiate(name="m")
    return module, drawn(module)


def call(module, state, method="forward", **inputs):
    run = jax.jit(
        lambda s, i: functional(module, state=s, inputs=i, is_training=False, method=method)
    )
    return run(state, inputs)


def test_an_encoder_refuses_a_causal_mask_that_nobody_stated():
    def make(**fields):
        layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2, **fields))
        return Encoder.Config(input_dim=8, num_layers=1, layer=layer).instantiate(name="m")

    with pytest.raises(ModuleError, match="attention of an encoder's layer has the default mask"):
        make()
    make(mask=Causal())
    make(mask=Full())


def test_an_encoder_sees_both_ways_but_no_padding(text):
    module, state = text
    ids = RNG.integers(0, 20, (1, 6)).astype(np.int32)
    padding = np.array([[1, 1, 1, 1, 0, 0]], np.int32)
    hidden = call(module, state, "hidden", input_ids=ids, segment_ids=padding)[0]
    for changed, seen in ((3, True), (4, False)):
        other = ids.copy()
        other[0, changed] = (other[0, changed] + 1) % 20
        again = call(module, state, "hidden", input_ids=other, segment_ids=padding)[0]
        assert (np.abs(again - hidden)[0, 0].max() > 1e-4) == seen


def test_the_masked_loss_counts_masked_tokens_only(text):
    module, state = text
    ids, targets = RNG.integers(0, 20, (2, 2, 6)).astype(np.int32)
    mask = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)
    types = np.array([[0, 0, 1, 1, 1, 1]] * 2, np.int32)
    logits = call(module, state, "logits", input_ids=ids, token_types=types)[0]
    log_p = jax.nn.log_softmax(logits)
    nll = -np.take_along_axis(np.asarray(log_p), targets[..., None], -1)[..., 0]
    inputs = dict(input_ids=ids, target_ids=targets, target_mask=mask, token_types=types)
    _, col = call(module, state, **inputs)
    np.testing.assert_allclose(total_loss(col), nll[mask].mean(), rtol=1e-5)
    hits = (np.argmax(logits, -1) == targets)[mask].mean()
    np.testing.assert_allclose(col.summaries["accuracy"].result(), hits, rtol=1e-6)


def test_the_mean_pooler_leaves_padding_out_and_normalizes(text):
    module, state = text
    ids = RNG.integers(0, 20, (2, 6)).astype(np.int32)
    padding = np.array([[1, 1, 1, 1, 0, 0], [0] * 6], np.int32)
    hidden = call(module, state, "hidden", input_ids=ids, segment_ids=padding)[0]
    pooled = call(module, state, "pooled", input_ids=ids, segment_ids=padding)[0]
    mean = np.asarray(hidden)[0, :4].mean(0)
    np.testing.assert_allclose(pooled[0], mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(pooled[1], 0.0)


@pytest.mark.parametrize("head", ["tied", "own"])
def test_the_bias_of_a_head_is_in_logits_and_loss(head):
    """The loss has the bias as one more dim; the logits add it."""
    if head == "tied":
        cfg = Embedding.Config(head_bias=True, head_scale=0.5)
    else:
        cfg = LMHead.Config(bias=True)
    module = cfg.set(vocab_size=9, input_dim=4).instantiate(name="m")
    state = drawn(module)
    h, targets = RNG.normal(size=(2, 3, 4)).astype(np.float32), np.array([[1, 8, 3], [0, 2, 2]])
    if head == "tied":
        expected = 0.5 * h @ state["weight"].T + state["head_bias"]
    else:
        expected = h @ state["weight"] + state["bias"]
    logits = call(module, state, "logits", hidden=h)[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)

    def losses(state):
        inputs = dict(hidden=h, targets=targets)
        out, _ = functional(
            module, state=state, inputs=inputs, is_training=False, method="cross_entropy"
        )
        return jnp.sum(out.loss)

    def plain(state):
        out, _ = functional(module, state=state, inputs=(h,), is_training=False, method="logits")
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(out), targets[..., None], -1))

    got, expected = (jax.jit(jax.value_and_grad(f))(state) for f in (losses, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_patches_are_cut_row_by_row():
    module = PatchEmbedding.Config(patch_size=2, num_channels=3, output_dim=5).instantiate(name="m")
    state = drawn(module)
    images = RNG.normal(size=(2, 4, 6, 3)).astype(np.float32)
    got = call(module, state, images=images)[0]
    w, b = state["projection"]["weight"], state["projection"]["bias"]
    for i, (row, column) in enumerate(np.ndindex(2, 3)):
        patch = images[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        expected = np.einsum("bhwc,hwcd->bd", patch, w) + b
        np.testing.assert_allclose(got[:, i], expected, rtol=1e-4, atol=1e-5)


def test_an_image_classifier_learns():
    """Which half of an image is brighter, from 32 images; chance is a loss of 0.69."""
    module = VisionTransformer.Config(
        model_dim=8,
        image_size=(4, 8),
        patch_size=4,
        num_channels=1,
        num_classes=2,
        encoder=Encoder.Config(num_layers=1, layer=LAYER, stack=StackedTransformer.Config()),
    ).instantiate(name="m")
    rng = np.random.default_rng(1)
    images = rng.normal(size=(32, 4, 8, 1)).astype(np.float32)
    labels = (images[:, :, :4].mean((1, 2, 3)) > images[:, :, 4:].mean((1, 2, 3))).astype(np.int32)
    mask = np.arange(32) < 30

    def loss(state):
        inputs = dict(images=images, labels=labels, label_mask=mask)
        _, col = functional(module, state=state, inputs=inputs, is_training=True)
        return total_loss(col), col.summaries["accuracy"].result()

    @jax.jit
    def step(state):
        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(state)
        return value, accuracy, jax.tree.map(lambda p, g: p - 0.4 * g, state, grads)

    state = module.initialize(jax.random.key(0))
    for _ in range(40):
        value, accuracy, state = step(state)
    assert value < 0.2
    assert accuracy > 0.95


def test_what_a_model_has_not_is_said():
    module = EncoderModel.Config(
        vocab_size=4, model_dim=8, max_seq_len=4, encoder=Encoder.Config(num_layers=1, layer=LAYER)
    ).instantiate(name="m")
    state, ids = drawn(module), np.zeros((1, 2), np.int32)
    with pytest.raises(ModuleError, match="has no pooler"):
        call(module, state, "pooled", input_ids=ids)
    with pytest.raises(ModuleError, match="num_token_types is 0"):
        call(module, state, "hidden", input_ids=ids, token_types=ids)
    vit = VisionTransformer.Config(model_dim=8, patch_size=3, image_size=8)
    with pytest.raises(ModuleError, match="8 x 8 does not cut into patches of 3"):
        vit.copy().instantiate(name="m")
    vit = vit.set(patch_size=4, encoder=Encoder.Config(num_layers=1, layer=LAYER))
    module = vit.instantiate(name="m")
    with pytest.raises(ModuleError, match="has no classifier"):
        call(module, drawn(module), "logits", images=np.zeros((1, 8, 8, 3), np.float32))
    with pytest.raises(ModuleError, match=r"\(1, 3, 8, 8\) do not cut into patches of 4 x 4"):
        call(module, drawn(module), "hidden", images=np.zeros((1, 3, 8, 8), np.float32))
