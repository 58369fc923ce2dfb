"""A short training run with each recipe ends where that in bfloat16 does; the table is in docs."""

import json

import pytest

from axcore import experiments
from axcore.config import apply_modifier
from axcore.parallel import resolve_instance
from axcore.quantization import QuantizeModifier
from axcore.train import JsonlWriter, train

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("quantization-training")]
STEPS, LAST = 60, 10


def final_loss(recipe, out):
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=8, seq_len=32, max_step=STEPS, sample_prompt=None, evalers={})
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    cfg.model.set(model_dim=32, compute_dtype="bfloat16")
    cfg = apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe))
    train(cfg, out=out, instance=resolve_instance("cpu"))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    return sum(losses[-LAST:]) / LAST, losses[0]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return final_loss("none", tmp_path_factory.mktemp("training") / "run")


@pytest.mark.parametrize(
    ("recipe", "percent"), [("fp8-delayed", 1.0), ("mxfp8", 1.0), ("int8", 1.0), ("int4-qat", 3.0)]
)
def test_the_loss_stays_near_that_of_bfloat16(baseline, recipe, percent, tmp_path):
    want, start = baseline
    got, _ = final_loss(recipe, tmp_path / "run")
    assert want < 0.75 * start  # it has learned something
    assert abs(got / want - 1) < percent / 100
