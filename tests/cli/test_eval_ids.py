"""``eval`` names a token that the model does not know, as generation does."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from axcore.cli.eval import _Program
from axcore.errors import CliError


def test_a_token_beyond_the_vocabulary_is_named_and_padding_is_not_looked_at():
    model = types.SimpleNamespace(cfg=types.SimpleNamespace(vocab_size=8))
    trainer = types.SimpleNamespace(eval_step=lambda params, batch: params)
    loaded: Any = types.SimpleNamespace(trainer=trainer, model=model, state=1.0)
    program = _Program(loaded, 1)
    batch = {"input_ids": np.array([[7, 99]]), "segment_ids": np.array([[1, 0]])}
    assert program(batch) == 1.0
    with pytest.raises(CliError, match="the text has the token 99") as caught:
        program({**batch, "segment_ids": np.array([[1, 1]])})
    assert caught.value.code == "AX829"
