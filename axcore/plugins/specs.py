"""What plugins hand over: frozen records of strings, with code only behind lazy targets.

A *target* is a string ``"module:attribute"``; the module is imported when the thing is used, so a
spec costs nothing to list. Every spec is checked when it is made.

Example:
    >>> KernelSpec(
    ...     op="rms_norm",
    ...     implementation="acme",
    ...     platforms=("gpu",),
    ...     target="acme.rms_norm:rms_norm",
    ...     supports="acme.rms_norm:supports",
    ... ).name
    'rms_norm.acme'
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from axcore.config import FrozenMapping

from ._values import check_field, field_error

NOTHING: FrozenMapping[Any] = FrozenMapping()


def pattern_matches(pattern: str, name: str) -> bool:
    """Tells whether ``name`` matches ``pattern``, in which ``*`` and ``?`` are wild cards."""
    return fnmatch.fnmatchcase(name, pattern)


def specificity(pattern: str) -> int:
    """Returns the number of literal characters in ``pattern``: more is more specific."""
    return sum(c not in "*?" for c in pattern)


@dataclass(frozen=True)
class Spec:
    """Base of all specs: a unique name and one line of description.

    Attributes:
        name: Unique among specs of one kind.
        description: One line for listings.

    Raises:
        PluginError: A field has the wrong type or form.
    """

    name: str
    description: str = field(default="", kw_only=True)

    # Fields joined by "." give the name, where the name is not the author's to choose.
    named_by: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}({self.name!r})"
        for f in fields(self):
            if f.name == "name" and self.named_by:
                continue
            checked = check_field(where, f.name, getattr(self, f.name))
            object.__setattr__(self, f.name, checked)
        if self.named_by:
            name = ".".join(str(getattr(self, part)) for part in self.named_by)
            if self.name not in ("", name):
                expected = f"{name!r} (it follows from {', '.join(self.named_by)}; leave it out)"
                raise field_error(where, "name", self.name, expected)
            object.__setattr__(self, "name", name)


@dataclass(frozen=True)
class NamedSpec(Spec):
    """A named thing: modifier, experiment, optimizer, source, tokenizer, writer and the like.

    Attributes:
        target: ``"module:attribute"`` of the class, function or value.
    """

    target: str


@dataclass(frozen=True, kw_only=True)
class KernelSpec(Spec):
    """One implementation of one op.

    Attributes:
        op: Name of the op in ``axcore.ops``, such as ``"attention"``.
        implementation: Name of the implementation, after its mechanism (``"pallas_splash"``).
        platforms: JAX platforms it runs on (``"cpu"``, ``"gpu"``, ``"tpu"``, ``"neuron"``), or
            ``("*",)`` for all.
        target: The function; its signature is that of the op's reference implementation.
        supports: A function ``(call: OpCall) -> str | None``: the reason why it cannot serve the
            call, or None. Must not import JAX. None means: serves every call.
        partitioning: Argument name -> logical axes whose dims it tolerates sharded. Only
            ``axcore.ops`` wraps kernels in ``shard_map``. Empty means: needs every dim whole.
        communicates: Logical axes over whose shards the kernel communicates itself, such as
            ``("seq",)`` for a ring. It serves only calls in which they are split, gets dims of
            these axes as they lie that other kernels get gathered (the positions of keys), and is
            called with ``mesh_axes={axis: mesh axes}`` for its collectives. Only a rule or a user
            lists it.
        compiler_partitioned: Whether it is plain XLA code that the compiler divides over the mesh,
            as the reference is: then it is never wrapped and serves arrays however they lie.
        priority: Order of preference where a rule does not say; higher first.
    """

    name: str = ""
    op: str
    implementation: str
    platforms: tuple[str, ...]
    target: str
    supports: str | None = None
    partitioning: Mapping[str, tuple[str, ...]] = NOTHING
    communicates: tuple[str, ...] = ()
    compiler_partitioned: bool = False
    priority: int = 0

    named_by: ClassVar[tuple[str, ...]] = ("op", "implementation")

    def runs_on(self, platform: str) -> bool:
        """Tells whether the kernel is for ``platform``."""
        return platform in self.platforms or "*" in self.platforms


@dataclass(frozen=True, kw_only=True)
class InstanceTypeSpec(Spec):
    """A family of machines, such as all slices of TPU v5p.

    Attributes:
        pattern: The instance names it covers, such as ``"tpu-v5p-*"``.
        platform: The JAX platform of its devices.
        target: A function ``(name: str) -> Instance``; raises for sizes that do not exist.
        detect: A function ``() -> str | None``: the name of the machine this process runs on, or
            None. Must not import JAX.
        family: Short name of the family for listings.
    """

    name: str = ""
    pattern: str
    platform: str
    target: str
    detect: str | None = None
    family: str

    named_by: ClassVar[tuple[str, ...]] = ("pattern",)


@dataclass(frozen=True, kw_only=True)
class CompilerSpec(Spec):
    """The compiler of one platform, for compiling without a device.

    Whoever provides it owns the platform: its kernels, rules and options are active there.

    Attributes:
        platform: The JAX platform.
        target: A class or object giving topology devices, compile options, the memory limit, how
            running out of memory shows, and known blind spots; see ``axcore.parallel``.
    """

    name: str = ""
    platform: str
    target: str

    named_by: ClassVar[tuple[str, ...]] = ("platform",)


@dataclass(frozen=True, kw_only=True)
class MeshRuleSpec(Spec):
    """How a kind of machine is used, said once for all models.

    Attributes:
        name: Unique within the distribution.
        pattern: Instance names it applies to.
        traits: Traits of the experiment that must all hold, such as ``"moe"``.
        target: The modifiers: a modifier config, a tuple of them, or a function returning either,
            of no arguments, of the traits, or of the traits and the instance.
        reason: Why these values; shown by ``config explain``.
    """

    pattern: str
    traits: tuple[str, ...] = ()
    target: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CompilerOptionSpec(Spec):
    """One compiler option for a kind of machine.

    Attributes:
        name: Unique within the distribution.
        pattern: Instance names it applies to.
        key: The option, such as ``"xla_gpu_enable_triton_gemm"``.
        value: Its value.
        reason: Why.
    """

    pattern: str
    key: str
    value: bool | int | float | str
    reason: str


@dataclass(frozen=True, kw_only=True)
class QuantizationSpec(Spec):
    """A quantization recipe.

    Attributes:
        dtypes: Names of the dtypes it computes in, such as ``("float8_e4m3fn",)``.
        scope: What it covers, such as ``"weights"`` or ``"weights and activations"``.
        target: The modifier that applies it.
    """

    dtypes: tuple[str, ...]
    scope: str
    target: str


@dataclass(frozen=True, kw_only=True)
class LayerSpec(Spec):
    """A layer that configs may name.

    Attributes:
        target: The layer's class.
        tags: Traits that a model has when it holds this layer, such as ``("moe",)``.
    """

    target: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CallbackSpec(Spec):
    """A training callback that configs may name.

    Attributes:
        events: The trainer's events it listens to.
        target: The callback's class.
    """

    events: tuple[str, ...]
    target: str
