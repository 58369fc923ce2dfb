"""Patterns over parameter paths that take something back."""

import numpy as np
import pytest

from axcore.errors import TrainError
from axcore.train._paths import leaf_masks

PATHS = [("layer", "0:3:1", "up", "weight"), ("layer", "0:3:1", "up", "bias"), ("head", "bias")]


def masks(*patterns):
    found = leaf_masks(PATHS, patterns, where="learner.frozen_params")
    return ["".join("01"[int(x)] for x in np.ravel(leaf.mask)) for leaf in found.values()]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("**",), ["111", "111", "1"]),
        (("**", "!**/bias"), ["111", "000", "0"]),
        (("**", "!layer/1/**"), ["101", "101", "1"]),
        (("**", "!**/bias", "head/*"), ["111", "000", "1"]),
        (("!**/bias", "**"), ["111", "111", "1"]),
    ],
    ids=["all", "not-biases", "not-a-layer", "put-back", "order"],
)
def test_the_last_pattern_that_matches_decides(patterns, expected):
    assert masks(*patterns) == expected


def test_a_pattern_that_takes_back_nothing_is_an_error():
    with pytest.raises(TrainError, match=r"'!\*\*/dot/lora_\*' matches none"):
        masks("**", "!**/dot/lora_*")
