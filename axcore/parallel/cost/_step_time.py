"""Seconds of a training step, predicted from its config and an instance; see ``docs/cost.md``.

An analytic model: FLOPs by dtype over peak times efficiency, bytes over bandwidth, collectives over
the networks that their mesh axes cross, what of these hides behind compute, and the bubble of a
pipeline. Nothing is traced, compiled or run; a step of any size takes a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp

from axcore.config import FrozenMapping
from axcore.module import flatten_specs
from axcore.parallel.cost._activations import kept, stack_values
from axcore.parallel.cost._memory import (
    DeviceBytes,
    MemoryEstimate,
    Microbatch,
    memory_estimate,
)
from axcore.parallel.cost._model import built, model_flops
from axcore.parallel.cost._model_flops import FlopTerm, ModelFlops
from axcore.parallel.cost._network import Network
from axcore.parallel.cost._rates import rates_of
from axcore.parallel.cost._traffic import Pass, Traffic, Transfer
from axcore.parallel.mesh import MeshShape, abstract_mesh
from axcore.plugins import Instance

__all__ = ["StepModel", "StepPrediction", "predict_step"]

# Float32 logits are written, read for the softmax, and so are their gradients.
_LOGIT_PASSES = 4
_PASSES: tuple[Pass, ...] = ("forward", "backward")


@dataclass(frozen=True)
class StepPrediction:
    """What a step should take.

    Attributes:
        step_seconds: One optimizer step.
        tokens_per_second: Of all devices.
        tokens_per_second_per_device: Of one.
        mfu_causal: Model FLOPs over the peak, attention counted as the mask lets through.
        mfu_noncausal: The same without causality, as most published MFUs count.
        peak_flops: Dtype -> peak of one device that the MFUs divide by, FLOP/s; of products in
            several dtypes each by its own.
        bound_by: The largest part of ``seconds``.
        seconds: What adds up to ``step_seconds``: ``matmul``, ``memory``, ``optimizer``,
            ``pipeline bubble``, and ``collectives AXES`` with what is not hidden of them.
        hidden_seconds: Mesh axes -> collectives that run beside compute.
        collective_bytes: (kind, mesh axes) -> bytes that one device receives in a step.
        memory: Bytes on one device.
        efficiency: Share of the peak that products were taken to reach.
        notes: What had to be assumed.
    """

    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu_causal: float
    mfu_noncausal: float
    peak_flops: Mapping[str, float]
    bound_by: str
    seconds: Mapping[str, float]
    hidden_seconds: Mapping[str, float]
    collective_bytes: Mapping[tuple[str, str], float]
    memory: MemoryEstimate
    efficiency: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary; keys of ``collective_bytes`` are ``"KIND AXES"``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {
            "peak_flops": dict(self.peak_flops),
            "seconds": dict(self.seconds),
            "hidden_seconds": dict(self.hidden_seconds),
            "collective_bytes": {" ".join(k): v for k, v in self.collective_bytes.items()},
            "memory": self.memory.to_json(),
            "notes": list(self.notes),
        }


def predict_step(
    cfg: Any,
    instance: Instance,
    *,
    traits: Any = None,
    efficiency: float | None = None,
    attention: Literal["kernel", "reference"] = "kernel",
) -> StepPrediction:
    """Predicts a training step.

    Args:
        cfg: A trainer's config, fitted to the instance: mesh, rules, remat, microbatches.
        instance: The machine.
        traits: Not looked at: what they say follows from ``cfg``. For callers that have both.
        efficiency: Share of the peak that products reach; None takes the instance's.
        attention: As for :func:`memory_estimate`.

    Raises:
        ShardingError: The mesh does not fit the devices, or the instance does not state a rate.
        ConfigError: The config cannot be built.

    Example:
        >>> from axcore import experiments
        >>> chip = Instance(name="a-8", family="a", platform="a", num_hosts=1, devices_per_host=8,
        ...                 hbm_bytes=2**34, hbm_bandwidth_bytes=1e12, ici_bandwidth_bytes=1e11,
        ...                 peak_flops={"bfloat16": 1e14})
        >>> predict_step(experiments.get("tiny-lm"), chip).step_seconds < 0.01
        True
    """
    del traits
    return StepModel(cfg, instance, attention=attention).at(efficiency)


@dataclass
class _Times:
    """Seconds of one pass over one microbatch, on one device."""

    matmul: float = 0.0
    attention: float = 0.0  # part of matmul
    memory: float = 0.0
    unstaged: float = 0.0  # of both, what is in no stage of a pipeline: the head
    # (mesh axes, what it hides behind) -> seconds.
    collectives: dict[tuple[tuple[str, ...], str], float] = field(default_factory=dict)

    @property
    def compute(self) -> float:
        return self.matmul + self.memory


class StepModel:
    """One config on one machine, for any efficiency; see :func:`predict_step`.

    Args:
        cfg: A trainer's config, fitted to the instance.
        instance: The machine.
        attention: As for :func:`memory_estimate`.

    Raises:
        ShardingError: The mesh does not fit the devices, or rules do not fit an array or the batch.
    """

    def __init__(
        self,
        cfg: Any,
        instance: Instance,
        *,
        attention: Literal["kernel", "reference"] = "kernel",
    ):
        self.cfg, self.instance, self.attention = cfg, instance, attention
        self.rates = rates_of(instance)
        self.memory = memory_estimate(
            cfg,
            num_devices=instance.num_devices,
            num_slices=instance.num_slices,
            attention=attention,
        )
        self.model, learner = built(cfg)
        self.steps = cfg.accumulation_steps
        shape = MeshShape.of(cfg.mesh_shape)
        self.network = Network(instance, shape)
        self.mesh = abstract_mesh(shape, instance.num_devices, instance.num_slices)
        self.flops: ModelFlops = model_flops(cfg)
        self.stacks = stack_values(self.model, self.attention)
        self.num_layers = max(sum(stack.num_layers for stack in self.stacks), 1)
        specs = self.model.parameter_specs()
        rule = cfg.ops.get("attention") if hasattr(cfg, "ops") else None
        self.traffic = Traffic(
            self.model,
            self.mesh,
            cfg.sharding_rules,
            cfg.batch_size // self.steps,
            cfg.seq_len,
            flatten_specs(learner.trainable_specs(specs)),
            tuple(rule.implementations) if rule is not None else (),
        )

        self.transfers = self.traffic.transfers()

    def at(self, efficiency: float | None = None) -> StepPrediction:
        """Returns the prediction.

        Args:
            efficiency: Share of the peak that products reach; None takes the instance's.

        Raises:
            ShardingError: The instance does not state a rate.
        """
        self.rates = rates_of(self.instance, efficiency)
        times: dict[Pass, _Times] = {phase: _Times() for phase in _PASSES}
        for term in self.flops.terms:
            self._products(term, times)
        self._elementwise(times)
        moved: dict[tuple[str, str], float] = {}
        for transfer in self.transfers:
            self._collective(transfer, times[transfer.phase], moved)
        exposed, hidden = self._overlap(times)
        matmul = self.steps * sum(t.matmul for t in times.values())
        memory = self.steps * sum(t.memory for t in times.values())
        seconds = {"matmul": matmul, "memory": memory}
        seconds |= {f"collectives {axes}": s * self.steps for axes, s in exposed.items()}
        if self.traffic.pipeline is not None:
            bubble = self.traffic.pipeline.bubble_fraction
            staged = sum(seconds.values()) - self.steps * sum(t.unstaged for t in times.values())
            seconds["pipeline bubble"] = staged * bubble / (1 - bubble)
        seconds["optimizer"] = self._optimizer()
        total = sum(seconds.values())
        tokens = self.cfg.batch_size * self.cfg.seq_len
        causal, full = self._ideal()
        return StepPrediction(
            step_seconds=total,
            tokens_per_second=tokens / total,
            tokens_per_second_per_device=tokens / total / self.instance.num_devices,
            mfu_causal=causal * tokens / total / self.instance.num_devices,
            mfu_noncausal=full * tokens / total / self.instance.num_devices,
            peak_flops=FrozenMapping(
                dict(self.rates.named_peak(name) for name in self.flops.train_by("dtype"))
            ),
            bound_by=max(seconds, key=lambda name: seconds[name]),
            seconds=FrozenMapping(seconds),
            hidden_seconds=FrozenMapping({a: s * self.steps for a, s in hidden.items()}),
            collective_bytes=MappingProxyType({k: n * self.steps for k, n in moved.items()}),
            memory=self.memory,
            efficiency=self.rates.efficiency,
            notes=(*self.rates.notes, *self.flops.notes, *self.memory.notes, *self._notes()),
        )

    # -- products --------------------------------------------------------------------------

    def _products(self, term: FlopTerm, times: Mapping[Pass, _Times]) -> None:
        """Adds a module's products: the pairs that the mask lets through, as kernels do."""
        rows = self.cfg.batch_size // self.steps
        parts, weight_bytes = self._parallelism(term)
        forward = term.forward_causal * rows / parts
        rate = self.rates.peak(term.dtype) * self.rates.efficiency
        # A product of few tokens reads its weights for longer than it multiplies.
        reads = weight_bytes / self.rates.memory_bytes
        once = max(forward / rate, reads)
        backward = max(forward * term.backward / rate, 2 * reads) + once * term.recompute
        spent: dict[Pass, float] = {"forward": once, "backward": backward}
        for phase, seconds in spent.items():
            times[phase].matmul += seconds
            if term.kind == "attention":
                times[phase].attention += seconds
            if term.kind == "head":
                times[phase].unstaged += seconds

    def _parallelism(self, term: FlopTerm) -> tuple[int, float]:
        """Returns over how many devices a product is spread, and the bytes of weights on one."""
        traffic = self.traffic
        stages = traffic.pipeline.num_stages if traffic.pipeline else 1
        if term.kind == "attention":
            module: Any = traffic.modules[term.path]
            heads = traffic.parts_of(getattr(module.cfg, "num_heads", 1), "heads")
            return traffic.size({*traffic.stage_axes, *heads}) * stages, 0.0
        owned = [s for p, s in traffic.specs.items() if p.rsplit("/", 1)[0] == term.path]
        # Of several weights (experts and their router) the largest tells.
        spec = max(owned, key=lambda spec: math.prod(spec.shape))
        split = traffic.split(spec)
        staged = traffic.is_staged(spec)
        stages = stages if staged else 1
        tokens = traffic.stage_axes if staged else traffic.token_axes
        used = {*tokens, *split.kept, *split.dispatched}
        item = jnp.dtype(getattr(traffic.modules.get(term.path), "compute_dtype", spec.dtype))
        parts = traffic.size((*split.kept, *split.dispatched)) * stages
        return traffic.size(used) * stages, math.prod(spec.shape) * item.itemsize / parts

    # -- memory ----------------------------------------------------------------------------

    def _elementwise(self, times: Mapping[Pass, _Times]) -> None:
        """Adds norms, activations, sums and the loss: what is bound by memory.

        Each value of a layer crosses memory once forward, once more when it is recomputed, and
        twice backward (itself and its gradient).
        """
        stages = 1.0
        if self.traffic.pipeline is not None:
            # Values are counted with the rows that a device has outside of its stage.
            rows_inside = self.traffic.stage_tokens / self.traffic.tokens
            stages = self.traffic.pipeline.num_stages / rows_inside
        whole = DeviceBytes(self.mesh, self.cfg.sharding_rules)
        rows, seq_len = self.cfg.batch_size // self.steps, self.cfg.seq_len
        batch = Microbatch(whole, self.model, rows, seq_len, seq_len)
        for stack in self.stacks:
            layers = stack.num_layers / stages
            for value in stack.values:
                if value.dims[-1] == -1 and self.attention == "kernel":
                    continue
                size = layers * batch.value(stack, value)
                again = kept(value, stack.remat) == "recomputed" and stack.remat.enabled
                times["forward"].memory += size / self.rates.memory_bytes
                times["backward"].memory += (2 + again) * size / self.rates.memory_bytes
        self._dispatched(times)
        for term in self.flops.terms:
            if term.kind != "head":
                continue
            for name, spec in self.traffic.specs.items():
                if name.rsplit("/", 1)[0] != term.path or "vocab" not in spec.axes:
                    continue
                if len(spec.shape) > 1:
                    vocab = spec.shape[spec.axes.index("vocab")]
                    parts = self.traffic.size(self.traffic.parts_of(vocab, "vocab"))
                    size = _LOGIT_PASSES * 4 * self.traffic.tokens * vocab / parts
                    times["backward"].memory += size / self.rates.memory_bytes
                    times["backward"].unstaged += size / self.rates.memory_bytes

    def _dispatched(self, times: Mapping[Pass, _Times]) -> None:
        """Adds what experts' rows cost before and after their products.

        Every token is copied for each of its experts, and the results are brought back into the
        tokens' order: two permutations, each a read and a write. Twice that backward (what was
        read, and its gradient), once more where the layer is recomputed.
        """
        for num_bytes, recomputed in self.traffic.assigned():
            seconds = 4 * num_bytes / self.rates.memory_bytes
            times["forward"].memory += seconds
            times["backward"].memory += (2 + recomputed) * seconds

    def _optimizer(self) -> float:
        """Seconds to read gradients, and to read and write parameters and the optimizer's state."""
        memory = self.memory
        moved = 2 * memory.parameters + 2 * memory.optimizer + memory.gradients
        if self.steps > 1:  # the sum of gradients is read and written for each microbatch
            moved += 2 * memory.gradients * self.steps
        return moved / self.rates.memory_bytes

    # -- collectives -----------------------------------------------------------------------

    def _collective(
        self, transfer: Transfer, times: _Times, moved: dict[tuple[str, str], float]
    ) -> None:
        seconds = self.network.seconds(transfer.kind, transfer.num_bytes, transfer.axes)
        name = (transfer.axes, transfer.hides_behind)
        times.collectives[name] = times.collectives.get(name, 0.0) + seconds * transfer.count
        key = (transfer.kind, "+".join(transfer.axes))
        amount = self.network.moved(transfer.kind, transfer.num_bytes, transfer.axes)
        moved[key] = moved.get(key, 0.0) + amount * transfer.count

    def _overlap(self, times: Mapping[Pass, _Times]) -> tuple[dict[str, float], dict[str, float]]:
        """Returns mesh axes -> seconds of collectives that are waited for, and that are not.

        What may hide is hidden as far as the pass has compute to hide it behind, but for one
        layer's: the first gather and the last reduction of a pass have nothing beside them.
        """
        exposed: dict[str, float] = {}
        hidden: dict[str, float] = {}
        for phase in _PASSES:
            found = times[phase]
            room = {"attention": found.attention, "compute": found.compute, "nothing": 0.0}
            for behind in room:
                entries = {a: s for (a, b), s in found.collectives.items() if b == behind}
                wanted = sum(entries.values()) * (1 - 1 / self.num_layers)
                share = min(wanted, room[behind]) / sum(entries.values()) if wanted else 0.0
                if behind == "attention":  # what hides there takes room from the rest
                    room["compute"] -= min(wanted, room[behind])
                for axes, seconds in entries.items():
                    name = "+".join(axes)
                    hidden[name] = hidden.get(name, 0.0) + share * seconds
                    exposed[name] = exposed.get(name, 0.0) + (1 - share) * seconds
        return exposed, {axes: s for axes, s in hidden.items() if s}

    # -- the whole -------------------------------------------------------------------------

    def _ideal(self) -> tuple[float, float]:
        """Returns the seconds of a token on one device at the peak, both conventions."""
        parts = self.flops.train_by("dtype")
        causal = sum(f.causal / self.rates.peak(name) for name, f in parts.items())
        return causal, sum(f.full / self.rates.peak(name) for name, f in parts.items())

    def _notes(self) -> tuple[str, ...]:
        if self.memory.host:
            return ("offloaded activations are taken to travel beside compute",)
        return ()
