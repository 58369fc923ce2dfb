"""Compiling for machines that are not there.

- :class:`Compiler`: what a platform's compiler offers (the ``axcore_compilers`` hook);
- :func:`compiler_for`: the one that serves an instance.
"""

from axcore.parallel.aot._compiler import Compiler, OutOfMemory, compiler_for

__all__ = ["Compiler", "OutOfMemory", "compiler_for"]
