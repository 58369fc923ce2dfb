"""Core's own mesh rules: those of the CPU, named in ``axcore.builtin``."""

from axcore.parallel.mesh import MeshShape
from axcore.parallel.modifiers import MeshShapeModifier

__all__ = ["CPU", "CPU_SIMULATED"]

CPU = MeshShapeModifier.Config(mesh_shape=MeshShape(data=-1))
CPU_SIMULATED = MeshShapeModifier.Config(mesh_shape=MeshShape(fsdp=-1))
