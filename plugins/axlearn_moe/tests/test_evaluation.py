"""What evaluating a mixture reports: the summaries of every layer, by whichever stack it runs."""

from __future__ import annotations

import json

import pytest

from axcore import experiments
from axcore.config import apply_modifier
from axcore.layers import RepeatedTransformer, StackedTransformer
from axcore.parallel import resolve_instance
from axcore.train import train
from axlearn_moe import MoEModifier

LAYERS = 2


@pytest.mark.parametrize("stack", [RepeatedTransformer, StackedTransformer])
def test_summaries_of_each_layer_are_reported_by_its_path(stack, tmp_path):
    cfg = apply_modifier(experiments.get("tiny-lm"), MoEModifier.Config(num_experts=4))
    cfg.model.decoder.stack = stack.Config()
    cfg.set(max_step=1, batch_size=2, seq_len=16)
    cfg.evalers["heldout"].max_documents = 1
    train(cfg, out=tmp_path / "run", instance=resolve_instance("cpu"))
    metrics = json.loads((tmp_path / "run/report.json").read_text())["eval"]
    entropies = {name for name in metrics if name.endswith("router_entropy")}
    assert entropies == {f"decoder/layer/{i}/feed_forward/router_entropy" for i in range(LAYERS)}
    assert {"loss", "accuracy", "bits_per_byte"} <= set(metrics)  # of one place: by their last name
