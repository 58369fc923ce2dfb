"""Sizes that do not divide: padded where that changes nothing, else refused with what would do."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from axcore.collection import total_loss
from axcore.context import functional
from axcore.errors import ShardingError
from axcore.layers import Attention, CausalLM, Decoder, Embedding, TransformerLayer
from axcore.parallel import MeshShape, ProgramTarget, ShardingRules, build_mesh

pytestmark = pytest.mark.xdist_group("ragged")
IN_A_HURRY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def model(*, vocab=32, multiple=1, heads=4, kv_heads=None, layers=2, dim=16):
    attention = Attention.Config(num_heads=heads, num_kv_heads=kv_heads, head_dim=4)
    return CausalLM.Config(
        vocab_size=vocab,
        max_seq_len=16,
        model_dim=dim,
        embedding=Embedding.Config(vocab_multiple_of=multiple),
        decoder=Decoder.Config(
            num_layers=layers, layer=TransformerLayer.Config(attention=attention)
        ),
    ).instantiate(name="model")


def target(rules=None, **sizes):
    num = int(np.prod(list(sizes.values()) or [1]))
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[:num])
    return ProgramTarget("cpu-8", "cpu", mesh, rules or ShardingRules())


def loss_of(lm, target):
    def loss(params, ids):
        inputs = (ids[:, :-1], ids[:, 1:])
        _, out = functional(lm, state=params, inputs=inputs, is_training=True, target=target)
        return total_loss(out)

    return loss


def shapes(lm, target, batch=4, seq=8):
    """Everything that a program of these sizes must say before it compiles."""
    target.shardings(lm.parameter_specs())
    params = jax.eval_shape(lm.initialize, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((batch, seq + 1), "int32")
    return jax.eval_shape(loss_of(lm, target), params, ids)


REFUSED = {
    "vocabulary": (
        lambda: shapes(model(vocab=30), target(model=4)),
        [
            "embedding/weight[vocab=30, embed=16]",
            "'vocab'",
            "of size 30",
            "4 parts (model=4)",
            "28 or 32",
            "vocab_multiple_of=4",
        ],
    ),
    "heads": (
        lambda: shapes(model(heads=6), target(model=4)),
        ["attention/output/weight", "'heads'", "of size 6", "4 parts (model=4)", "4 or 8"],
    ),
    "model dim": (
        lambda: shapes(model(dim=18), target(fsdp=4)),
        ["'embed'", "of size 18", "4 parts (fsdp=4)", "16 or 20"],
    ),
    "layers": (
        lambda: shapes(model(layers=3), target(pipeline=2)),
        ["'layers'", "of size 3", "2 parts (pipeline=2)", "2 or 4"],
    ),
    "batch": (
        lambda: shapes(model(), target(data=2, fsdp=2), batch=6),
        ["'batch'", "of size 6", "4 parts (data=2 x expert=1 x fsdp=2)", "4 or 8"],
    ),
    "sequence": (
        lambda: shapes(model(), target(seq=4), seq=10),
        ["'seq'", "of size 10", "4 parts (seq=4)", "8 or 12"],
    ),
    "positions between branches": (
        lambda: shapes(
            model(),
            target(ShardingRules(activation_rules={"residual_seq": ("seq", "model")}), model=4),
            seq=10,
        ),
        ["'residual_seq'", "of size 10", "4 parts (seq=1 x model=4)", "8 or 12"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(what):
    call, parts = REFUSED[what]
    with pytest.raises(ShardingError) as caught:
        call()
    error = caught.value
    assert error.code == "AX458"
    said = f"{error.message} {error.where} {error.hint}"
    assert [part for part in parts if part not in said] == [], said


def test_a_padded_vocabulary_and_few_key_value_heads_train_as_one_device_does():
    """30 tokens and two key/value heads over four devices."""
    ids = np.random.default_rng(0).integers(1, 30, (4, 9), dtype=np.int32)
    found = []
    for lm, at in (
        (model(vocab=30, kv_heads=2, layers=1), target()),
        (model(vocab=30, kv_heads=2, multiple=4, layers=1), target(model=4)),
    ):
        shardings = at.shardings(lm.parameter_specs())
        params = jax.device_put(lm.initialize(jax.random.key(0)), shardings)
        lowered = jax.jit(jax.value_and_grad(loss_of(lm, at))).lower(params, ids)
        found.append(lowered.compile(compiler_options=IN_A_HURRY)(params, ids))
    (loss, grads), (padded_loss, padded) = jax.device_get(found)
    # float32 sums in four parts.
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-5)
    weight = padded["embedding"].pop("weight")
    np.testing.assert_allclose(weight[:30], grads["embedding"].pop("weight"), rtol=1e-4, atol=1e-6)
    assert weight.shape == (32, 16) and not weight[30:].any()
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6),
        padded,
        grads,
    )
