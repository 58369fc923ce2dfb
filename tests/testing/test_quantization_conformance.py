"""The suite of recipes catches products whose result depends on how operands lie."""

import numpy as np
import pytest

from axcore.testing import QuantizationConformance


@pytest.mark.parametrize(("dim", "wrong"), [("rows", True), ("sum", True), ("outputs", False)])
def test_the_suite_catches_scales_of_a_device_s_part(dim, wrong):
    """Activations scaled by the size of what the first device has of them."""

    class Suite(QuantizationConformance):
        recipe = "int8"

        def _run(self, layer, state, x, w, c):
            x, w, part = map(np.asarray, (x, w, x.addressable_shards[0].data))
            scale = np.abs(part).sum()
            return np.round(x / scale * 127) @ w, (np.zeros_like(x), np.zeros_like(w))

    if wrong:
        with pytest.raises(AssertionError, match="relative error"):
            Suite().test_sharded_equals_unsharded(dim)
    else:
        Suite().test_sharded_equals_unsharded(dim)
