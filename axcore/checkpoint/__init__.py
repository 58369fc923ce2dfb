"""Save, verify and restore the state of a run, on any mesh and in any stack form.

``BaseCheckpointer`` is the role that ``Trainer.Config.checkpointer`` asks for,
``OrbaxCheckpointer`` the implementation on orbax-checkpoint (imported on first use).
``new_directory`` makes a directory whole or not at all. ``stack_form`` converts state trees between
unrolled and scanned layer stacks.
"""

from axcore.checkpoint._new_directory import check_new, new_directory
from axcore.checkpoint._orbax import OrbaxCheckpointer
from axcore.checkpoint.base import BaseCheckpointer

__all__ = [
    "BaseCheckpointer",
    "OrbaxCheckpointer",
    "check_new",
    "new_directory",
    "stack_form",
]

from axcore.checkpoint import stack_form
