"""What the TPU compiler makes of quantized products, and which chips refuse them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from axcore import functional
from axcore.config import apply_modifier
from axcore.errors import ConfigError
from axcore.layers import Linear
from axcore.parallel import resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.quantization import QuantizeModifier, check_instance


def layer(recipe):
    cfg = Linear.Config(input_dim=256, output_dim=512, bias=False, compute_dtype="bfloat16")
    return apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe))


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.xdist_group("libtpu")
@pytest.mark.usefixtures("libtpu")
def test_all_three_products_of_int8_run_on_the_matrix_unit_of_v5e():
    instance = resolve_instance("tpu-v5e-8")
    compiler = compiler_for(instance)
    compiler.prepare()
    sharding = SingleDeviceSharding(compiler.devices(instance)[0])
    module = layer("int8").instantiate(name="layer")

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def loss(weight, x, c):
        y, _ = functional(module, state={"weight": weight}, inputs=(x,), is_training=True)
        return jnp.sum((y * c).astype(jnp.float32))

    args = (
        struct((256, 512), "float32"),
        struct((1024, 256), "bfloat16"),
        struct((1024, 512), "bfloat16"),
    )
    lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args)
    text = lowered.compile(compiler.compile_options(instance)).as_text()
    # Matrix products are convolutions to this compiler; sums of int8 are int32.
    results = re.findall(r"= (\w+)\[[\d,]*\]\S* convolution\(", text)
    assert results == ["s32"] * 3


def test_a_chip_without_float8_refuses_it_and_says_what_it_can():
    with pytest.raises(ConfigError) as error:
        check_instance(layer("fp8"), resolve_instance("tpu-v5e-16"))
    assert error.value.code == "AX435"
    assert "tpu-v5e-16 does not multiply float8_e4m3fn" in error.value.message
    assert "int8" in error.value.hint
    check_instance(layer("int8"), resolve_instance("tpu-v5e-16"))
    check_instance(layer("fp8"), resolve_instance("tpu-v6e-16"))
