"""Model FLOPs as a record, and MFU from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from axcore.errors import ShardingError
from axcore.plugins import Instance

__all__ = ["FlopTerm", "Flops", "Mfu", "ModelFlops", "mfu"]


class Flops(NamedTuple):
    """One quantity under both conventions for attention.

    Attributes:
        causal: Only the query-key pairs that the mask lets through.
        full: As if every query saw every key (of its window, where there is one): the convention
            of most published MFUs.
    """

    causal: float
    full: float


@dataclass(frozen=True)
class FlopTerm:
    """The products of one module with the tokens of one row.

    Attributes:
        path: Module path; layers of a scan together.
        kind: ``projection`` (weights of layers), ``attention`` (queries with keys, weights with
            values) or ``head`` (the vocabulary).
        dtype: Dtype that the products run in.
        forward_causal: Forward FLOPs of a row, visible pairs only.
        forward_full: Forward FLOPs of a row, causality ignored.
        backward: Backward over forward FLOPs: 2, or 1 where the weight is frozen.
        recompute: How much of forward remat repeats.
    """

    path: str
    kind: Literal["projection", "attention", "head"]
    dtype: str
    forward_causal: float
    forward_full: float
    backward: float = 2.0
    recompute: float = 0.0


@dataclass(frozen=True)
class ModelFlops:
    """What a model has to compute for a token.

    Attributes:
        seq_len: Tokens per row.
        terms: FLOPs per row, by module.
        num_parameters: All parameters, embeddings included.
        num_active_parameters: The same with only the experts that a token goes to.
        num_embedding_parameters: Of these, tables that are looked up (a tied head's included).
        notes: What had to be assumed.
    """

    seq_len: int
    terms: tuple[FlopTerm, ...]
    num_parameters: int
    num_active_parameters: int
    num_embedding_parameters: int
    notes: tuple[str, ...] = ()

    @property
    def forward(self) -> Flops:
        """FLOPs of a forward pass, per token."""
        return self._sum(lambda term: 1.0)

    @property
    def train(self) -> Flops:
        """Model FLOPs of forward and backward, per token; what MFU is measured by."""
        return self._sum(lambda term: 1.0 + term.backward)

    @property
    def hardware(self) -> Flops:
        """The same with what remat recomputes, per token, for kernels that do no more."""
        return self._sum(lambda term: 1.0 + term.backward + term.recompute)

    @property
    def train_with_embeddings(self) -> Flops:
        """``6 N + attention`` with N all active parameters, embeddings included, per token.

        The short form that published MFUs often use: a table that is looked up counts as a product.
        """
        attention = self._sum(lambda t: 3.0 if t.kind == "attention" else 0.0)
        weights = 6.0 * self.num_active_parameters
        return Flops(weights + attention.causal, weights + attention.full)

    def train_by(self, field: Literal["kind", "dtype", "path"]) -> dict[str, Flops]:
        """Returns the training FLOPs per token by a field of the terms, most first."""
        names = dict.fromkeys(getattr(term, field) for term in self.terms)
        sums = {
            name: self._sum(lambda t, n=name: 1.0 + t.backward if getattr(t, field) == n else 0.0)
            for name in names
        }
        return dict(sorted(sums.items(), key=lambda item: -item[1].full))

    def _sum(self, weight: Callable[[FlopTerm], float]) -> Flops:
        causal = sum(weight(t) * t.forward_causal for t in self.terms) / self.seq_len
        full = sum(weight(t) * t.forward_full for t in self.terms) / self.seq_len
        return Flops(causal, full)


@dataclass(frozen=True)
class Mfu:
    """Model FLOPs utilization: the ideal time over the measured one.

    Attributes:
        causal: Attention counted as the mask lets through.
        full: Attention counted without causality.
        tokens_per_second_per_device: Rate of one device.
        peak_flops: Dtype -> peak rate of one device that was used, FLOP/s.
    """

    causal: float
    full: float
    tokens_per_second_per_device: float
    peak_flops: Mapping[str, float]


def mfu(
    flops: ModelFlops,
    tokens_per_second: float,
    instance: Instance,
    *,
    dtype: str | None = None,
) -> Mfu | None:
    """Returns both MFUs of training on all devices of an instance.

    With products in several dtypes (quantized layers beside attention in bfloat16) each has its own
    peak: the ideal time of a token is the sum of FLOPs / peak over dtypes.

    Args:
        flops: Of the model.
        tokens_per_second: Of all devices.
        instance: The machine; its stated peaks, dense.
        dtype: Measures all products by the peak of this dtype, as published MFUs do with
            ``"bfloat16"``; None measures each by its own.

    Returns:
        The MFUs, or None when the instance states no peak for a dtype.

    Raises:
        ShardingError: ``tokens_per_second`` is not positive.
    """
    if not tokens_per_second > 0:
        raise ShardingError(
            f"tokens_per_second is {tokens_per_second}, expected a rate above 0",
            code="AX468",
            where="mfu",
        )
    parts = {dtype: flops.train} if dtype else flops.train_by("dtype")
    peaks = {name: instance.peak_flops.get(name) for name in parts}
    known = {name: peak for name, peak in peaks.items() if peak}
    if len(known) < len(parts):
        return None
    rate = tokens_per_second / instance.num_devices
    causal = sum(f.causal / known[name] for name, f in parts.items())
    full = sum(f.full / known[name] for name, f in parts.items())
    return Mfu(causal * rate, full * rate, rate, known)
