from typing import Any

import pytest

from axcore.errors import PluginError
from axcore.layers import Zeros
from axcore.layers.base import Layer
from axcore.module import Module, ParameterSpec
from axcore.parallel import Axis, Traits, compute_traits


@pytest.mark.parametrize(
    ("trait", "expected"),
    [
        ("moe", True),
        ("dense", False),
        ("num_parameters:7G+", True),
        ("num_parameters:7.1G+", False),
        ("num_parameters:1G-7G", False),
        ("parameter_bytes:13G-14G", True),
        ("seq_len:4096+", True),
        ("seq_len:4K+", True),
        ("layer_bytes:1+", False),
    ],
)
def test_a_trait_is_a_tag_or_a_range(trait, expected):
    traits = Traits(7 * 10**9, 14 * 10**9, 0, 4096, frozenset({"moe"}))
    assert traits.holds(trait) is expected


def test_an_unknown_quantity_is_an_error():
    with pytest.raises(PluginError, match=r"'params:7G\+' is neither a tag nor a quantity"):
        Traits().holds("params:7G+")


def test_dims_on_an_axis_like_those_of_tensors_count_in_what_tensors_are_split_into():
    Axis("traits_test_mlp", like="mlp")

    class Narrow(Layer):
        class Config(Layer.Config):
            pass

        def __init__(self, cfg: Config, *, parent: Any = None):
            super().__init__(cfg, parent=parent)
            for name, dim, axis in [("wide", 48, "mlp"), ("own", 20, "traits_test_mlp")]:
                axes = ("embed", axis)
                spec = ParameterSpec((5, dim), "float32", axes, Zeros())
                self._add_parameter(name, spec)

    class Experiment(Module):
        class Config(Module.Config):
            model: Narrow.Config = Narrow.Config()

    assert compute_traits(Experiment.Config()).tensor_parts == 4
