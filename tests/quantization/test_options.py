"""Options of recipes do what their page says, and are refused where they cannot be."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.config import apply_modifier
from axcore.errors import ConfigError
from axcore.layers import Linear
from axcore.plugins import host
from axcore.quantization import QuantizeModifier

DOCS = Path(__file__).parents[2] / "docs" / "quantization.md"


def layer(recipe, **options):
    cfg = Linear.Config(input_dim=64, output_dim=24, bias=False)
    return apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe, options=options))


def test_clipped_activations_saturate_and_the_others_get_finer_steps():
    x = np.linspace(-1.0, 1.0, 4 * 64, dtype=np.float32).reshape(4, 64)
    x[:, 0] = 8.0  # an outlier in each token
    w = jax.random.normal(jax.random.key(0), (64, 24))
    module = layer("int8", activation_clip=0.125).instantiate(name="layer")

    def loss(x):
        y, _ = functional(module, state={"weight": w}, inputs=(x,), is_training=True)
        return jnp.sum(y), y

    grad, y = jax.grad(loss, has_aux=True)(jnp.asarray(x))
    # Half a step of each operand's channel; a step of the weights is a 127th of their largest.
    bound = (0.5 / 127) * np.abs(w).sum(0) + (0.5 / 127) * np.abs(w).max(0) * 64 * 1.01
    error = np.abs(y - np.minimum(x, 1.0) @ np.asarray(w))
    assert (error <= bound).all()
    assert (np.abs(y - x @ np.asarray(w)) > bound).any()
    assert np.asarray(grad)[:, 0].any()  # rounding counts as the identity, saturated or not


@pytest.mark.parametrize(
    ("recipe", "option", "value"),
    [
        ("int8", "activation_clip", -1.0),
        ("int8", "activation_clip", 1.5),
        ("mxfp8", "block", 0),
        ("fp8", "dtype", "float8"),
        ("fp8-delayed", "history_length", 0),
    ],
)
def test_what_an_option_cannot_be_names_its_place(recipe, option, value):
    with pytest.raises(ConfigError, match="AX433") as raised:
        layer(recipe, **{option: value}).instantiate(name="layer")
    assert str(raised.value.where).endswith("dot" if "history" in option else f"dot.{option}")
    assert str(value) in raised.value.message


def test_the_table_of_options_has_those_that_there_are():
    """All fields of training recipes but those that say which products, with their defaults."""
    text = DOCS.read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text[text.index("| recipe | options") :], re.M)
    names = ("int8", "fp8", "fp8-delayed", "mxfp8", "int4-qat")
    which = set(host().quantization.load("none").Config().fields())
    for name in names:
        told = " ".join(what for who, what in rows if f"`{name}`" in who)
        if "fp8" in name:
            told += " ".join(what for who, what in rows if who == "all of float8")
        recipe = host().quantization.load(name).Config()
        for field in set(recipe.fields()) - which:
            default = getattr(recipe, field)
            shown = f'"{default}"' if isinstance(default, str) else str(default)
            assert f"`{field}={shown}`" in told or ("dtype" in field and f"`{field}`" in told), (
                field
            )
