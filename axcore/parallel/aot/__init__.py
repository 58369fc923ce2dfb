"""Compiling for machines that are not there.

- :class:`Compiler`: what a platform's compiler offers (the ``axcore_compilers`` hook);
- :func:`compiler_for`: the one that serves an instance;
- :func:`compile_for`: what it makes of a program: memory, collectives, largest buffers.

:func:`axcore.train.aot` does all of it for an experiment's training step.
"""

from axcore.parallel.aot._buffers import Buffer
from axcore.parallel.aot._collectives import Collective
from axcore.parallel.aot._compile import CompileResult, compile_for
from axcore.parallel.aot._compiler import Compiler, OutOfMemory, compiler_for

__all__ = [
    "Buffer",
    "Collective",
    "CompileResult",
    "Compiler",
    "OutOfMemory",
    "compile_for",
    "compiler_for",
]
