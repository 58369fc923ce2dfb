"""Against glassllm's own NumPy forward pass and autograd, on the weights that it ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def glassllm() -> Any:
    return pytest.importorskip("glassllm", reason="the oracle: pip install glassllm==0.1.0")


@pytest.mark.parametrize("language", ["en", "pt"])
def test_logits_and_gradients_are_the_package_s_own(language, glassllm, read_model):
    theirs, tokenizer = glassllm.load_pretrained(language)
    ours = read_model(Path(glassllm.__file__).parent / "weights" / f"{language}.npz")
    text = {"en": "It was the best of times, it was the worst of times.", "pt": "Uma noite destas"}
    ids = np.asarray([(tokenizer.encode(text[language]) * 8)[:48]])

    logits = ours.logits(ids)
    np.testing.assert_allclose(logits, theirs(ids).data, rtol=1e-4, atol=1e-4)

    loss = theirs.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    our_loss, gradients = ours.gradients(ids)
    assert our_loss == pytest.approx(float(loss.data), rel=1e-5)
    expected = {name: p.grad for name, p in theirs.named_parameters().items()}
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        largest = min(1.0, float(np.abs(expected[name]).max()))
        np.testing.assert_allclose(
            gradient, expected[name], rtol=1e-4, atol=1e-4 * largest, err_msg=name
        )


def test_the_catalog_s_member_is_the_package_s_model(glassllm):
    from axcore import experiments
    from axcore.module import flatten_specs

    theirs, _ = glassllm.load_pretrained("en")
    model = experiments.get("glassllm").instantiate(name="trainer").model
    specs = flatten_specs(model.parameter_specs())
    sizes = sorted(np.prod(spec.shape) for spec in specs.values())
    count = sum(p.data.size for p in theirs.named_parameters().values())
    assert sum(sizes) == count == 852_608
