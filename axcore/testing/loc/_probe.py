"""What a feature's check may look at: the same experiment before and after, built and run."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.context import functional
from axcore.errors import CliError
from axcore.parallel import ProgramTarget

__all__ = ["GateError", "Probe", "build", "fill"]

_BATCH, _SEQ, _VOCAB = 2, 8, 32


class GateError(CliError):
    """A feature that does not do what it should in a generated code base."""

    default_code = "AX873"


def build(cfg: Any) -> Any:
    """Builds the model of an experiment: the module tree, no arrays."""
    return cfg.model.instantiate(name="model")


def fill(model: Any) -> dict[str, Any]:
    """Returns parameters that depend on their path and shape alone, scales around 1.

    Compiling a model's own initializers would take most of a gate's time.
    """

    def leaves(tree: Mapping[str, Any], above: str) -> dict[str, Any]:
        filled: dict[str, Any] = {}
        for name, spec in tree.items():
            path = f"{above}/{name}"
            if isinstance(spec, Mapping):
                filled[name] = leaves(spec, path)
                continue
            rng = np.random.default_rng(zlib.crc32(path.encode()))
            values = 0.3 * rng.standard_normal(spec.shape) + (name == "scale")
            filled[name] = jnp.asarray(values, spec.dtype)
        return filled

    return leaves(model.parameter_specs(), "")


class Probe:
    """One experiment of a code base, before and after.

    Attributes:
        before: The experiment's config.
        after: Its config with the feature.
        input_ids: int32 (2, 8).
    """

    def __init__(self, before: Any, after: Any, before_model: Any, after_model: Any):
        self.before = before
        self.after = after
        self.before_model = before_model
        self.after_model = after_model
        ids = np.arange(_BATCH * _SEQ).reshape(_BATCH, _SEQ) * 7 % _VOCAB
        self.input_ids = ids.astype(np.int32)

    @functools.cached_property
    def before_params(self) -> dict[str, Any]:
        """Parameters of the model before; those of equal path and shape are equal after."""
        return fill(self.before_model)

    @functools.cached_property
    def after_params(self) -> dict[str, Any]:
        """Parameters of the model after."""
        return fill(self.after_model)

    @functools.cached_property
    def before_logits(self) -> np.ndarray:
        """float32 (2, 8, vocab_size) before."""
        return self.logits(self.before_model, self.before_params)

    @functools.cached_property
    def after_logits(self) -> np.ndarray:
        """float32 (2, 8, vocab_size) after."""
        return self.logits(self.after_model, self.after_params)

    def build(self, cfg: Any) -> Any:
        """Builds the model of another config."""
        return build(cfg)

    def logits(
        self,
        model: Any,
        params: Any,
        *,
        input_ids: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        target: Any = None,
    ) -> np.ndarray:
        """Runs a model.

        Args:
            model: It.
            params: Its parameters.
            input_ids: int (batch, seq); by default those of the probe.
            positions: int (batch, seq); None counts from 0.
            target: What the program is for; None for this machine.

        Returns:
            float32 (batch, seq, vocab_size).
        """
        ids = jnp.asarray(self.input_ids if input_ids is None else input_ids)
        inputs: dict[str, Any] = {"input_ids": ids}
        if positions is not None:
            inputs["positions"] = jnp.asarray(positions, jnp.int32)
        logits, _ = functional(
            model, state=params, inputs=inputs, is_training=False, method="logits", target=target
        )
        return np.asarray(logits, np.float32)

    def target(self, cfg: Any, instance: Any) -> ProgramTarget:
        """Returns what a run of ``cfg`` on an instance compiles for, on one device."""
        kernels = {op: r.implementations for op, r in cfg.ops.items() if r.implementations}
        return ProgramTarget.for_instance(instance, None, cfg.sharding_rules, kernels=kernels)

    def scaled(self, params: Any, factor: float, where: Callable[[str], bool]) -> Any:
        """Returns parameters of which those are multiplied whose path ``where`` accepts."""

        def one(path: Any, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return x * factor if where(name) else x

        return jax.tree_util.tree_map_with_path(one, params)

    def require(self, holds: Any, what: str) -> None:
        """Checks a statement.

        Raises:
            GateError: It does not hold.
        """
        if not holds:
            raise GateError(f"expected, and not so: {what}")

    def same(self, a: Any, b: Any, what: str, tolerance: float = 1e-4) -> None:
        """Checks that two arrays agree, relative to the larger magnitude.

        Raises:
            GateError: They do not.
        """
        error = _distance(a, b)
        self.require(error <= tolerance, f"{what} (difference {error:.1e})")

    def differ(self, a: Any, b: Any, what: str, at_least: float = 1e-3) -> None:
        """Checks that two arrays are finite and differ.

        Raises:
            GateError: They do not.
        """
        error = _distance(a, b)
        self.require(np.isfinite(error) and error >= at_least, f"{what} (difference {error:.1e})")


def _distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return float("inf")
    scale = max(float(np.max(np.abs(b), initial=0.0)), 1e-6)
    return float(np.max(np.abs(a - b), initial=0.0)) / scale
