"""One call of an op on a mesh of two devices, served by a given kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np

from axcore import ops
from axcore.context import functional
from axcore.errors import OpError
from axcore.module import Module
from axcore.parallel import MeshShape, ProgramTarget, build_mesh
from axcore.plugins import KernelSpec, host

from ._closeness import gradients

__all__ = ["MESH_AXES", "op_function", "run_sharded"]

#: Mesh axis -> logical axes that it splits by default.
MESH_AXES: Mapping[str, tuple[str, ...]] = {
    "data": ("batch",),
    "seq": ("seq",),
    "model": ("heads", "kv_heads", "mlp", "vocab"),
}


class _Call(Module):
    """Calls a function inside of a module, where a target is known."""

    def forward(self, function: Callable[..., Any], arrays: Mapping[str, Any]) -> Any:
        """Returns ``function(arrays)``."""
        return function(arrays)


def op_function(op: str, names: set[str]) -> Callable[..., Any] | None:
    """The op's public function, if it is one of core and takes arguments of these names."""
    function = getattr(ops, op, None) if op in dir(ops) else None
    if function is None or not names <= inspect.signature(function).parameters.keys():
        return None
    return function


def run_sharded(
    spec: KernelSpec,
    kernel: Callable[..., Any],
    call: Callable[[Mapping[str, Any]], Any],
    arrays: Mapping[str, Any],
    axis: str,
    *,
    gradient: bool,
) -> Any:
    """Runs a call with dims split over two devices.

    Args:
        spec: The kernel.
        kernel: Its function, as this machine can run it.
        call: Calls the op's public function.
        arrays: Its arrays.
        axis: The mesh axis of two devices.
        gradient: Whether to differentiate it, as in training.

    Returns:
        Host arrays, of the result and of the gradients by argument (none without ``gradient``);
        or the reason why the kernel refuses.
    """
    mesh = build_mesh(MeshShape.of({axis: 2}), jax.devices()[:2])
    platform = jax.default_backend() if "*" in spec.platforms else spec.platforms[0]
    target = ProgramTarget(
        f"{platform}-2", platform, mesh, kernels={spec.op: (spec.implementation,)}
    )
    module = _Call.Config().instantiate(name="call")

    def run(given: Mapping[str, Any]) -> Any:
        return functional(
            module, state={}, inputs=(call, given), is_training=gradient, target=target
        )[0]

    with (
        mock.patch.object(host().kernels, "load", lambda name: kernel),
        ops.record_choices() as choices,
    ):
        try:
            out = jax.jit(lambda given: (run(given), gradients(run)(given) if gradient else {}))(
                arrays
            )
        except OpError as error:
            if error.code != "AX410":
                raise
            return error.message
    if choices[0].chosen != spec.implementation:
        return "; ".join(r.reason for r in choices[0].refused)
    return jax.tree.map(np.asarray, out)
