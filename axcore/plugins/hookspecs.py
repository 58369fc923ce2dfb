"""The hooks that a plugin may implement, all of them optional.

A plugin is a module of hook functions and strings, named by an entry point in the group
``axcore``. Each hook takes no arguments (arguments may be added within a major version, never
removed) and returns an iterable of specs. Hooks run once, when the plugin host starts.

Example:
    ```python
    from axcore.plugins import KernelSpec, hookimpl

    @hookimpl
    def axcore_kernels():
        return [KernelSpec(op="rms_norm", implementation="acme", platforms=("gpu",),
                           target="acme.rms_norm:rms_norm", supports="acme.rms_norm:supports")]
    ```
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

from . import specs

PROJECT = "axcore"
PREFIX = "axcore_"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


def axcore_kernels() -> Iterable[specs.KernelSpec]:
    """Implementations of the ops in ``axcore.ops``.

    Combining: the pair (op, implementation) is unique. A kernel is used where the selected
    instance belongs to its distribution, or where ``use`` names the distribution.
    """
    ...


def axcore_instance_types() -> Iterable[specs.InstanceTypeSpec]:
    """Families of machines that ``--instance`` may name.

    Combining: the pattern is unique. The distribution owns the instances of its pattern; an
    instance name that two distributions' patterns cover is an error when it is used.
    """
    ...


def axcore_compilers() -> Iterable[specs.CompilerSpec]:
    """Compilers that work without a device, one per platform.

    Combining: the platform is unique. The distribution owns the platform.
    """
    ...


def axcore_mesh_rules() -> Iterable[specs.MeshRuleSpec]:
    """Modifiers that fit an experiment to a kind of machine.

    Combining: of the active rules that match, the most specific wins (literal characters of the
    pattern, then number of traits); a tie is an error. Names are unique within a distribution.
    """
    ...


def axcore_compiler_options() -> Iterable[specs.CompilerOptionSpec]:
    """Compiler options for a kind of machine.

    Combining: all active options that match apply; two values for one key are an error. Names are
    unique within a distribution.
    """
    ...


def axcore_quantization() -> Iterable[specs.QuantizationSpec]:
    """Quantization recipes that a config or a mesh rule may name.

    Combining: the name is unique.
    """
    ...


def axcore_layers() -> Iterable[specs.LayerSpec]:
    """Layers that a config may hold.

    Combining: the name is unique.
    """
    ...


def axcore_modifiers() -> Iterable[specs.NamedSpec]:
    """Modifiers for ``--modifier NAME``; the target is a ``Modifier`` class.

    Combining: the name is unique; ``DISTRIBUTION:WORD`` is the custom.
    """
    ...


def axcore_experiments() -> Iterable[specs.NamedSpec]:
    """Experiments of a catalog; the target is a function that returns a trainer config.

    Combining: the name is unique.
    """
    ...


def axcore_optimizers() -> Iterable[specs.NamedSpec]:
    """Optimizers; the target is a callable that returns an optax transformation.

    Combining: the name is unique.
    """
    ...


def axcore_sources() -> Iterable[specs.NamedSpec]:
    """Data sources; the target is a configurable class.

    Combining: the name is unique.
    """
    ...


def axcore_tokenizers() -> Iterable[specs.NamedSpec]:
    """Tokenizers; the target is a configurable class.

    Combining: the name is unique.
    """
    ...


def axcore_writers() -> Iterable[specs.NamedSpec]:
    """Metric writers; the target is a configurable class.

    Combining: the name is unique.
    """
    ...


def axcore_checkpointers() -> Iterable[specs.NamedSpec]:
    """Checkpointers; the target is a configurable class.

    Combining: the name is unique.
    """
    ...


def axcore_launchers() -> Iterable[specs.NamedSpec]:
    """Launchers for ``axcore launch``; the target is a configurable class.

    Combining: the name is unique.
    """
    ...


def axcore_converters() -> Iterable[specs.NamedSpec]:
    """Converters of foreign models for ``axcore convert``.

    The name is ``FORMAT:ARCHITECTURE`` (formats: ``hf``, ``gguf``, ``npz``), the target an instance
    or class of ``axcore.checkpoint.convert.ModelFamily``.

    Combining: the name is unique.
    """
    ...


def axcore_commands() -> Iterable[specs.NamedSpec]:
    """Commands of the ``axcore`` program; the target is a function ``add_parser(subparsers)``.

    Combining: the name is unique.
    """
    ...


def axcore_callbacks() -> Iterable[specs.CallbackSpec]:
    """Training callbacks; those that a config names run, isolated from each other.

    Combining: the name is unique.
    """
    ...


@dataclass(frozen=True)
class Hook:
    """One hook.

    Attributes:
        name: The hook's name, such as ``"axcore_kernels"``.
        spec: The class of the specs it returns.
        doc: Its documentation.
    """

    name: str
    spec: type[specs.Spec]
    doc: str

    @property
    def kind(self) -> str:
        """What it provides: the name without the prefix, also the registry's name."""
        return self.name.removeprefix(PREFIX)

    @property
    def qualified(self) -> bool:
        """Whether names are unique within a distribution only: rules and options are candidates."""
        return self.spec in (specs.MeshRuleSpec, specs.CompilerOptionSpec)


def _hooks() -> tuple[Hook, ...]:
    found: list[Hook] = []
    for name, function in globals().items():
        if name.startswith(PREFIX) and callable(function):
            hookspec(function)
            returns = typing.get_type_hints(function)["return"]
            found.append(Hook(name, typing.get_args(returns)[0], inspect.getdoc(function) or ""))
    return tuple(found)


HOOKS: tuple[Hook, ...] = _hooks()
