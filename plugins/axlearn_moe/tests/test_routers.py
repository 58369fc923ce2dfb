"""Each router against its definition, written out token by token in numpy."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import inputs, layer, random_params, sequence_info

from axcore import functional
from axcore.errors import ModuleError
from axlearn_moe import (
    ExpertChoiceRouter,
    HashRouter,
    Top2RandomRouter,
    TopKRouter,
    _routing,
)

BATCH, SEQ, DIM, EXPERTS = 2, 6, 8, 8


def route(cfg, *, top_k=2, is_training=False, state=None, capacity_factor=None, padding=1):
    cfg = cfg.copy().set(input_dim=DIM, num_experts=EXPERTS, top_k=top_k)
    cfg.capacity_factor = capacity_factor
    router = cfg.instantiate(name="router")
    params = {**random_params(router), **(state or {})}
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, padding)
    real = info.segment_ids > 0
    routing, collection = functional(
        router,
        state=params,
        inputs=(x, real, info),
        key=jax.random.key(5),
        is_training=is_training,
    )
    numpy_params = {n: np.asarray(p, np.float64) for n, p in params.items()}
    return routing, collection, np.asarray(x, np.float64), numpy_params, np.asarray(real)


def softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def best(scores, k):
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


def compare(routing, real, expected):
    """Compares with ``expected(b, s) -> {expert: gate}``."""
    for b in range(BATCH):
        for s in range(SEQ):
            valid = np.asarray(routing.valid[b, s])
            got = {
                int(e): float(g)
                for e, g, v in zip(routing.experts[b, s], routing.gates[b, s], valid, strict=True)
                if v
            }
            want = expected(b, s) if real[b, s] else {}
            assert got.keys() == want.keys(), (b, s)
            for e, gate in want.items():
                assert got[e] == pytest.approx(gate, abs=1e-5)


@pytest.mark.parametrize(
    ("top_k", "normalize", "scale"), [(2, None, 1.0), (3, False, 2.5), (1, None, 1.0)]
)
def test_softmax_top_k(top_k, normalize, scale):
    cfg = TopKRouter.Config(normalize=normalize, scale=scale)
    routing, _, x, params, real = route(cfg, top_k=top_k)

    def expected(b, s):
        p = softmax(x[b, s] @ params["weight"])
        chosen = best(p, top_k)
        # One expert's weight is its probability, as in the Switch Transformer.
        total = sum(p[e] for e in chosen) if top_k > 1 and normalize is not False else 1.0
        return {e: scale * p[e] / total for e in chosen}

    compare(routing, real, expected)


def test_softmax_over_the_chosen_logits_with_bias():
    """GPT-OSS writes it so; it is the softmax over all, made to sum to 1."""
    bias = jnp.linspace(-2, 2, EXPERTS)
    routing, _, x, params, real = route(TopKRouter.Config(bias=True), state={"bias": bias})

    def expected(b, s):
        logits = x[b, s] @ params["weight"] + params["bias"]
        chosen = best(logits, 2)
        return dict(zip(chosen, softmax(logits[chosen]), strict=True))

    compare(routing, real, expected)


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_sigmoid_top_k_within_groups_with_choice_bias(group_score):
    bias = jnp.array([0.3, -0.4, 0.0, 0.1, -0.2, 0.5, 0.0, -0.1])
    cfg = TopKRouter.Config(
        score="sigmoid",
        num_groups=4,
        num_chosen_groups=2,
        group_score=group_score,
        choice_bias=True,
        scale=2.5,
    )
    routing, _, x, params, real = route(cfg, top_k=3, state={"choice_bias": bias})

    def expected(b, s):
        scores = sigmoid(x[b, s] @ params["weight"])
        choice = scores + params["choice_bias"]
        groups = [choice[2 * g : 2 * g + 2] for g in range(4)]
        of_group = [g.max() if group_score == "max" else g.sum() for g in groups]
        allowed = [e for g in best(of_group, 2) for e in (2 * g, 2 * g + 1)]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:3]
        total = sum(scores[e] for e in chosen)
        return {e: 2.5 * scores[e] / total for e in chosen}

    compare(routing, real, expected)


def test_top_2_takes_the_second_with_twice_its_weight():
    always, _, x, params, real = route(Top2RandomRouter.Config())

    def both(b, s):
        p = softmax(x[b, s] @ params["weight"])
        first, second = best(p, 2)
        total = p[first] + p[second]
        return {first: p[first] / total, second: p[second] / total}

    compare(always, real, both)
    cfg = Top2RandomRouter.Config().set(input_dim=DIM, num_experts=2, top_k=2)
    router = cfg.instantiate(name="router")
    weight = jnp.zeros((DIM, 2)).at[0].set(jnp.array([1.0, 0.0]))
    x = jnp.zeros((1, 4000, DIM)).at[..., 0].set(1.5)
    routing, _ = functional(
        router,
        state={"weight": weight},
        inputs=(x, jnp.ones((1, 4000), bool), sequence_info(1, 4000)),
        key=jax.random.key(0),
        is_training=True,
    )
    assert routing.valid[..., 0].all()
    second = sigmoid(-1.5)  # 0.18, so it is taken 0.36 of the time
    # Three standard deviations of 4000 draws.
    assert float(routing.valid[..., 1].mean()) == pytest.approx(2 * second, abs=0.023)


def test_experts_choose_their_best_tokens():
    routing, _, x, params, real = route(ExpertChoiceRouter.Config(), capacity_factor=2.0)
    capacity = 3  # 6 tokens x 2 / 8 experts x 2
    assert routing.experts.shape == (BATCH, EXPERTS, capacity)
    for b in range(BATCH):
        p = np.stack([softmax(row @ params["weight"]) for row in x[b]])
        tokens = [s for s in range(SEQ) if real[b, s]]
        for e in range(EXPERTS):
            want = sorted(tokens, key=lambda s, e=e: -p[s, e])[:capacity]
            assert [int(t) for t in routing.tokens[b, e]] == want
            np.testing.assert_allclose(routing.gates[b, e], [p[s, e] for s in want], atol=1e-5)


def test_an_expert_does_not_choose_padding():
    routing, *_, real = route(ExpertChoiceRouter.Config(), capacity_factor=8.0, padding=2)
    tokens, valid = np.asarray(routing.tokens), np.asarray(routing.valid)
    assert valid.sum() == EXPERTS * real.sum()  # all that are no padding
    for b in range(BATCH):
        assert real[b][tokens[b][valid[b]]].all()


def test_decoding_says_that_experts_have_nothing_to_choose_among(caplog):
    cfg = ExpertChoiceRouter.Config().set(input_dim=DIM, num_experts=EXPERTS, top_k=2)
    router = cfg.instantiate(name="router")
    info = dataclasses.replace(sequence_info(1, 1), purpose="decode")
    with caplog.at_level(logging.WARNING, logger="axcore.moe"):
        functional(
            router,
            state=random_params(router),
            inputs=(inputs(1, 1), jnp.ones((1, 1), bool), info),
            is_training=False,
        )
    assert "what is generated is not what was trained" in caplog.text


def test_a_hash_depends_on_the_id_alone():
    routing, *_, real = route(HashRouter.Config(), top_k=2)
    ids = np.asarray(sequence_info(BATCH, SEQ, 1).token_values["input_ids"])
    by_id: dict[int, tuple[int, ...]] = {}
    for b in range(BATCH):
        for s in range(SEQ):
            experts = tuple(int(e) for e in routing.experts[b, s])
            assert by_id.setdefault(int(ids[b, s]), experts) == experts
            assert len(set(experts)) == 2
    np.testing.assert_allclose(routing.gates, np.where(real[..., None], [0.5, 0.5], 0))
    assert len({experts[0] for experts in by_id.values()}) > 3  # spread


def test_a_hash_without_ids_is_refused():
    router = HashRouter.Config(input_dim=8, num_experts=4, top_k=1).instantiate(name="router")
    info = sequence_info(1, 2)
    info = type(info)(info.positions)
    with pytest.raises(ModuleError, match="AX915"):
        functional(router, state={}, inputs=(inputs(1, 2), None, info), is_training=False)


def test_the_router_is_float32_in_a_bfloat16_model():
    cfg = TopKRouter.Config(input_dim=8, num_experts=4, top_k=2)
    cfg.set(param_dtype="bfloat16", compute_dtype="bfloat16", reduce_dtype="bfloat16")
    router = cfg.instantiate(name="router")
    params = random_params(router)
    x = inputs(1, 3).astype(jnp.bfloat16)
    info = sequence_info(1, 3)
    routing, _ = functional(
        router, state=params, inputs=(x, info.segment_ids > 0, info), is_training=False
    )
    assert routing.logits.dtype == routing.gates.dtype == jnp.float32
    exact = np.asarray(x, np.float32) @ np.asarray(params["weight"], np.float32)
    np.testing.assert_allclose(routing.logits, exact, rtol=1e-5, atol=1e-6)


def test_jitter_is_noise_in_training_only():
    still, *_ = route(TopKRouter.Config(jitter=0.1))
    quiet, *_ = route(TopKRouter.Config())
    noisy, *_ = route(TopKRouter.Config(jitter=0.1), is_training=True)
    np.testing.assert_array_equal(still.logits, quiet.logits)
    assert 0 < np.abs(noisy.logits - quiet.logits).max() < 3


@pytest.mark.parametrize(
    ("fields", "router", "code", "part"),
    [
        ({"top_k": 5}, TopKRouter.Config(), "AX910", "nearest: top_k=4, or num_experts=5"),
        ({"top_k": 0}, TopKRouter.Config(), "AX910", "top_k=1"),
        ({"top_k": 1}, Top2RandomRouter.Config(), "AX910", "expected 2"),
        ({"capacity_factor": 0.0}, TopKRouter.Config(), "AX912", "1.25"),
        ({}, TopKRouter.Config(num_groups=3), "AX913", "2 or 4 groups"),
        ({}, TopKRouter.Config(num_groups=4), "AX913", "2 to 4"),
        ({}, TopKRouter.Config(jitter=1.0), "AX918", "jitter"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest(fields, router, code, part):
    with pytest.raises(ModuleError, match=code) as raised:
        layer(router=router, **fields).instantiate(name="layer")
    assert part in str(raised.value)


def test_the_best_are_those_of_top_k_ties_included():
    scores = np.random.default_rng(0).integers(0, 4, size=(50, 9)).astype(np.float32)
    scores[::7, 2] = -np.inf
    expected = jax.lax.top_k(jnp.asarray(scores), 3)[1]
    np.testing.assert_array_equal(_routing.best(jnp.asarray(scores), 3), expected)


def test_a_score_that_is_no_number_gives_an_expert_that_exists():
    scores = jnp.full((2, 4), jnp.nan)
    assert np.all(np.asarray(_routing.best(scores, 2)) < 4)
