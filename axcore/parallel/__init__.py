"""Parallelism as configuration: meshes, sharding rules, instances and what a program is built for.

Layers name the dims of parameters and activations; a mesh shape and rules decide where they go.
Nothing here is known to layers: they call ``ctx.constrain(x, axes)`` and ``ctx.target``, which
:class:`ProgramTarget` implements.
"""

from axcore.parallel.arrays import make_global_array, process_rows
from axcore.parallel.axes import LOGICAL_AXES, MESH_AXES, Axis, AxisRule
from axcore.parallel.compiling import (
    CompiledStep,
    LoweredStep,
    MemoryUse,
    compile_step,
    lower_step,
)
from axcore.parallel.fit import RematChoice, experts_sharded, fully_sharded
from axcore.parallel.instance_rules import (
    AppliedOption,
    AppliedRule,
    Kept,
    RuleChange,
    RuleReport,
    apply_instance_rules,
)
from axcore.parallel.instances import (
    detect,
    peak_flops,
    prepare_host,
    resolve_instance,
    select_devices,
)
from axcore.parallel.mesh import MeshShape, abstract_mesh, build_mesh
from axcore.parallel.modifiers import (
    CollectiveMatmulModifier,
    MeshShapeModifier,
    PipelineModifier,
    RematModifier,
    SequenceParallelModifier,
    SetModifier,
)
from axcore.parallel.rule_file import MeshRules, read_mesh_rules
from axcore.parallel.rules import (
    DEFAULT_ACTIVATION_RULES,
    DEFAULT_CACHE_RULES,
    DEFAULT_PARAM_RULES,
    RuleTable,
    ShardingRules,
)
from axcore.parallel.sharding import (
    ArraySpec,
    ShardedBytes,
    batch_sharding,
    bytes_per_device,
    named_sharding,
    named_shardings,
    partition_spec,
    replicated,
)
from axcore.parallel.target import ProgramTarget
from axcore.parallel.traits import Traits, compute_traits
from axcore.parallel.xla_options import check_compiler_options, parse_xla, platform_options

__all__ = [
    "DEFAULT_ACTIVATION_RULES",
    "DEFAULT_CACHE_RULES",
    "DEFAULT_PARAM_RULES",
    "LOGICAL_AXES",
    "MESH_AXES",
    "AppliedOption",
    "AppliedRule",
    "ArraySpec",
    "Axis",
    "AxisRule",
    "CollectiveMatmulModifier",
    "CompiledStep",
    "Kept",
    "LoweredStep",
    "MemoryUse",
    "MeshRules",
    "MeshShape",
    "MeshShapeModifier",
    "PipelineModifier",
    "ProgramTarget",
    "RematChoice",
    "RematModifier",
    "RuleChange",
    "RuleReport",
    "RuleTable",
    "SequenceParallelModifier",
    "SetModifier",
    "ShardedBytes",
    "ShardingRules",
    "Traits",
    "abstract_mesh",
    "apply_instance_rules",
    "batch_sharding",
    "build_mesh",
    "bytes_per_device",
    "check_compiler_options",
    "compile_step",
    "compute_traits",
    "detect",
    "experts_sharded",
    "fully_sharded",
    "lower_step",
    "make_global_array",
    "named_sharding",
    "named_shardings",
    "parse_xla",
    "partition_spec",
    "peak_flops",
    "platform_options",
    "prepare_host",
    "process_rows",
    "read_mesh_rules",
    "replicated",
    "resolve_instance",
    "select_devices",
]
