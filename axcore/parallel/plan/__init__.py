"""The planner: which mesh, rematerialization and microbatches suit a model on a machine.

:func:`search` enumerates candidates from the model's traits and the machine, drops those that the
memory model rejects, ranks the rest by the predicted step time
(:func:`axcore.parallel.cost.predict_step`) and keeps the reason why each loser lost. Compiling the
best few is the business of :func:`axcore.train.plan`.
"""

from axcore.parallel.plan._candidate import Candidate, RematOption, rule_text
from axcore.parallel.plan._search import (
    Objective,
    Plan,
    Ranked,
    Rejected,
    budget_bytes,
    search,
)
from axcore.parallel.plan._space import Dims, meshes, remat_options

__all__ = [
    "Candidate",
    "Dims",
    "Objective",
    "Plan",
    "Ranked",
    "Rejected",
    "RematOption",
    "budget_bytes",
    "meshes",
    "remat_options",
    "rule_text",
    "search",
]
