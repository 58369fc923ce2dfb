"""Recipes on configs: scope, order, machines, adapters."""

import pytest

from axcore import experiments
from axcore.config import apply_modifier
from axcore.errors import ConfigError
from axcore.layers import FeedForward, LMHead, LoRA, StackedTransformer
from axcore.layers.placement import build_model
from axcore.ops import DotGeneral
from axcore.parallel.instance_rules import apply_instance_rules
from axcore.peft import LoRAModifier
from axcore.plugins import Instance
from axcore.quantization import (
    Fp8Dot,
    Fp8Recipe,
    Int8Dot,
    Int8Recipe,
    QuantizeModifier,
    check_instance,
    find_sites,
)
from axcore.train.assemble import assemble


def products(cfg) -> dict[str, str]:
    return {p: type(s.module).__name__ for p, s in find_sites(build_model(cfg)).items()}


def quantized(cfg, recipe="int8", **fields):
    return apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe, **fields))


def machine(name="tpu-like", platform="tpu", **rates) -> Instance:
    return Instance(
        name=name,
        family=name,
        platform=platform,
        num_hosts=1,
        devices_per_host=1,
        hbm_bytes=1 << 30,
        peak_flops={"bfloat16": 1e12, **rates},
    )


def test_patterns_say_which_layers():
    cfg = experiments.get("tiny-lm")
    cfg.model.decoder.stack = StackedTransformer.Config()
    found = products(quantized(cfg, include=("decoder/layer/1/**",), exclude="**/down"))
    changed = {path for path, name in found.items() if name == "Int8Dot"}
    assert changed == {
        "decoder/layer/1/attention/qkv/query",
        "decoder/layer/1/attention/qkv/key",
        "decoder/layer/1/attention/qkv/value",
        "decoder/layer/1/attention/output",
        "decoder/layer/1/feed_forward/up",
    }


def test_layers_of_a_scan_cannot_differ():
    with pytest.raises(ConfigError, match="quantized products for layers 1 of 2 only"):
        quantized(experiments.get("tiny-lm"), include="decoder/layer/1/**")


def test_head_and_attention_are_quantized_when_asked():
    cfg = experiments.get("tiny-lm")
    cfg.model.lm_head = LMHead.Config()
    found = products(quantized(cfg, head=True, attention=True))
    assert set(found.values()) == {"Int8Dot"}
    with pytest.raises(ConfigError, match="set attention=True"):
        quantized(cfg, include="**/logits_dot")


def test_state_and_random_numbers_do_not_go_into_kernels():
    cfg = experiments.get("tiny-lm")
    for recipe, options in (("fp8-delayed", {}), ("int8", {"stochastic_rounding": True})):
        with pytest.raises(ConfigError, match="inside a kernel"):
            quantized(cfg, recipe, attention=True, options=options)


def test_a_second_recipe_is_refused_or_overrides():
    cfg = quantized(experiments.get("tiny-lm"))
    with pytest.raises(ConfigError, match="Int8Dot already"):
        quantized(cfg, "fp8")
    found = products(quantized(cfg, "fp8", override=True, include="**/up"))
    assert {n for p, n in found.items() if p.endswith("/up")} == {"Fp8Dot"}
    assert {n for p, n in found.items() if not p.endswith("/up")} == {"DotGeneral"}


def test_precision_of_the_product_is_kept():
    cfg = experiments.get("tiny-lm")
    cfg.set_path("model.decoder.layer.feed_forward.up.dot.precision", "highest")
    made = apply_modifier(cfg, Fp8Recipe.Config(granularity="channel"))
    dot = made.get_path("model.decoder.layer.feed_forward.up.dot")
    assert dot == Fp8Dot.Config(granularity="channel", precision="highest")


def test_an_adapter_stays_around_the_quantized_product():
    cfg = quantized(apply_modifier(experiments.get("tiny-lm"), LoRAModifier.Config(rank=2)))
    dot = cfg.get_path("model.decoder.layer.feed_forward.up.dot")
    assert isinstance(dot, LoRA.Config) and isinstance(dot.base, Int8Dot.Config)
    model = build_model(cfg)
    adapter = dict(model.walk())["decoder/layer/0:2:1/feed_forward/up/dot"]
    assert adapter.operand_dtype == "int8"  # what cost models read


def test_unknown_fields_and_recipes_have_hints():
    with pytest.raises(ConfigError, match="history_length"):
        quantized(experiments.get("tiny-lm"), "fp8-delayed", options={"history": 4})
    with pytest.raises(Exception, match="mxfp8"):
        quantized(experiments.get("tiny-lm"), "mxfp9")
    with pytest.raises(ConfigError, match="axcore quantize --from"):
        quantized(experiments.get("tiny-lm"), "int8-weights")


def test_a_rule_chooses_and_a_flag_wins():
    rules = (("cpu", (QuantizeModifier.Config(recipe="fp8", override=True),)),)
    cfg = experiments.get("tiny-lm")
    by_rule = assemble(cfg, instance="cpu", rules=rules)
    assert "Fp8Dot" in products(by_rule.cfg).values()
    assert any(c.path.endswith("up.dot") for c in by_rule.rules.changes)
    by_flag = assemble(cfg, instance="cpu", rules=rules, modifiers=["quantize:recipe=int8"])
    assert {"Int8Dot", "DotGeneral"} == set(products(by_flag.cfg).values())
    assert any(k.path.endswith("up.dot") for k in by_flag.rules.kept)
    scoped = assemble(
        cfg, instance="cpu", rules=rules, modifiers=["quantize:recipe=fp8,include=**/attention/**"]
    )
    made = {path for path, name in products(scoped.cfg).items() if name == "Fp8Dot"}
    assert made and all("/attention/" in path for path in made)
    plain = assemble(cfg, instance="cpu", rules=rules, modifiers=["quantize:recipe=none"])
    assert set(products(plain.cfg).values()) == {"DotGeneral"}


def test_a_machine_without_the_dtype_refuses_before_anything_compiles():
    cfg = quantized(experiments.get("tiny-lm"), "fp8")
    with pytest.raises(ConfigError) as error:
        check_instance(cfg, machine(int8=2e12))
    assert error.value.code == "AX435"
    assert "float8_e4m3fn" in error.value.message
    assert "int8" in error.value.hint and "fp8-delayed" not in error.value.hint
    check_instance(cfg, machine(float8_e4m3fn=2e12))  # e5m2 has the same units
    check_instance(cfg, machine(platform="cpu"))
    check_instance(quantized(experiments.get("tiny-lm")), machine(int8=2e12))


def test_the_check_is_part_of_fitting_to_a_machine():
    pytest.importorskip("axlearn_tpu", reason="the TPU plugin states rates of its chips")
    cfg = experiments.get("tiny-lm").set(batch_size=256)
    with pytest.raises(ConfigError, match="tpu-v4-16 does not multiply float8"):
        apply_instance_rules(quantized(cfg, "fp8"), "tpu-v4-16")
    apply_instance_rules(quantized(cfg, "int8"), "tpu-v4-16")


def test_plain_products_stay_what_they_were():
    cfg = experiments.get("tiny-lm")
    text = cfg.to_text()
    apply_modifier(cfg, Int8Recipe.Config())
    assert cfg.to_text() == text
    assert set(products(cfg).values()) == {DotGeneral.__name__}


def test_experts_are_quantized_by_the_recipes_that_multiply_groups_of_rows(caplog):
    caplog.set_level("INFO", "axcore.config")
    moe = pytest.importorskip("axlearn_moe", reason="its experts multiply in groups")
    cfg = experiments.get("tiny-lm")
    cfg.replace(FeedForward.Config, moe.MoE.Config(num_experts=4))

    def of_experts(recipe, **fields):
        recipe = QuantizeModifier.Config(recipe=recipe, **fields)
        made = products(apply_modifier(cfg.copy(), recipe))
        assert not [path for path in made if "router" in path]
        return {name for path, name in made.items() if "/experts/" in path}

    caplog.clear()
    made = {"int8": "Int8Dot", "fp8": "Fp8Dot", "fp8-delayed": "DelayedFp8Dot"}
    for recipe, name in made.items():
        assert of_experts(recipe) == {name}
    assert of_experts("int8", grouped=False) == {"DotGeneral"}
    assert not caplog.records  # as asked for
    caplog.clear()
    assert of_experts("mxfp8") == {"DotGeneral"}
    (told,) = (record.getMessage() for record in caplog.records)
    assert "4 products of groups of rows, such as decoder/layer/0/feed_forward/experts" in told
    assert "the recipes int8, fp8 and fp8-delayed do" in told
    with pytest.raises(ConfigError, match="AX432"):
        of_experts("mxfp8", grouped=True)
    with pytest.raises(ConfigError, match="AX432"):
        of_experts("int8", options={"stochastic_rounding": True})
