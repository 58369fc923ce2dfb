"""Evalers: when to evaluate during a run, on what, and what to report."""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax

from axcore.collection import OutputCollection, merge
from axcore.config import Configurable, Dim, scaled
from axcore.data import bits_per_byte
from axcore.errors import TrainError
from axcore.train._flat_metrics import flat_metrics

if TYPE_CHECKING:
    from axcore.data import BaseInput, EvalBatches

__all__ = ["BaseEvaler", "EvalProgram", "Evaler", "combine"]


class EvalProgram(Protocol):
    """What a trainer gives an evaler: the rows it feeds and the compiled evaluation of a batch."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the global batch that this process feeds."""
        ...

    def __call__(self, batch: Any) -> OutputCollection:
        """Returns losses and summaries of one batch; rows of this process in, arrays out."""
        ...


class BaseEvaler(Configurable, abc.ABC):
    """The role of an evaler."""

    class Config(Configurable.Config):
        """When to evaluate."""

        # Steps between evaluations; the last step is always evaluated.
        every_n_steps: Dim = scaled(0.25, of="max_step")
        # Whether to evaluate the learner's moving average instead of the parameters.
        use_ema: bool = False

    def __init__(self, cfg: Config):
        self.cfg = cfg
        if cfg.every_n_steps < 1:
            raise TrainError(
                f"every_n_steps is {cfg.every_n_steps}, expected at least 1",
                code="AX730",
                where="evalers",
                hint="max_step evaluates at the end alone; to leave evaluation out, set evalers={}",
            )

    def should_run(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after ``step`` finished steps."""
        return step == last_step or step % self.cfg.every_n_steps == 0

    def check(self, data: BaseInput) -> None:
        """Raises an AxcoreError if there is nothing to evaluate on; called before training."""

    @abc.abstractmethod
    def evaluate(self, program: EvalProgram, data: BaseInput) -> dict[str, float]:
        """Returns the metrics as plain numbers."""


class Evaler(BaseEvaler):
    """Loss, perplexity, accuracy and, of language models, bits per byte over what is held out."""

    class Config(BaseEvaler.Config):
        """How much of the held-out split to read."""

        max_documents: int | None = None

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if cfg.max_documents is not None and cfg.max_documents < 1:
            raise TrainError(
                f"max_documents is {cfg.max_documents}, expected at least 1 or None for all",
                code="AX730",
                where="evalers",
                hint="to leave evaluation out, set evalers={}",
            )
        self._batches: EvalBatches | None = None

    def check(self, data: BaseInput) -> None:
        """See :meth:`BaseEvaler.check`."""
        data.heldout(max_documents=self.cfg.max_documents)

    def evaluate(self, program: EvalProgram, data: BaseInput) -> dict[str, float]:
        """Returns ``loss`` (nats per target), ``perplexity``, ``bits_per_byte``, ``accuracy``.

        ``bits_per_byte`` is the summed loss of all targets in bits over the UTF-8 bytes of the
        text, so it compares across tokenizers and with xz's figure in reports. It is left out where
        not every token of a text is a target. Beside them stand the scalar means that the model
        summarizes, by their last name where only one place has it, by their path elsewhere.
        """
        if self._batches is None:
            self._batches = data.heldout(program.rows, max_documents=self.cfg.max_documents)
        batches = self._batches
        total = combine(program(batch) for batch in batches)
        means = {p: e.result() for p, e in total.summaries.items() if e.num_items is not None}
        metrics = _named(flat_metrics({"summaries": means})[0])
        main = total.losses.get("cross_entropy")
        if main is None:
            raise TrainError(
                f"the model collected losses {sorted(total.losses)} but no 'cross_entropy'",
                code="AX731",
                where="evalers",
                hint="use an evaler made for this model",
            )
        loss = float(main.result())
        metrics |= {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "num_targets": float(main.num_items),
        }
        if batches.num_bytes is not None:
            metrics["bits_per_byte"] = bits_per_byte(float(main.total), batches.num_bytes)
        return metrics


def _named(by_path: Mapping[str, float]) -> dict[str, float]:
    """Returns the values by short names where these tell them apart."""
    short = {path: path.rsplit("/", 1)[-1] for path in by_path}
    places = Counter(short.values())
    return {short[p] if places[short[p]] == 1 else p: value for p, value in by_path.items()}


def combine(collections: Iterable[OutputCollection]) -> OutputCollection:
    """Merges what the batches of a pass collected; the device is asked once, at the end."""
    merged: OutputCollection | None = None
    add: Callable[..., OutputCollection] = jax.jit(merge)
    for collection in collections:
        merged = collection if merged is None else add(merged, collection)
    if merged is None:
        raise TrainError(
            "the held-out split gave no batch",
            code="AX732",
            where="evalers",
            hint="hold more out (input.heldout_fraction), or set evalers={}",
        )
    return jax.device_get(merged)
