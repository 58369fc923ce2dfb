"""Small models of every architecture, layers alone, and how tests run them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore import experiments, functional
from axcore.collection import OutputCollection, total_loss
from axcore.layers import SequenceInfo
from axcore.module import Module, ParameterSpec
from axcore.train import Trainer
from axlearn_moe import MoE

#: Compiling takes most of the time of a test.
IN_A_HURRY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: Decoder, encoder, encoder-decoder, vision transformer.
CATALOG = ("fuji-test-v3", "bert-test", "t5-test", "vit-test")


def small(name: str) -> Trainer.Config:
    """Returns an experiment with the stack's real form and few layers."""
    cfg = experiments.get(name)
    for part in ("decoder", "encoder"):
        if part in cfg.model.fields():
            getattr(cfg.model, part).num_layers = 2
    return cfg


def batch_of(name: str) -> dict[str, Any]:
    """Returns a batch of two rows, the second one with padding."""
    rng = np.random.default_rng(0)
    if name == "vit-test":
        images = rng.normal(size=(2, 16, 16, 1)).astype(np.float32)
        return {"images": images, "labels": np.array([1, 3], np.int32)}
    ids = rng.integers(1, 250, (2, 8)).astype(np.int32)
    segments = np.ones((2, 8), np.int32)
    segments[1, 5:] = 0
    batch: dict[str, Any] = {"input_ids": ids, "target_ids": ids, "target_mask": segments}
    if name == "t5-test":
        return {**batch, "source_ids": ids}
    return {**batch, "segment_ids": segments}


def training_step(model: Any) -> tuple[OutputCollection, Any]:
    """Returns the collection and the gradients of one training step from random weights."""
    params = model.initialize(jax.random.key(0))
    name = {"VisionTransformer": "vit-test", "EncoderDecoder": "t5-test"}.get(type(model).__name__)
    batch = batch_of(name or "")

    def loss(params: Any) -> Any:
        _, collection = functional(
            model, state=params, inputs=batch, key=jax.random.key(1), is_training=True
        )
        return total_loss(collection), collection

    grads, collection = jax.grad(loss, has_aux=True)(params)
    return collection, grads


def layer(**fields: Any) -> MoE.Config:
    """Returns a small layer's config."""
    return MoE.Config(**{"input_dim": 8, "num_experts": 4, "hidden_dim": 12, **fields})


def sequence_info(batch: int, seq: int, num_padding: int = 0) -> SequenceInfo:
    """Returns the info of rows whose last tokens are padding, of the last row twice as many."""
    segments = np.ones((batch, seq), np.int32)
    if num_padding:
        segments[:, seq - num_padding :] = 0
        segments[-1, max(0, seq - 2 * num_padding) :] = 0
    positions = np.broadcast_to(np.arange(seq), (batch, seq))
    ids = np.arange(batch * seq).reshape(batch, seq) * 7 % 31
    return SequenceInfo(
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(segments),
        token_values={"input_ids": jnp.asarray(ids, jnp.int32)},
    )


def inputs(batch: int, seq: int, dim: int = 8, seed: int = 0) -> jax.Array:
    """Returns normal inputs."""
    return jax.random.normal(jax.random.key(seed), (batch, seq, dim))


def random_params(module: Module, seed: int = 0) -> dict[str, Any]:
    """Returns normal parameters of about the size of trained ones; states are zero."""
    rng = np.random.default_rng(seed)

    def value(spec: ParameterSpec) -> jax.Array:
        scale = 0.0 if spec.kind == "state" else 0.4
        return jnp.asarray(scale * rng.normal(size=spec.shape), spec.dtype)

    return jax.tree.map(value, module.parameter_specs())


def weighted(y: jax.Array, info: SequenceInfo) -> jax.Array:
    """Returns a sum of results that treats no two alike and leaves padding out."""
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(y * weights * (info.segment_ids > 0)[..., None])


@functools.cache
def compiled_layer(text: str, shape: tuple[int, ...], is_training: bool) -> Any:
    cfg = MoE.Config.from_text(text, trusted=("axlearn_moe",))
    module = cfg.instantiate(name="layer")

    def scalar(params: Any, x: jax.Array, info: SequenceInfo) -> Any:
        y, collection = functional(
            module, state=params, inputs=(x, info), key=jax.random.key(9), is_training=is_training
        )
        return weighted(y, info) + total_loss(collection), (y, collection)

    params, x = random_params(module), jnp.zeros(shape)
    step = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))
    lowered = step.lower(params, x, sequence_info(*shape[:2]))
    return params, lowered.compile(compiler_options=IN_A_HURRY)


def run_layer(
    cfg: MoE.Config, x: jax.Array, info: SequenceInfo, *, is_training: bool = True
) -> tuple[jax.Array, OutputCollection, Any]:
    """Returns output, collection and gradients of (parameters, x), of random parameters."""
    params, run = compiled_layer(cfg.to_text(), x.shape, is_training)
    (_, (y, collection)), grads = run(params, x, info)
    return y, collection, grads


def assert_close(
    got: Any, expected: Any, tolerance: float = 1e-5, *, least_scale: float = 1e-2
) -> None:
    """Compares trees relative to each array's largest magnitude, or to ``least_scale``."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(float(np.max(np.abs(b), initial=0.0)), least_scale)
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)
