"""Low-rank adapters of experts: each expert has its own, and merged weights compute the same."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from models_for_moe_tests import (
    assert_close,
    compiled_layer,
    inputs,
    layer,
    run_layer,
    sequence_info,
    small,
)
from test_expert_parallel import run_on, target_of

from axcore import experiments, functional
from axcore.checkpoint import stack_form
from axcore.config import apply_modifier, config_for
from axcore.errors import ConfigError, ModuleError, OpError
from axcore.inference import load_model
from axcore.layers import Dropout, FeedForward, Linear
from axcore.layers.lora import DoRA, LoRA
from axcore.module import flatten_specs
from axcore.ops import BaseDotGeneral
from axcore.parallel import resolve_instance
from axcore.peft import (
    DoRAModifier,
    LoRAModifier,
    attach_adapter,
    export_adapter,
    linear_paths,
    merge_adapter,
)
from axcore.quantization import Int8Dot
from axcore.train import JsonlWriter, optimizers, train
from axlearn_moe import EinsumDispatch, ExpertChoiceRouter, MoE, TopKRouter

RANK, ALPHA = 3, 6.0
KINDS = {"lora": LoRA.Config, "dora": DoRA.Config}


def adapted(kind, **fields):
    """A gated layer, all of whose products have adapters."""
    linear = Linear.Config(dot=kind(rank=RANK, alpha=ALPHA))
    return layer(up=linear, gate=linear.copy(), down=linear.copy(), **fields)


def merged(kind, params):
    """The weights by definition, expert by expert, in numpy."""
    plain = {**params, "experts": {}}
    for name, own in params["experts"].items():
        own, dot = dict(own), own["dot"]
        weights = []
        for e, weight in enumerate(np.asarray(own["weight"], np.float64)):
            a, b = (np.asarray(dot[n][e], np.float64) for n in ("lora_a", "lora_b"))
            new = weight + ALPHA / RANK * a @ b
            if kind is DoRA.Config:
                magnitude = np.linalg.norm(weight, axis=0) + dot["lora_magnitude"][e]
                new = magnitude * new / np.linalg.norm(new, axis=0)
            weights.append(new)
        plain["experts"][name] = {
            "weight": np.asarray(weights, np.float32),
            **{n: x for n, x in own.items() if n not in ("weight", "dot")},
        }
    return plain


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_layer_with_adapters_is_the_layer_of_the_merged_weights(kind):
    x, info = inputs(2, 6), sequence_info(2, 6, 1)
    y, _, _ = run_layer(adapted(kind), x, info)
    gated = layer(gate=Linear.Config())
    params, _ = compiled_layer(adapted(kind).to_text(), x.shape, True)
    _, plain = compiled_layer(gated.to_text(), x.shape, True)
    (_, (expected, _)), _ = plain(merged(kind, params), x, info)
    assert_close(y, expected)
    unadapted, _ = compiled_layer(gated.to_text(), x.shape, True)
    assert jax.tree.structure(merged(kind, params)) == jax.tree.structure(unadapted)
    (_, (other, _)), _ = plain(unadapted, x, info)
    assert not np.allclose(y, other, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "fields",
    [{}, dict(router=ExpertChoiceRouter.Config()), dict(capacity_factor=0.8)],
    ids=["dropless", "experts_choose", "capacity"],
)
def test_adapters_compute_the_same_in_both_dispatches(kind, fields):
    x, info = inputs(3, 6), sequence_info(3, 6, 1)
    grouped = run_layer(adapted(kind, **fields), x, info)
    einsum = run_layer(adapted(kind, dispatch=EinsumDispatch.Config(), **fields), x, info)
    assert_close(grouped, einsum)
    of_adapters = grouped[2][0]["experts"]["down"]["dot"]
    assert all(np.any(grad) for grad in jax.tree.leaves(of_adapters))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_adapters_of_experts_over_devices_equal_one_device(kind):
    """Norms of a split input dim are taken before it is split."""
    x, info = inputs(8, 6), sequence_info(8, 6, 1)
    got, _ = run_on(target_of(expert=2, model=2, fsdp=2), adapted(kind), x, info)
    assert_close(got, run_layer(adapted(kind), x, info))


def test_a_quantized_product_is_adapted_like_a_plain_one():
    linear = Linear.Config(dot=LoRA.Config(rank=RANK, base=Int8Dot.Config()))
    x, info = inputs(2, 6), sequence_info(2, 6, 1)
    grouped, _, _ = run_layer(layer(up=linear), x, info)
    einsum, _, _ = run_layer(layer(up=linear, dispatch=EinsumDispatch.Config()), x, info)
    plain, _, _ = run_layer(layer(up=Linear.Config(dot=LoRA.Config(rank=RANK))), x, info)
    assert_close(grouped, einsum)
    assert not np.allclose(grouped, plain, atol=1e-4)


def test_each_expert_has_an_adapter_of_its_own():
    module = adapted(DoRA.Config).instantiate(name="layer")
    specs = flatten_specs(module.parameter_specs()["experts"]["down"]["dot"])
    assert {name: (spec.shape, spec.axes) for name, spec in specs.items()} == {
        "lora_a": ((4, 12, RANK), ("experts", "expert_mlp", "lora_rank")),
        "lora_b": ((4, RANK, 8), ("experts", "lora_rank", "embed")),
        "lora_magnitude": ((4, 8), ("experts", "embed")),
    }
    drawn = np.asarray(specs["lora_a"].initial(jax.random.key(0)))
    # As that of one expert alone, of 12 inputs; 144 draws give its spread to 6 %.
    assert float(np.std(drawn)) == pytest.approx(12**-0.5, rel=0.2)


def test_dropout_of_an_experts_adapter_is_refused():
    linear = Linear.Config(dot=LoRA.Config(dropout=Dropout.Config(rate=0.1)))
    with pytest.raises(ModuleError, match="AX960") as raised:
        layer(up=linear).instantiate(name="layer")
    assert "dropout=0.1" in str(raised.value) and "targets=" in str(raised.value)


def test_a_wrapper_that_knows_no_groups_is_refused_where_rows_come_in_groups():
    class Doubled(BaseDotGeneral):
        class Config(BaseDotGeneral.Config):
            pass

        def forward(self, lhs, rhs, dimension_numbers, *, preferred_element_type=None):
            return 2 * jax.lax.dot_general(lhs, rhs, dimension_numbers)

    linear = Linear.Config(dot=Doubled.Config())
    with pytest.raises(ModuleError, match="AX916"):
        layer(up=linear).instantiate(name="layer")
    module = layer(up=linear, dispatch=EinsumDispatch.Config()).instantiate(name="layer")
    with pytest.raises(OpError, match="AX961"):
        module.experts.up.dot.grouped(None, None, None)


# -- through the modifiers --------------------------------------------------------------------


def mixture():
    cfg = small("fuji-test-v3")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4))
    return cfg


def trained(cfg):
    trainer = cfg.instantiate(name="trainer")
    return flatten_specs(trainer.learner.trainable_specs(trainer.model.parameter_specs()))


def test_a_broad_pattern_reaches_experts_and_leaves_the_router():
    paths = trained(apply_modifier(mixture(), LoRAModifier.Config(rank=2)))
    assert all("/dot/lora_" in path for path in paths)
    owners = {path.split("/dot/")[0] for path in paths}
    layers = "decoder/layer/0:2:1"
    assert {f"{layers}/feed_forward/experts/{n}" for n in ("up", "gate", "down")} < owners
    assert f"{layers}/attention/qkv/query" in owners
    assert not any("router" in owner for owner in owners)


def test_targets_name_experts_alone_or_attention_alone():
    for target, part in (("**/experts/*", "/experts/"), ("**/qkv/*", "/qkv/")):
        paths = trained(apply_modifier(mixture(), DoRAModifier.Config(rank=2, targets=target)))
        assert paths and all(part in path for path in paths)


def test_a_router_has_no_product_to_adapt():
    with pytest.raises(ConfigError, match="AX366"):
        apply_modifier(mixture(), LoRAModifier.Config(targets="**/router"))
    more = LoRAModifier.Config(targets="**/experts/*", train="**/router/*")
    assert any("/router/weight" in path for path in trained(apply_modifier(mixture(), more)))


def test_experts_are_linear_layers_by_one_path_for_all():
    model = mixture().instantiate(name="trainer").model
    assert "decoder/layer/1/feed_forward/experts/up" in linear_paths(model)


# -- merged, exported, attached -----------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A mixture, a run that adapts experts and queries, and that run merged and exported."""
    root = tmp_path_factory.mktemp("adapters")
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=4, seq_len=16, max_step=1, sample_prompt=None, evalers={})
    cfg.set(writers={"jsonl": JsonlWriter.Config()})
    cfg.model.set(model_dim=16)
    cfg.model.decoder.set(num_layers=1)
    cfg.model.decoder.layer.attention.set(num_heads=2)
    cfg.learner.optimizer = config_for(optimizers.adamw, learning_rate=3e-2)
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4))
    machine = resolve_instance("cpu")
    train(cfg, out=root / "base", instance=machine)
    targets = ("**/experts/*", "**/query")
    tuned = apply_modifier(cfg.copy().set(max_step=2), DoRAModifier.Config(rank=2, targets=targets))
    train(tuned, out=root / "tuned", instance=machine, init_from=root / "base")
    merge_adapter(root / "tuned", root / "merged")
    export_adapter(root / "tuned", root / "adapter")
    attach_adapter(root / "base", root / "adapter", root / "again")
    return root


@pytest.mark.slow
def test_the_balance_that_moved_beside_frozen_routers_goes_with_the_adapters(tmp_path):
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=4, seq_len=16, max_step=1, sample_prompt=None, evalers={})
    cfg.set(writers={"jsonl": JsonlWriter.Config()})
    cfg.model.set(model_dim=16)
    cfg.model.decoder.set(num_layers=2)
    cfg.model.decoder.layer.attention.set(num_heads=2)
    router = TopKRouter.Config(choice_bias=True, choice_bias_rate=0.1)
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, router=router))
    machine = resolve_instance("cpu")
    train(cfg, out=tmp_path / "base", instance=machine)
    tuned = apply_modifier(cfg.copy().set(max_step=3), LoRAModifier.Config(rank=2))
    train(tuned, out=tmp_path / "tuned", instance=machine, init_from=tmp_path / "base")
    export_adapter(tmp_path / "tuned", tmp_path / "adapter")
    found = attach_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "again")
    assert found["same_base"]
    before, after, again = (
        stack_form.flatten(load_model(tmp_path / name).state) for name in ("base", "tuned", "again")
    )
    (bias,) = (path for path in after if path.endswith("choice_bias"))
    assert not np.array_equal(before[bias], after[bias])
    np.testing.assert_array_equal(again[bias], after[bias])
    np.testing.assert_array_equal(logits(tmp_path / "again"), logits(tmp_path / "tuned"))


def logits(directory):
    loaded = load_model(directory)
    ids = np.arange(12, dtype=np.int32)[None] * 11 % 250

    @jax.jit
    def run(state):
        inputs = {"input_ids": ids}
        return functional(
            loaded.model, state=state, inputs=inputs, is_training=False, method="logits"
        )[0]

    return np.asarray(run(loaded.state))


@pytest.mark.slow
def test_adapted_experts_merge_and_go_from_one_directory_to_another(places):
    tuned = logits(places / "tuned")
    np.testing.assert_allclose(logits(places / "merged"), tuned, atol=1e-5)
    np.testing.assert_array_equal(logits(places / "again"), tuned)
    assert np.abs(logits(places / "base") - tuned).max() > 1e-3  # they have learned something
    plain, base = (load_model(places / name) for name in ("merged", "base"))
    assert jax.tree.structure(plain.state) == jax.tree.structure(base.state)
    for path, value in stack_form.flatten(plain.state).items():
        same = np.array_equal(value, stack_form.flatten(base.state)[path])
        # Everything else stayed as it was, the router too.
        assert same != path.endswith(("up/weight", "down/weight", "query/weight")), path
