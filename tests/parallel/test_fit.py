"""Mesh, remat and microbatches from a model's traits and a machine's memory; expected by hand."""

import dataclasses

import pytest

from axcore.parallel import MeshShape, RematChoice, Traits, experts_sharded, fully_sharded
from axcore.plugins import Instance
from axcore.remat import Remat

SAVED = Remat("sites", save=("attn_out",))
CHOICES = (RematChoice(SAVED, whole=2, split=4), RematChoice(Remat("full"), whole=1))
# 10 layers of width 1,000: each unit of width is 20 kB a token in bfloat16.
MODEL = Traits(
    parameter_bytes=10**9,
    seq_len=1000,
    batch_size=64,
    num_layers=10,
    embed_dim=1000,
    tensor_parts=4,
    rematerializes=True,
)


def machine(devices=8, slices=1, hbm_bytes=10**9):
    return Instance(
        name="acme",
        family="acme",
        platform="cpu",
        num_hosts=1,
        devices_per_host=devices,
        num_slices=slices,
        hbm_bytes=hbm_bytes,
    )


def fitted(traits, instance, **kwargs):
    """Returns mesh shape, remat and microbatches."""
    mesh, *rest = fully_sharded(traits, instance, choices=CHOICES, **kwargs)
    remat = next((m.remat for m in rest if "remat" in m.fields()), None)
    values = next((m.values for m in rest if "values" in m.fields()), {})
    return mesh.mesh_shape, remat, values.get("accumulation_steps", 1)


def test_parameters_are_sharded_inside_slices_and_copied_across():
    shape, _, _ = fitted(MODEL, machine(devices=16, slices=2))
    assert shape == MeshShape(fsdp=-1, across_slices={"data": -1})
    assert {n: s for n, s in shape.sizes(16, 2).items() if s > 1} == {"data": 2, "fsdp": 8}


@pytest.mark.parametrize(
    ("hbm_bytes", "remat", "steps"),
    [
        # Parameters, gradients and moments take 0.5 GB a device; 60 % of the rest is for saved
        # activations, 120 kB a token with attention saved and 20 kB without; 8,000 tokens a device.
        (2.2e9, SAVED, 1),  # 8,500 tokens fit
        (2.0e9, SAVED, 2),  # 7,500
        (1.4e9, SAVED, 2),  # 4,500
        (1.2e9, Remat("full"), 1),  # 3,500 would be too few; 21,000 without
        (0.7e9, Remat("full"), 2),  # 6,000 without
        (0.4e9, Remat("full"), 8),  # not even parameters fit: one row at a time
    ],
)
def test_memory_decides_what_is_saved_and_how_many_microbatches(hbm_bytes, remat, steps):
    assert fitted(MODEL, machine(hbm_bytes=int(hbm_bytes)))[1:] == (remat, steps)


def test_split_tensors_take_their_part_of_the_width():
    # Split in four: 2 + 4/4 units, 60 kB a token; 32,000 tokens for each four devices.
    shape, remat, steps = fitted(MODEL, machine(hbm_bytes=int(2.2e9)), model=4)
    assert (shape.fsdp, shape.model) == (-1, 4)
    assert (remat, steps) == (SAVED, 2)  # 17,000 fit


@pytest.mark.parametrize(("parts", "expected"), [(4, 4), (6, 2), (1, 1)])
def test_tensors_are_split_by_what_divides_them_and_the_devices(parts, expected):
    traits = dataclasses.replace(MODEL, tensor_parts=parts)
    assert fitted(traits, machine(), model=4)[0].model == expected


@pytest.mark.parametrize(("devices", "expected"), [(64, 1), (128, 2), (256, 4), (512, 4)])
def test_fewer_rows_than_devices_split_tensors_up_to_the_limit(devices, expected):
    assert fitted(MODEL, machine(devices=devices), max_model=4)[0].model == expected


def test_what_an_experiment_does_not_say_is_left_alone():
    assert fitted(Traits(), machine()) == (
        MeshShape(fsdp=-1, across_slices={"data": -1}),
        None,
        1,
    )


# Layers of 8 experts of 100 MB each in float32: 400 MB of a layer's weights in bfloat16.
MIXTURE = dataclasses.replace(
    MODEL,
    parameter_bytes=9 * 10**9,
    expert_bytes=8 * 10**9,
    num_experts=8,
    experts_per_token=2.0,
    head_features=3000,
    seq_len=100,
)


@pytest.mark.parametrize(
    ("hbm_bytes", "expert"),
    # Three layers of 400 MB may take a third of the memory.
    [(10e9, 1), (3e9, 2), (1.5e9, 4)],
)
def test_experts_are_in_as_many_groups_as_their_gathered_weights_need(hbm_bytes, expert):
    shape = experts_sharded(MIXTURE, machine(devices=8, hbm_bytes=int(hbm_bytes)))[0].mesh_shape
    assert (shape.expert, shape.fsdp, shape.model) == (expert, -1, 1)


def test_experts_are_grouped_where_gathering_takes_longer_than_computing():
    chip = dataclasses.replace(
        machine(devices=8, hbm_bytes=10**11),
        peak_flops={"bfloat16": 1e13},
        ici_bandwidth_bytes=1e11,
    )
    # By hand: 8 * (0.25e9 + 0.5e9) / 10 weights * 800 tokens / 0.4e13 FLOP/s = 0.12 s a layer,
    # three times 400 MB at 1e11 bytes/s 0.012 s; through a link of a twentieth 0.24 s.
    slow = dataclasses.replace(chip, ici_bandwidth_bytes=5e9)
    assert experts_sharded(MIXTURE, chip)[0].mesh_shape.expert == 1
    assert experts_sharded(MIXTURE, slow)[0].mesh_shape.expert == 2
