"""Training: the trainer's config and programs, the learner, evaluation, logging, and the loop.

``Trainer.Config`` describes a run; :func:`assemble` fits it to a machine; :func:`train` runs it,
:func:`aot` compiles it for a machine that need not be here, :func:`plan` looks for the best way to
run it and :func:`compare` for the machine. What only the last three need loads with them.
"""

from typing import TYPE_CHECKING

from axcore.lazy import lazy_attributes
from axcore.train import optimizers, schedules
from axcore.train.assemble import Assembled, assemble, parse_modifier
from axcore.train.callbacks import BaseCallback
from axcore.train.evaler import BaseEvaler, Evaler
from axcore.train.learner import Learner, LearnerState
from axcore.train.run import TrainResult, train
from axcore.train.rundir import RunDir
from axcore.train.trainer import Trainer, TrainState
from axcore.train.writers import (
    BaseWriter,
    ConsoleWriter,
    JsonlWriter,
    TensorBoardWriter,
    read_metrics,
)

if TYPE_CHECKING:
    from axcore.train._aot import AotReport as AotReport
    from axcore.train._aot import aot as aot
    from axcore.train._plan import Compared as Compared
    from axcore.train._plan import PlanReport as PlanReport
    from axcore.train._plan import compare as compare
    from axcore.train._plan import parse_prices as parse_prices
    from axcore.train._plan import plan as plan

__all__ = [
    "AotReport",
    "Assembled",
    "BaseCallback",
    "BaseEvaler",
    "BaseWriter",
    "Compared",
    "ConsoleWriter",
    "Evaler",
    "JsonlWriter",
    "Learner",
    "LearnerState",
    "PlanReport",
    "RunDir",
    "TensorBoardWriter",
    "TrainResult",
    "TrainState",
    "Trainer",
    "aot",
    "assemble",
    "compare",
    "optimizers",
    "parse_modifier",
    "parse_prices",
    "plan",
    "read_metrics",
    "schedules",
    "train",
]

_LATER = {
    "AotReport": "axcore.train._aot",
    "Compared": "axcore.train._plan",
    "PlanReport": "axcore.train._plan",
    "aot": "axcore.train._aot",
    "compare": "axcore.train._plan",
    "parse_prices": "axcore.train._plan",
    "plan": "axcore.train._plan",
}

__getattr__, __dir__ = lazy_attributes(globals(), _LATER)
