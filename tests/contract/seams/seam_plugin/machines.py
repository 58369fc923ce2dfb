"""A made-up machine and its rule."""

from axcore.parallel import MeshShapeModifier
from axcore.plugins import Instance

RULE = MeshShapeModifier.Config(mesh_shape={"data": -1})


def resolve(name):
    """Returns a machine of as many devices as its name says."""
    return Instance(
        name=name,
        family="seam",
        platform="npu",
        num_hosts=1,
        devices_per_host=int(name.removeprefix("seam-")),
        hbm_bytes=1 << 30,
    )
