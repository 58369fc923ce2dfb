"""What XLA makes of quantized products for GPUs that are not there, and what they refuse."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from axcore import experiments, functional
from axcore.config import apply_modifier
from axcore.errors import ConfigError
from axcore.layers import Linear
from axcore.parallel import MeshShape, build_mesh, resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.plugins import host
from axcore.quantization import QuantizeModifier, check_instance
from axcore.train import assemble, plan

aot = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.xdist_group("gpu-aot"),
    pytest.mark.usefixtures("cuda_compiler"),
]


def layer(recipe):
    cfg = Linear.Config(input_dim=512, output_dim=1024, bias=False, compute_dtype="bfloat16")
    return apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe))


def compiled(instance_name, recipe, options=()):
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
    return lowered.compile({**dict(options), **compiler.compile_options(instance)}).as_text()


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


class TestAsShipped:
    """With the options of this package large products are cuBLASLt's."""

    pytestmark = aot

    @pytest.mark.parametrize(("recipe", "dtype"), [("int8", "s8"), ("fp8", "f16")])
    def test_without_a_gpu_integers_stay_and_float8_is_widened(self, recipe, dtype):
        text = compiled("gpu-h100-8", recipe, host().active_for("gpu-h100-8").options())
        dtypes = dict(re.findall(r"%([\w.\-]+) = \(?(\w+)\[", text))
        calls = re.findall(r'custom-call\(([^)]*)\), custom_call_target="__cublas\$lt', text)
        operands = [{dtypes[name.strip().lstrip("%")] for name in c.split(",")} for c in calls]
        assert operands == [{dtype}] * 3


def test_a_gpu_without_float8_refuses_it():
    instance = resolve_instance("gpu-a100-80-8")
    with pytest.raises(ConfigError, match="does not multiply float8_e4m3fn"):
        check_instance(layer("fp8"), instance)
    check_instance(layer("int8"), instance)
    check_instance(layer("fp8"), resolve_instance("gpu-h100-8"))


@pytest.mark.parametrize("machine", ["gpu-b200-8", "gpu-h100-256"])
def test_products_in_blocks_are_refused_on_several_gpus(machine):
    """XLA fails there ("Unable to convert MHLO to StableHLO"), which nobody could act on."""
    with pytest.raises(ConfigError, match="partitioner cannot write `scaled-dot`") as raised:
        check_instance(layer("mxfp8"), resolve_instance(machine))
    assert raised.value.code == "AX990"
    runs = str(raised.value.hint).split(": ")[1].split(", ")
    assert {"fp8", "fp8-delayed"} <= {*runs} and "mxfp8" not in runs
    check_instance(layer("fp8"), resolve_instance(machine))


@pytest.mark.parametrize(
    ("machine", "recipe", "code"),
    [("gpu-b200-8", "mxfp8", "AX990"), ("gpu-a100-80-8", "fp8", "AX435")],
)
def test_no_plan_has_a_recipe_that_the_machine_cannot_run(machine, recipe, code):
    def on_machine(rules):
        return assemble(experiments.get("tiny-lm"), instance=machine, rules=rules)

    with pytest.raises(ConfigError, match=code):
        plan(on_machine, machine, quantizations=(recipe,), verify=0)


def test_one_gpu_multiplies_blocks_with_the_option_that_it_needs():
    cfg = experiments.get("tiny-lm")
    chosen = dict(instance="gpu-b200-1", modifiers=["quantize:recipe=mxfp8"])
    with pytest.raises(ConfigError, match="AX991") as raised:
        assemble(cfg, **chosen)
    flag = str(raised.value.hint).removeprefix("--xla ")
    assert flag == "xla_gpu_enable_triton_gemm=true"
    assemble(cfg, xla=[flag], **chosen)


@pytest.mark.aot
@pytest.mark.xdist_group("gpu-aot")
@pytest.mark.usefixtures("cuda_compiler")
def test_the_reason_for_refusing_blocks_still_holds():
    """When this fails XLA has learned it: take the attribute of the instances away."""
    instance = resolve_instance("gpu-b200-8")
    compiler = compiler_for(instance)
    compiler.prepare()
    mesh = build_mesh(MeshShape(fsdp=-1), compiler.devices(instance))

    def array(shape, dtype, *spec):
        place = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    def product(a, b, a_scale, b_scale):
        last = (((1,), (1,)), ((), ()))
        return jax.lax.scaled_dot(
            a, b, lhs_scale=a_scale, rhs_scale=b_scale, dimension_numbers=last
        )

    lowered = jax.jit(product).lower(
        array((512, 128), "float8_e4m3fn", "fsdp"),
        array((256, 128), "float8_e4m3fn"),
        array((512, 4), "float8_e8m0fnu", "fsdp"),
        array((256, 4), "float8_e8m0fnu"),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="MHLO to StableHLO"):
        lowered.compile(compiler.compile_options(instance))
