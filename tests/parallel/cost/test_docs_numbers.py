"""The numbers on the page about FLOPs are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from models_for_tests import MODELS, language_model, trainer

from axcore.layers import RepeatedTransformer, StackedTransformer
from axcore.parallel.cost import ModelFlops, count_function, model_flops
from axcore.remat import Remat

PAGE = (Path(__file__).parents[3] / "docs" / "flops.md").read_text()
BY_HAND = dict(layers=1, dim=8, heads=2, kv_heads=1, head_dim=4, hidden=12, vocab=32)


def rows() -> dict[str, tuple[str, float]]:
    """Name -> (what is written, its result), of the tables of the count by hand."""
    found: dict[str, tuple[str, float]] = {}
    section = PAGE.split("## A count by hand")[1].split("\n## ")[0]
    for name, text, number in re.findall(
        r"^\| (.+?) \| ([\d ()*+/-]+) \| (\d+) \|$", section, re.M
    ):
        found[name.strip("* ")] = (text, float(number))
    return found


def counted(remat: Remat | None = None) -> ModelFlops:
    model = language_model(**BY_HAND)
    model.decoder.stack = RepeatedTransformer.Config(remat=remat or Remat())
    return model_flops(model, 4)


def test_the_arithmetic_on_the_page_is_right():
    assert len(rows()) == 15
    for name, (text, number) in rows().items():
        assert eval(text) == number, name


def test_the_count_by_hand_is_the_count_by_code():
    by_hand = {name: number for name, (_, number) in rows().items()}
    flops = counted()
    assert flops.forward.full == by_hand["forward, full"]
    assert flops.train.full == by_hand["training, full"]
    assert flops.train.causal == by_hand["training, causal"]
    assert counted(Remat("full")).hardware.full == by_hand["hardware, full, remat of everything"]
    kinds = flops.train_by("kind")
    weights = kinds["projection"].full + kinds["head"].full
    assert weights == 6 * by_hand["weights"]
    assert kinds["attention"].full == 6 * by_hand["attention, full"]
    assert kinds["attention"].causal == 6 * by_hand["attention, causal"]


@pytest.mark.parametrize("stack", [RepeatedTransformer, StackedTransformer])
def test_a_traced_step_has_the_products_on_the_page(stack):
    model = language_model(**BY_HAND)
    model.decoder.stack = stack.Config()
    built = trainer(model, batch_size=3, seq_len=4).instantiate(name="trainer")
    batch = {n: jax.ShapeDtypeStruct((3, 4), jnp.int32) for n in ("input_ids", "target_ids")}
    cost = count_function(built.train_step, built.abstract_state(), batch)
    (number,) = re.findall(r"3 \* 4 \* 4800 = (\d+) FLOPs", PAGE)
    assert cost.matmul_flops == int(number) == 3 * 4 * 4800


def test_the_table_of_published_figures_is_recomputed():
    table = re.findall(r"^\| (7B|70B|30B-A3B) \| (.+) \|$", PAGE, re.M)
    assert len(table) == 8
    for size, rest in table:
        tokens, chips, peak, seconds, published, with_look_up, without = map(
            float, rest.replace(",", "").split(" | ")
        )
        flops = model_flops(MODELS[size](), int(tokens))
        share = 100 * 1024 * tokens / seconds / (chips * peak * 1e12)
        assert round(share * flops.train_with_embeddings.full, 1) == with_look_up
        assert round(share * flops.train.full, 1) == without
        assert abs(with_look_up - published) <= 1.3
