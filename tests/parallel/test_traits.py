import pytest

from axcore.errors import PluginError
from axcore.parallel import Traits


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
