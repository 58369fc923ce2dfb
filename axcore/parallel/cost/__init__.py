"""FLOPs, bytes and memory without a device and without a compiler; see ``docs/flops.md``.

- :func:`count_flops`: what a traced program does, from its jaxpr, with trip counts;
- :func:`model_flops`: what the model has to do, from its config; :func:`mfu` from that;
- :func:`memory_estimate`: bytes per device by kind, from parameter specs, rules and a mesh shape;
- :func:`predict_step`: seconds of a step on an instance, and what bounds it; see ``docs/cost.md``.
"""

from axcore.parallel.cost._memory import MemoryEstimate, kv_cache_bytes, memory_estimate
from axcore.parallel.cost._model import model_flops
from axcore.parallel.cost._model_flops import Flops, FlopTerm, Mfu, ModelFlops, mfu
from axcore.parallel.cost._pairs import Pairs, count_pairs
from axcore.parallel.cost._program import count_flops, count_function
from axcore.parallel.cost._records import CostEntry, ProgramCost, UnknownLoop
from axcore.parallel.cost._step_time import StepModel, StepPrediction, predict_step

__all__ = [
    "CostEntry",
    "FlopTerm",
    "Flops",
    "MemoryEstimate",
    "Mfu",
    "ModelFlops",
    "Pairs",
    "ProgramCost",
    "StepModel",
    "StepPrediction",
    "UnknownLoop",
    "count_flops",
    "count_function",
    "count_pairs",
    "kv_cache_bytes",
    "memory_estimate",
    "mfu",
    "model_flops",
    "predict_step",
]
