"""The Pallas kernels, built by the TPU compiler for four generations; nothing runs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from axcore import Module, experiments, functional, ops
from axcore.ops.masks import Causal, SegmentIds
from axcore.parallel import (
    MeshShape,
    ProgramTarget,
    apply_instance_rules,
    build_mesh,
    resolve_instance,
)
from axcore.parallel.aot import compiler_for
from axcore.remat import Remat, site
from axlearn_tpu.pallas_splash import RESIDUALS, attention_splash

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.xdist_group("libtpu"),
    pytest.mark.usefixtures("libtpu"),
]
ROWS_AND_HEADS = MeshShape(fsdp=-1, model=2)
MACHINES = ("tpu-v5e-4", "tpu-v5p-8", "tpu-v6e-4", "tpu-7x-4")


class Attend(Module):
    def forward(self, q, k, v, ids):
        return ops.attention(q, k, v, mask=Causal() & SegmentIds(), q_segment_ids=ids)


class Multiply(Module):
    def forward(self, rows, weights, sizes):
        return ops.grouped_matmul(rows, weights, sizes)


class Decode(Module):
    def forward(self, *arrays):
        return ops.paged_attention(*arrays)


def kernels(instance):
    """The lists that an experiment gets on an instance."""
    cfg, _ = apply_instance_rules(experiments.get("tiny-lm"), instance)
    return {op: rule.implementations for op, rule in cfg.ops.items()}


def compiled(module, name, arrays, *, gradient, shape=ROWS_AND_HEADS):
    """Returns a module call's HLO for an instance, split over 2 x 2 or more devices, and choices.

    Args:
        module: Class of a module without parameters.
        name: The instance.
        arrays: (shape, dtype, partition spec) of each input.
        gradient: Numbers of the inputs to differentiate by, or None.
        shape: Of the mesh.
    """
    instance = resolve_instance(name)
    compiler = compiler_for(instance)
    compiler.prepare()
    mesh = build_mesh(shape, compiler.devices(instance))
    target = ProgramTarget.for_instance(instance, mesh, kernels=kernels(name))
    root = module.Config().instantiate(name="m")

    def call(*inputs):
        training = gradient is not None
        out, _ = functional(root, state={}, inputs=inputs, is_training=training, target=target)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    fn = call if gradient is None else jax.value_and_grad(call, gradient)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arrays
    ]
    with ops.record_choices() as choices:
        lowered = jax.jit(fn).lower(*structs)
    text = lowered.compile(compiler.compile_options(instance)).as_text()
    return text, choices[0].chosen


@pytest.mark.parametrize("name", MACHINES)
def test_splash_attention_forward_and_backward_on_shards(name):
    """Rows and heads are split; the custom calls are the three kernels, and no (t, s) is left."""
    heads = PartitionSpec("fsdp", None, "model", None)
    text, chosen = compiled(
        Attend,
        name,
        [
            ((8, 1000, 4, 128), "bfloat16", heads),
            ((8, 1000, 2, 128), "bfloat16", heads),
            ((8, 1000, 2, 128), "bfloat16", heads),
            ((8, 1000), "int32", PartitionSpec("fsdp", None)),
        ],
        gradient=(0, 1, 2),
    )
    assert chosen == "pallas_splash"
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert "1024,1024]" not in text and "1000,1000]" not in text


@pytest.mark.parametrize("name", MACHINES)
def test_megablox_forward_and_backward_on_shards(name):
    """Columns are split: each device multiplies all rows with its part of every matrix."""
    whole = PartitionSpec()
    text, chosen = compiled(
        Multiply,
        name,
        [
            ((2048, 1024), "bfloat16", whole),
            ((8, 1024, 1024), "bfloat16", PartitionSpec(None, None, "model")),
            ((8,), "int32", whole),
        ],
        gradient=(0, 1),
        shape=MeshShape(data=1, model=-1),
    )
    assert chosen == "pallas_megablox"
    assert text.count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.parametrize("name", MACHINES)
def test_paged_attention_on_shards(name):
    pages = ((2, 64, 16, 128), "bfloat16", PartitionSpec("model"))
    text, chosen = compiled(
        Decode,
        name,
        [
            ((8, 16, 128), "bfloat16", PartitionSpec("fsdp", "model")),
            pages,
            pages,
            ((8,), "int32", PartitionSpec("fsdp")),
            ((8, 40), "int32", PartitionSpec("fsdp")),
        ],
        gradient=None,
    )
    assert chosen == "pallas_paged"
    assert text.count('custom_call_target="tpu_custom_call"') == 1


def test_the_forward_kernel_runs_once_where_its_results_are_saved():
    """Rematerialized, it is a fourth kernel, unless the site that it marks is saved."""
    instance = resolve_instance("tpu-v5e-4")
    compiler = compiler_for(instance)
    compiler.prepare()
    device = SingleDeviceSharding(compiler.devices(instance)[0])
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16, sharding=device)

    def block(x):
        y = attention_splash(x, x, x, mask=Causal(), logit_scale=0.1)
        return site(y * 2, "attn_out")

    def num_kernels(remat):
        wrapped = remat.wrap(block, platform="tpu")

        def loss(x):
            x, _ = jax.lax.scan(lambda x, _: (wrapped(x), None), x, None, length=4)
            return jnp.sum(x.astype(jnp.float32))

        text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
        return text.count('custom_call_target="tpu_custom_call"')

    assert num_kernels(Remat("sites", save=("attn_out",))) == 4
    assert num_kernels(Remat("sites", save=(RESIDUALS,))) == 3
