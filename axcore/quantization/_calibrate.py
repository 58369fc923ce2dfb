"""Calibration: how large activations get on data, product by product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import Config
from axcore.context import current_context, functional
from axcore.errors import ConfigError
from axcore.layers.placement import build_model
from axcore.ops import DotGeneral
from axcore.ops._dot import dot_general
from axcore.ops.dot_general import DimensionNumbers
from axcore.quantization._place import Site, find_sites, place

__all__ = ["ObserverDot", "calibrate"]

_NAME = "activation_amax"


class ObserverDot(DotGeneral):
    """The plain product, which reports the magnitude of its activations."""

    class Config(DotGeneral.Config):
        """``percentile`` of the magnitudes within a batch; None is the largest."""

        percentile: float | None = None

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts two arrays; see :meth:`axcore.ops.DotGeneral.forward`."""
        size = jnp.abs(lhs.astype(jnp.float32))
        percentile = self.cfg.percentile
        amax = jnp.max(size) if percentile is None else jnp.percentile(size, percentile)
        ctx = current_context()
        assert ctx is not None
        ctx.add_summary(_NAME, amax, reduction="max")
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision=self.cfg.precision,
            preferred_element_type=preferred_element_type,
        )


def calibrate(
    cfg: Config,
    state: Mapping[str, Any],
    batches: Iterable[tuple[Any, ...] | Mapping[str, Any]],
    paths: Iterable[str],
    *,
    percentile: float | None = None,
    method: str = "forward",
) -> dict[str, float]:
    """Runs a model over data and returns how large the activations of its products get.

    Args:
        cfg: A trainer's config, or a model's; its products count as plain ones.
        state: The model's state.
        batches: Inputs of the method, all of the same shapes.
        paths: Products to look at; see :func:`axcore.quantization.find_sites`.
        percentile: Of the magnitudes within a batch, in percent; None takes the largest. What is
            beyond saturates, and everything else gets finer steps.
        method: The model's method.

    Returns:
        By path, the largest over all batches.

    Raises:
        ConfigError: There are no batches, or the percentile is out of range.
    """
    if percentile is not None and not 0.0 < percentile <= 100.0:
        raise ConfigError(f"percentile is {percentile}, expected one in (0, 100]", code="AX439")
    wanted = frozenset(paths)
    observed = cfg.copy()
    observer = ObserverDot.Config(percentile=percentile)

    def observers(sites: dict[str, Site]) -> dict[str, Config | None]:
        # All layers of a stack that share a config, so that their scan stays one.
        shared = {sites[path].config_path for path in wanted}
        return {p: observer if s.config_path in shared else None for p, s in sites.items()}

    place(observed, observers)
    model = build_model(observed)
    by_state = {site.state_path: path for path, site in find_sites(model).items()}

    @jax.jit
    def run(state: Any, inputs: Any) -> dict[str, jax.Array]:
        _, collection = functional(
            model, state=state, inputs=inputs, is_training=False, method=method
        )
        found = collection.expand().summaries
        return {
            by_state[path.rpartition("/")[0]]: entry.result()
            for path, entry in found.items()
            if path.endswith(f"/{_NAME}")
        }

    largest: dict[str, float] = {}
    for inputs in batches:
        for path, value in run(state, inputs).items():
            if path not in wanted:
                continue
            largest[path] = max(largest.get(path, 0.0), float(value))
    if not largest:
        raise ConfigError(
            "there is no data to calibrate with",
            code="AX439",
            hint="give at least one batch that reaches the products",
        )
    return largest
