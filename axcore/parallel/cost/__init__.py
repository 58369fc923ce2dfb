"""FLOPs, bytes and memory without a device and without a compiler; see ``docs/flops.md``.

- :func:`count_flops`: what a traced program does, from its jaxpr, with trip counts;
- :func:`model_flops`: what the model has to do, from its config; :func:`mfu` from that;

"""

from axcore.parallel.cost._model import model_flops
from axcore.parallel.cost._model_flops import Flops, FlopTerm, Mfu, ModelFlops, mfu
from axcore.parallel.cost._pairs import Pairs, count_pairs
from axcore.parallel.cost._program import count_flops, count_function
from axcore.parallel.cost._records import CostEntry, ProgramCost, UnknownLoop

__all__ = [
    "CostEntry",
    "FlopTerm",
    "Flops",
    "Mfu",
    "ModelFlops",
    "Pairs",
    "ProgramCost",
    "UnknownLoop",
    "count_flops",
    "count_function",
    "count_pairs",
    "mfu",
    "model_flops",
]
