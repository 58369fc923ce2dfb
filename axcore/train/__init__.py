"""Training: the trainer's config and programs, the learner, evaluation, logging, and the loop.

``Trainer.Config`` describes a run; :func:`assemble` fits it to a machine; :func:`train` runs it,
:func:`aot` compiles it for a machine that need not be here.
"""

from axcore.train import optimizers, schedules
from axcore.train.aot import AotReport, aot
from axcore.train.assemble import Assembled, assemble
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

__all__ = [
    "AotReport",
    "Assembled",
    "BaseCallback",
    "BaseEvaler",
    "BaseWriter",
    "ConsoleWriter",
    "Evaler",
    "JsonlWriter",
    "Learner",
    "LearnerState",
    "RunDir",
    "TensorBoardWriter",
    "TrainResult",
    "TrainState",
    "Trainer",
    "aot",
    "assemble",
    "optimizers",
    "read_metrics",
    "schedules",
    "train",
]
