"""One snippet puts experts into any architecture, and a modifier does the same by name."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from models_for_moe_tests import CATALOG, small, training_step

from axcore import experiments
from axcore.collection import total_loss
from axcore.errors import ConfigError, ModuleError
from axcore.layers import FeedForward
from axcore.train.assemble import parse_modifier
from axlearn_moe import EinsumDispatch, HashRouter, MoE, MoEModifier, TopKRouter


@pytest.mark.parametrize("name", CATALOG)
def test_the_swap_fits_any_architecture(name):
    cfg = small(name)
    before = dict(cfg.model.instantiate(name="model").walk())
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, top_k=2))
    model = cfg.model.instantiate(name="model")
    after = dict(model.walk())

    networks = [path for path, m in before.items() if isinstance(m, FeedForward)]
    assert networks and all(isinstance(after[path], MoE) for path in networks)

    def others(tree):  # nothing but the feed-forward layers is another
        return {p: type(m) for p, m in tree.items() if not p.startswith(tuple(networks))}

    assert others(before) == others(after)
    collection, _ = jax.eval_shape(lambda: training_step(model))
    for loss in ("load_balance", "router_z"):
        assert {p for p in collection.losses if p.endswith(loss)} == {
            f"{path}/{loss}" for path in networks
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_the_swap_trains_any_architecture(name):
    cfg = small(name)
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, top_k=2))
    model = cfg.model.instantiate(name="model")
    collection, grads = jax.jit(lambda: training_step(model))()
    assert np.isfinite(total_loss(collection))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(grad).all(), path
        if "experts" in str(path) or "router" in str(path):
            assert np.any(grad), path


def test_an_expert_is_as_the_layer_was():
    cfg = small("fuji-test-v3")
    old = next(iter(cfg.find(FeedForward.Config).values()))
    assert old.gate is not None
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4))
    (new,) = cfg.find(MoE.Config).values()
    for name in ("hidden_dim", "activation", "up", "gate", "down"):
        assert getattr(new, name) == getattr(old, name), name


def test_the_modifier_is_the_swap():
    by_hand = small("fuji-test-v3")
    by_hand.replace(FeedForward.Config, MoE.Config(num_experts=4, top_k=1))
    modifier = parse_modifier("axlearn-moe:moe:num_experts=4,top_k=1")
    assert modifier.instantiate()(small("fuji-test-v3")) == by_hand


def test_the_modifier_takes_every_option_of_the_layer():
    text = "axlearn-moe:moe:num_experts=4,moe.capacity_factor=1.5,moe.router.score=sigmoid"
    cfg = parse_modifier(text).instantiate()(small("fuji-test-v3"))
    (moe,) = cfg.find(MoE.Config).values()
    assert (moe.num_experts, moe.capacity_factor, moe.router.score) == (4, 1.5, "sigmoid")


def test_every_second_layer_makes_a_period():
    cfg = small("fuji-test-v3")
    cfg.model.decoder.num_layers = 5
    cfg = parse_modifier("axlearn-moe:moe:num_experts=4,every=2").instantiate()(cfg)
    model = cfg.model.instantiate(name="model")
    layers = {p: m for p, m in model.walk() if p.startswith("decoder/layer/") and p.count("/") == 2}
    kinds = {p.split("/")[2]: type(m.feed_forward).__name__ for p, m in layers.items()}
    assert kinds == {"0:4:2": "FeedForward", "1:4:2": "MoE", "4": "FeedForward"}


def kinds_of_layers(cfg):
    """Which feed-forward layer each layer of a decoder has, as the modules are."""
    model = cfg.model.instantiate(name="model")
    stack = dict(model.walk())["decoder/layer"]
    kinds = {}
    for child in stack.children.values():
        for layer in [child.layers] if isinstance(child.layers, int) else child.layers:
            kinds[layer] = type(child.feed_forward).__name__
    return [kinds[i] for i in sorted(kinds)]


def test_every_second_layer_counts_those_before_the_period():
    cfg = small("fuji-test-v3")
    cfg.model.decoder.num_layers = 5
    cfg.model.decoder.prefix = (cfg.model.decoder.layer.copy(), cfg.model.decoder.layer.copy())
    cfg = parse_modifier("axlearn-moe:moe:num_experts=4,every=2").instantiate()(cfg)
    assert kinds_of_layers(cfg) == ["FeedForward", "MoE", "FeedForward", "MoE", "FeedForward"]


def test_a_period_is_no_longer_than_the_stack():
    cfg = small("fuji-test-v3")
    cfg.model.decoder.num_layers = 4
    cfg.model.decoder.layer = (cfg.model.decoder.layer.copy(), cfg.model.decoder.layer.copy())
    cfg = parse_modifier("axlearn-moe:moe:num_experts=4,every=3").instantiate()(cfg)
    assert len(cfg.model.decoder.layer) == 4  # not 6, the first that 2 and 3 divide
    assert kinds_of_layers(cfg) == ["FeedForward", "FeedForward", "MoE", "FeedForward"]


def test_shared_experts_stay_feed_forward_layers():
    cfg = small("fuji-test-v3")
    shared = MoE.Config(num_experts=4, shared_experts=FeedForward.Config(hidden_dim=8))
    cfg.replace(FeedForward.Config, shared)
    with pytest.raises(ConfigError, match=r"mixtures already: model\.decoder\.layer\.feed_"):
        parse_modifier("axlearn-moe:moe:num_experts=4").instantiate()(cfg)


def test_a_pattern_chooses_layers():
    cfg = small("t5-test")
    cfg = parse_modifier("axlearn-moe:moe:num_experts=4,pattern=model.encoder.**").instantiate()(
        cfg
    )
    assert all(p.startswith("model.encoder.") for p in cfg.find(MoE.Config))
    assert all(p.startswith("model.decoder.") for p in cfg.find(FeedForward.Config))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("every=0", "every=0"),
        ("pattern=model.nothing.*", "model.decoder.layer.feed_forward"),
        ("every=9", "at least 9 layers"),
        ("every=99999999999", "at least 99999999999 layers"),
    ],
)
def test_a_modifier_that_would_change_nothing_is_refused(arguments, part):
    modifier = parse_modifier(f"axlearn-moe:moe:num_experts=4,{arguments}").instantiate()
    with pytest.raises(ConfigError, match="AX917") as raised:
        modifier(small("fuji-test-v3"))
    assert part in str(raised.value)


def test_a_config_with_experts_is_text():
    cfg = experiments.get("tiny-lm")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, dispatch=EinsumDispatch.Config()))
    again = type(cfg).from_text(cfg.to_text(), trusted=("axlearn_moe",))
    assert again == cfg


@pytest.mark.parametrize(
    ("fields", "code", "near"),
    [
        (dict(num_experts=4, top_k=5), "AX910", "top_k=4"),
        (dict(num_experts=4, capacity_factor=0.0), "AX912", "1.0 is an equal share"),
        (dict(num_experts=4, capacity_factor=math.nan), "AX912", "above 0"),
        (dict(num_experts=4, eval_capacity_factor=math.inf), "AX912", "None drops nothing"),
        (dict(num_experts=4, router=TopKRouter.Config(scale=math.nan)), "AX918", "above 0"),
        (
            dict(num_experts=4, router=TopKRouter.Config(choice_bias_rate=-1.0)),
            "AX918",
            "of at least 0",
        ),
        (dict(num_experts=6, router=TopKRouter.Config(num_groups=4)), "AX913", "2 or 3 groups"),
    ],
    ids=["top_k", "capacity", "nan", "inf", "scale", "rate", "groups"],
)
def test_the_modifier_refuses_what_cannot_be_before_anything_is_built(fields, code, near):
    modifier = MoEModifier.Config(moe=MoE.Config(**fields)).instantiate()
    with pytest.raises(ModuleError, match=code) as raised:
        modifier(experiments.get("tiny-lm"))
    assert near in str(raised.value)


def test_a_hash_router_goes_by_the_ids_that_a_model_of_tokens_gives():
    cfg = small("fuji-test-v3")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, router=HashRouter.Config()))
    collection, _ = training_step(cfg.model.instantiate(name="model"))
    assert collection.summaries
