"""What share of the machine a run has used, beside what the cost model expects to bound it."""

from __future__ import annotations

import logging
from typing import Any

from axcore.errors import AxcoreError
from axcore.plugins import Instance

__all__ = ["utilization"]

_log = logging.getLogger("axcore.train")


def utilization(cfg: Any, instance: Instance, tokens_per_second: float | None) -> dict[str, Any]:
    """Returns MFU by both conventions, tokens/s of one device, and what should bound a step.

    Products in several dtypes are each measured by their own peak; a CPU's peak is measured.

    Args:
        cfg: The trainer's config.
        instance: The machine.
        tokens_per_second: Measured, of all devices; None or 0 when no step was timed.

    Returns:
        ``mfu`` (``causal`` and ``noncausal``, each None where unknown), ``peak_flops`` (dtype ->
        the peak of one device that they divide by, FLOP/s; empty where unknown),
        ``tokens_per_second_per_device``, ``predicted_step_seconds``, ``bound_by`` and, where one
        of them is not known, ``mfu_unknown`` with the reason.
    """
    from axcore.parallel.cost import predict_step  # no run needs it before its end

    report: dict[str, Any] = {
        "mfu": {"causal": None, "noncausal": None},
        "peak_flops": {},
        "tokens_per_second_per_device": None,
        "predicted_step_seconds": None,
        "bound_by": None,
    }
    if tokens_per_second:
        report["tokens_per_second_per_device"] = tokens_per_second / instance.num_devices
    try:
        prediction = predict_step(cfg, instance)
    except AxcoreError as error:
        # A machine that states no rates, say: the run is none the worse for it.
        return report | {"mfu_unknown": str(error).splitlines()[0]}
    except Exception as error:
        # A layer may be of a kind that nobody has counted yet, and the run is over by now.
        _log.warning("MFU is not known: %s: %s", type(error).__name__, error)
        return report | {"mfu_unknown": f"{type(error).__name__}: {error}"}
    report["predicted_step_seconds"] = prediction.step_seconds
    report["bound_by"] = prediction.bound_by
    report["peak_flops"] = dict(prediction.peak_flops)
    if not tokens_per_second:
        return report | {"mfu_unknown": "no step was timed"}
    share = tokens_per_second / prediction.tokens_per_second
    report["mfu"] = {
        "causal": prediction.mfu_causal * share,
        "noncausal": prediction.mfu_noncausal * share,
    }
    return report
