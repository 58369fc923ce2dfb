"""The layer in stacks, in training, and in what is counted."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from models_for_moe_tests import IN_A_HURRY, inputs, layer, random_params, sequence_info, small

from axcore import functional
from axcore.cli import main
from axcore.errors import ModuleError
from axcore.layers import FeedForward, Linear, RepeatedTransformer, StackedTransformer
from axcore.parallel import compute_traits
from axcore.parallel.cost import model_flops
from axcore.testing import LayerConformance
from axlearn_moe import ClampedGLU, Experts, LoadBalanceLoss, MoE, TopKRouter


@pytest.mark.slow
class TestMoE(LayerConformance):
    def config(self):
        return layer(
            gate=Linear.Config(),
            shared_experts=FeedForward.Config(hidden_dim=6),
            shared_gate=Linear.Config(bias=False),
            router=TopKRouter.Config(jitter=0.01),
        )

    def inputs(self, key):
        return jax.random.normal(key, (2, 6, 8)), sequence_info(2, 6, 1)


def test_parameters_have_these_names_and_axes():
    cfg = layer(
        gate=Linear.Config(bias=False),
        down=Linear.Config(bias=False),
        router=TopKRouter.Config(bias=True, choice_bias=True),
        shared_experts=FeedForward.Config(hidden_dim=6),
        shared_gate=Linear.Config(bias=False),
    )
    module = cfg.instantiate(name="layer")
    paths = jax.tree_util.tree_leaves_with_path(
        module.parameter_specs(), is_leaf=lambda s: hasattr(s, "axes")
    )
    found = {jax.tree_util.keystr(p, simple=True, separator="/"): s.axes for p, s in paths}
    assert found == {
        "router/weight": ("embed", "experts"),
        "router/bias": ("experts",),
        "router/choice_bias": (None,),
        "experts/up/weight": ("experts", "embed", "expert_mlp"),
        "experts/up/bias": ("experts", "expert_mlp"),
        "experts/gate/weight": ("experts", "embed", "expert_mlp"),
        "experts/down/weight": ("experts", "expert_mlp", "embed"),
        "shared_experts/up/weight": ("embed", "mlp"),
        "shared_experts/up/bias": ("mlp",),
        "shared_experts/down/weight": ("mlp", "embed"),
        "shared_experts/down/bias": ("embed",),
        "shared_gate/weight": ("embed", None),
    }


def test_shared_experts_are_added_for_every_token():
    cfg = layer(shared_experts=FeedForward.Config(hidden_dim=6), shared_gate=Linear.Config())
    module, bare = cfg.instantiate(name="layer"), layer().instantiate(name="layer")
    params, x, info = random_params(module), inputs(2, 3), sequence_info(2, 3)

    def run(module, params):
        def call(params):
            return functional(module, state=params, inputs=(x, info), is_training=False)[0]

        return jax.jit(call).lower(params).compile(compiler_options=IN_A_HURRY)(params)

    shared = {"m": params["shared_experts"], "g": params["shared_gate"]}
    up, down = shared["m"]["up"], shared["m"]["down"]
    hidden = jax.nn.gelu(x @ up["weight"] + up["bias"], approximate=True)
    gate = jax.nn.sigmoid(x @ shared["g"]["weight"] + shared["g"]["bias"])
    expected = run(bare, params) + gate * (hidden @ down["weight"] + down["bias"])
    np.testing.assert_allclose(run(module, params), expected, atol=1e-5)


def test_a_scanned_stack_reports_each_layer():
    cfg = small("fuji-test-v3")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4))

    def summaries(stack):
        cfg.model.decoder.stack = stack
        model = cfg.model.instantiate(name="model")
        ids = np.ones((1, 4), np.int32)
        _, collection = jax.eval_shape(
            lambda params: functional(
                model,
                state=params,
                inputs={"input_ids": ids, "target_ids": ids},
                key=jax.random.key(0),
                is_training=True,
            ),
            jax.eval_shape(model.initialize, jax.random.key(0)),
        )
        return collection

    scanned, unrolled = (
        summaries(RepeatedTransformer.Config()),
        summaries(StackedTransformer.Config()),
    )
    stacked = scanned.summaries["decoder/layer/0:2:1/feed_forward/load"]
    assert stacked.total.shape == (2, 4)
    assert {p for p in unrolled.summaries if p.endswith("/load")} == {
        "decoder/layer/0/feed_forward/load",
        "decoder/layer/1/feed_forward/load",
    }


def test_costs_count_the_experts_that_a_token_meets():
    cfg = small("fuji-test-v3")
    dense = model_flops(cfg.copy())
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=8, top_k=1))
    sparse = model_flops(cfg)
    (moe,) = cfg.find(MoE.Config).values()
    router = 2 * cfg.model.model_dim * 8
    assert moe.num_experts == 8
    assert sparse.num_active_parameters - dense.num_active_parameters == router
    assert sparse.num_parameters > dense.num_parameters + router
    assert compute_traits(cfg).tags == {"moe", "rope"}


def test_experts_of_another_linear_are_refused():
    class Wider(Linear):
        class Config(Linear.Config):
            pass

    with pytest.raises(ModuleError, match="AX914"):
        layer(up=Wider.Config()).instantiate(name="layer")
    with pytest.raises(ModuleError, match="AX914"):
        layer(experts=Experts.Config(glu=ClampedGLU())).instantiate(name="layer")


def test_a_gate_of_shared_experts_without_any_is_refused():
    with pytest.raises(ModuleError, match="AX914") as raised:
        layer(shared_gate=Linear.Config()).instantiate(name="layer")
    assert "hint: set shared_experts" in str(raised.value)


def test_a_loss_that_is_there_twice_is_refused():
    losses = (LoadBalanceLoss(weight=0.1), LoadBalanceLoss(weight=0.2))
    with pytest.raises(ModuleError, match="AX918") as raised:
        layer(losses=losses).instantiate(name="layer")
    assert "the sum of their weights" in str(raised.value)


@pytest.mark.slow
def test_a_run_with_the_modifier_trains_and_logs_balance(tmp_path, capsys):
    out = tmp_path / "run"
    modifier = "axlearn-moe:moe:num_experts=4,top_k=2,moe.router.choice_bias=True"
    arguments = ["train", "fuji-test-v3", "--modifier", modifier, "--max-step", "12"]
    code = main([*arguments, "--out", str(out), "--instance", "cpu", "--json"])
    done = json.loads(capsys.readouterr().out)
    assert (code, done["step"]) == (0, 12)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert any("load_balance" in key for key in lines[-1])
    assert any("dropped_fraction" in key for key in lines[-1])
    for i in range(2):
        share = lines[-1][f"decoder/layer/{i}/feed_forward/load"]
        assert len(share) == 4 and sum(share) == pytest.approx(1.0)
    code = main(["generate", "--from", str(out), "--prompt", "def ", "--max-tokens", "4", "--json"])
    assert (code, json.loads(capsys.readouterr().out)["tokens"] <= 4) == (0, True)


def test_losses_have_a_text_form():
    cfg = layer(losses=(LoadBalanceLoss(0.02),))
    assert "LoadBalanceLoss" in cfg.to_text()
    assert MoE.Config.from_text(cfg.to_text(), trusted=("axlearn_moe",)) == cfg
