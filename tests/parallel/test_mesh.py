import jax
import pytest
from jax.sharding import AxisType

from axcore.errors import ShardingError
from axcore.parallel import MESH_AXES, MeshShape, build_mesh


def test_axes_are_in_order_and_auto():
    mesh = build_mesh(MeshShape(data=2, model=-1), jax.devices())
    assert mesh.axis_names == ("pipeline", "data", "expert", "fsdp", "seq", "model") == MESH_AXES
    assert dict(mesh.shape) == dict(pipeline=1, data=2, expert=1, fsdp=1, seq=1, model=4)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_mesh_may_use_a_part_of_the_devices():
    assert build_mesh(MeshShape(fsdp=-1), jax.devices()[:2]).shape["fsdp"] == 2


@pytest.mark.parametrize(
    ("shape", "devices", "expected"),
    [
        (MeshShape(data=-1), 8, {"data": 8}),
        (MeshShape(data=-1, fsdp=4), 8, {"data": 2, "fsdp": 4}),
        (MeshShape(pipeline=2, expert=2, seq=2), 8, {"pipeline": 2, "expert": 2, "seq": 2}),
        (MeshShape(), 1, {}),
    ],
)
def test_minus_one_takes_the_rest(shape, devices, expected):
    sizes = shape.sizes(devices)
    assert {k: v for k, v in sizes.items() if v > 1} == expected


def test_slices_go_to_data_unless_said_otherwise():
    assert MeshShape(fsdp=-1).sizes(8, num_slices=2) == MeshShape(data=2, fsdp=4).sizes(8)
    shape = MeshShape(fsdp=-1, across_slices={"fsdp": 2, "data": 2})
    assert shape.sizes(16, num_slices=4) == MeshShape(data=2, fsdp=8).sizes(16)


def test_devices_of_one_slice_stay_together():
    mesh = build_mesh(MeshShape(fsdp=-1), jax.devices(), num_slices=2)
    by_data = mesh.devices.reshape(2, 4)
    assert [[d.id for d in row] for row in by_data] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_part_across_slices_is_the_outer_one():
    shape = MeshShape(data=2, fsdp=-1, across_slices={"fsdp": 2})
    mesh = build_mesh(shape, jax.devices(), num_slices=2)
    ids = [[d.id for d in row] for row in mesh.devices.reshape(2, 4)]
    assert ids == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_product_that_does_not_fit_names_sizes_devices_and_what_works():
    with pytest.raises(ShardingError) as info:
        MeshShape(fsdp=3, model=2).sizes(8)
    message = str(info.value)
    assert "fsdp=3 model=2" in message
    assert "multiply to 6, expected exactly 8" in message
    assert "nearest that work: fsdp=4 model=2" in message


def test_a_rest_that_does_not_fit_names_what_works():
    with pytest.raises(ShardingError, match=r"expected a divisor of 8(.|\n)*data=-1 model=2"):
        MeshShape(data=-1, model=3).sizes(8)


def test_slices_that_do_not_fit_are_named():
    with pytest.raises(ShardingError, match=r"across_slices.*fsdp=3(.|\n)*4"):
        MeshShape(fsdp=-1, across_slices={"fsdp": 3, "data": 1}).sizes(8, num_slices=4)
    with pytest.raises(ShardingError, match="9 devices do not divide into 2 slices"):
        MeshShape(data=-1).sizes(9, num_slices=2)


@pytest.mark.parametrize("size", [0, -2, 1.0, True, "2"])
def test_an_impossible_size_names_its_axis(size):
    with pytest.raises(ShardingError, match="'fsdp' has size"):
        MeshShape(fsdp=size)


def test_only_one_axis_takes_the_rest():
    with pytest.raises(ShardingError, match="'data' and 'fsdp' are all -1"):
        MeshShape(data=-1, fsdp=-1)


def test_a_mapping_is_a_shape_too():
    assert MeshShape.of({"data": -1, "model": 2}) == MeshShape(data=-1, model=2)
    with pytest.raises(ShardingError, match=r"unknown mesh axis 'modle'(.|\n)*'model'"):
        MeshShape.of({"modle": 2})


def test_shapes_are_values():
    a = MeshShape(data=-1, across_slices={"data": 2})
    assert a == MeshShape(data=-1, across_slices={"data": 2}) and len({a, a}) == 1


def test_a_mesh_for_many_more_devices_says_how_many():
    with pytest.raises(ShardingError) as caught:
        MeshShape(pipeline=2, fsdp=4).sizes(1)
    assert "a machine of 8 devices" in str(caught.value.hint)
