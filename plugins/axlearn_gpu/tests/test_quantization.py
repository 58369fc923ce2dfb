"""What XLA makes of quantized products for GPUs that are not there, and what they refuse."""

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

aot = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.xdist_group("gpu-aot"),
    pytest.mark.usefixtures("cuda_compiler"),
]


def layer(recipe):
    cfg = Linear.Config(input_dim=512, output_dim=1024, bias=False, compute_dtype="bfloat16")
    return apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe))


def compiled(instance_name, recipe):
    """Returns the program of one linear layer's forward and backward pass, as text."""
    instance = resolve_instance(instance_name)
    compiler = compiler_for(instance)
    compiler.prepare()
    sharding = SingleDeviceSharding(compiler.devices(instance)[0])
    module = layer(recipe).instantiate(name="layer")

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    state = jax.tree.map(lambda spec: struct(spec.shape, spec.dtype), module.parameter_specs())

    def loss(weight, x, state, c):
        state = {**state, "weight": weight}
        y, _ = functional(module, state=state, inputs=(x,), is_training=True)
        return jnp.sum((y * c).astype(jnp.float32))

    def step(state, x, c):
        return jax.value_and_grad(loss, (0, 1))(state["weight"], x, state, c)

    args = (state, struct((2048, 512), "bfloat16"), struct((2048, 1024), "bfloat16"))
    lowered = jax.jit(step).lower(*args)
    return lowered.compile(compiler.compile_options(instance)).as_text()


def products(text, op="dot"):
    """Returns the operand dtypes of each product in a fused matmul."""
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    # Names are unique within a computation only.
    found = []
    for body in re.split(r"\n(?=%\S+ \()", text):
        own = {**dtypes, **dict(re.findall(r"%([\w.\-]+) = (\w+)\[", body))}
        for operands in re.findall(rf" {op}\(([^)]*)\)", body):
            found.append({own[name.strip().lstrip("%")] for name in operands.split(",")})
    return found


@pytest.mark.parametrize("case", ["H100 fp8", "H100 fp8-delayed", "H100 int8", "B200 mxfp8"])
class TestCompiled:
    pytestmark = aot

    def test_all_three_products_run_on_few_bits(self, case):
        gpu, recipe = case.split()
        text = compiled(f"gpu-{gpu.lower()}-8", recipe)
        if recipe == "mxfp8":
            found = products(text, "scaled-dot")
            want = [{"f8e4m3fn", "f8e8m0fnu"}]
        elif recipe == "int8":
            found, want = products(text), [{"s8"}]
        else:
            found, want = products(text), [{"f8e4m3fn"}, {"f8e4m3fn", "f8e5m2"}]
        assert len(found) == 3, found
        assert all(dtypes in want for dtypes in found), found


def test_a_gpu_without_float8_refuses_it():
    instance = resolve_instance("gpu-a100-80-8")
    with pytest.raises(ConfigError, match="does not multiply float8_e4m3fn"):
        check_instance(layer("fp8"), instance)
    check_instance(layer("int8"), instance)
    check_instance(layer("fp8"), resolve_instance("gpu-h100-8"))
