"""Core's own training recipes pass the suite that plugins' recipes run."""

import pytest

from axcore.testing import QuantizationConformance


class TestInt8(QuantizationConformance):
    recipe = "int8"


@pytest.mark.slow
class TestInt8WithStochasticRounding(QuantizationConformance):
    recipe = "int8"
    options = {"stochastic_rounding": True}  # noqa: RUF012 - a constant


class TestFp8(QuantizationConformance):
    recipe = "fp8"


class TestFp8Delayed(QuantizationConformance):
    recipe = "fp8-delayed"


class TestFp8DelayedByChannel(QuantizationConformance):
    recipe = "fp8-delayed"
    options = {"granularity": "channel"}  # noqa: RUF012 - a constant


class TestMxFp8(QuantizationConformance):
    recipe = "mxfp8"


class TestInt4Qat(QuantizationConformance):
    recipe = "int4-qat"
