"""Planning a run: search on the cost model, the best few compiled, the answer as a mesh rule.

The search (:mod:`axcore.parallel.plan`) starts from the experiment as its instance's own rule
leaves it, since a rule of the user's is applied after that one: what is emitted and given back by
``--rules`` runs as it was ranked.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from axcore.config import Config, apply_modifier
from axcore.errors import AotError, AxcoreError, PlanError, PluginError
from axcore.parallel import resolve_instance
from axcore.parallel.cost import StepPrediction, predict_step
from axcore.parallel.plan import Objective, Plan, Ranked, budget_bytes, rule_text, search
from axcore.plugins import Instance, host, pattern_matches
from axcore.quantization import QuantizeModifier, check_instance
from axcore.train._aot import aot
from axcore.train.assemble import Assembled

__all__ = ["Compared", "PlanReport", "Verified", "compare", "parse_prices", "plan"]

_log = logging.getLogger("axcore.train")
_LARGEST = 2**14
# Beside the smallest machine of a family that is large enough, twice and four times as large ones.
_SIZES = 3


@dataclasses.dataclass(frozen=True)
class Verified:
    """A candidate that the real compiler has compiled.

    Attributes:
        number: Its place in the ranking, from 0.
        fits: What the compiler says; None when it could not say.
        needed_bytes: On one device, by the compiler.
        limit_bytes: What a program may use there.
        compile_seconds: How long it took.
        reason: Why there is no verdict, or why it cannot be; else empty.
        error: What kept the compiler from a verdict; None when it was asked, or there is none.
    """

    number: int
    fits: bool | None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    compile_seconds: float | None = None
    reason: str = ""
    error: AxcoreError | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary; of the error its code, whose message is the reason."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"error": None if self.error is None else self.error.code}


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """What a planner says.

    Attributes:
        plan: The search: every candidate and why it lost.
        verified: What was compiled.
        chosen: The best candidate that fits, by the compiler where it was asked; None if none does.
        rule_text: The chosen one as a file for ``--rules``; empty if none fits.
    """

    plan: Plan
    verified: tuple[Verified, ...]
    chosen: Ranked | None
    rule_text: str

    @property
    def failed(self) -> tuple[Verified, ...]:
        """What should have been compiled, and the compiler was not there or failed."""
        return tuple(v for v in self.verified if v.error is not None)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of ``axcore plan``."""
        return {
            "instance": self.plan.instance,
            "objective": self.plan.objective,
            "limit_bytes": self.plan.limit_bytes,
            "search_seconds": self.plan.seconds,
            "skipped": self.plan.skipped,
            "candidates": [r.to_json() for r in self.plan.ranked],
            "rejected": [r.to_json() for r in self.plan.rejected],
            "verified": [v.to_json() for v in self.verified],
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "rule_text": self.rule_text,
        }


def plan(
    assemble_with: Callable[[Any], Assembled],
    instance: str,
    *,
    objective: Objective = "tokens_per_second",
    quantizations: Sequence[str] = (),
    verify: int = 3,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlanReport:
    """Finds how to run an experiment on a machine.

    Args:
        assemble_with: The experiment with the user's edits on the machine, given mesh rules, such
            as ``lambda rules: assemble(experiment, instance="cpu-8", rules=rules)``.
        instance: The machine's name.
        objective: What to rank by.
        quantizations: Recipes that may be used beside none, by name.
        verify: How many of the best to compile; 0 compiles none.
        cache: Directory of earlier compilations; see :func:`axcore.train.aot`.
        progress: Told what is going on, a line at a time.

    Returns:
        The report; ``chosen`` is None when nothing fits.

    Raises:
        PluginLookupError: A recipe or the instance is unknown.
        ConfigError: The instance cannot run a recipe (AX435, AX990, AX991).
        AxcoreError: The experiment cannot be put together.
    """
    say = progress or (lambda text: None)
    base = assemble_with(((instance, ()),))
    recipes = tuple((name, _recipe(name)) for name in quantizations)
    for _, recipe in recipes:
        check_instance(apply_modifier(base.cfg, recipe), base.instance)

    def looked(count: int) -> None:
        if count % 200 == 0:
            say(f"{count} candidates looked at")

    found = search(
        base.cfg, base.instance, objective=objective, quantizations=recipes, progress=looked
    )
    say(
        f"{len(found.ranked)} candidates fit and {len(found.rejected)} do not, in "
        f"{found.seconds:.1f} s"
    )
    verified: list[Verified] = []
    for number in _to_verify(found, verify):
        candidate = found.ranked[number].candidate
        say(f"compiling {candidate.describe()}")
        verified.append(_verified(number, assemble_with, instance, candidate, cache, say))
    chosen = _chosen(found, verified)
    text = "" if chosen is None else rule_text(chosen.candidate, instance)
    return PlanReport(found, tuple(verified), chosen, text)


def _recipe(name: str) -> Config:
    """Returns the modifier config that applies a quantization recipe, whatever is there."""
    modifier = QuantizeModifier.Config(recipe=name, override=True)
    modifier.instantiate().recipe_config()  # an unknown name is an error here, not in the search
    return modifier


def _to_verify(found: Plan, verify: int) -> list[int]:
    """Returns places in the ranking of the best candidates, of different meshes if there are."""
    seen: set[Any] = set()
    places: list[int] = []
    for number, ranked in enumerate(found.ranked):
        if len(places) == verify:
            break
        if ranked.candidate.mesh not in seen:
            seen.add(ranked.candidate.mesh)
            places.append(number)
    return places


def _verified(
    number: int,
    assemble_with: Callable[[Any], Assembled],
    instance: str,
    candidate: Any,
    cache: Path | None,
    say: Callable[[str], None],
) -> Verified:
    try:
        assembled = assemble_with(((instance, candidate.modifiers()),))
        report = aot(assembled, stand_in=True, advice=False, cache=cache, progress=say)
    except (AotError, PluginError) as error:
        return Verified(number, None, reason=error.message, error=error)
    except AxcoreError as error:  # it cannot be: the others may
        return Verified(number, False, reason=error.message)
    except Exception as error:  # the plan, which took minutes, is not lost with it
        _log.debug("verifying %s", candidate.describe(), exc_info=error)
        failed = AotError(
            f"verifying it failed: {type(error).__name__}: {' '.join(str(error).split())}",
            code="AX980",
            where=instance,
            hint="--debug shows the traceback",
            exit_code=4,
        )
        return Verified(number, None, reason=failed.message, error=failed)
    if not report.compiled:
        return Verified(number, None, reason=report.notes[-1] if report.notes else "not compiled")
    return Verified(
        number,
        report.fits,
        report.hbm_bytes["total"],
        report.hbm_limit_bytes,
        report.compile_seconds,
    )


def _chosen(found: Plan, verified: Sequence[Verified]) -> Ranked | None:
    """Returns the best that fits; where the compiler has the last word, by the compiler."""
    verdicts = {v.number: v.fits for v in verified}
    refused = {n for n, fits in verdicts.items() if fits is False}
    confirmed = [n for n, fits in verdicts.items() if fits]
    if confirmed:
        return found.ranked[min(confirmed)]
    return next((r for n, r in enumerate(found.ranked) if n not in refused), None)


@dataclasses.dataclass(frozen=True)
class Compared:
    """An instance, run as its own rule says.

    Attributes:
        instance: The machine's name.
        devices: Devices in all.
        prediction: Its step; None when it cannot be.
        usd_per_million_tokens: What tokens cost there; None without a price.
        reason: Why there is no prediction; empty when there is.
    """

    instance: str
    devices: int
    prediction: StepPrediction | None
    usd_per_million_tokens: float | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        p = self.prediction
        return {
            "instance": self.instance,
            "devices": self.devices,
            "step_seconds": None if p is None else p.step_seconds,
            "tokens_per_second": None if p is None else p.tokens_per_second,
            "mfu_noncausal": None if p is None else p.mfu_noncausal,
            "peak_flops": None if p is None else dict(p.peak_flops),
            "memory_bytes": None if p is None else p.memory.total,
            "device_seconds_per_million_tokens": None
            if p is None
            else 1e6 * self.devices / p.tokens_per_second,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "reason": self.reason,
        }


def compare(
    assemble_on: Callable[[str], Assembled],
    *,
    prices: Mapping[str, float] | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Compared, ...]:
    """Compares machines of all known families, each run as its own rule says.

    Of each family the smallest machine whose memory is enough by the memory model is taken, and
    ones twice and four times as large.

    Args:
        assemble_on: The experiment with the user's edits on an instance, by name.
        prices: Instance pattern -> US dollars per device and hour; beside those that instances
            state themselves.
        progress: Told what is going on, a line at a time.

    Returns:
        Machines by cost per token where it is known, then those without a price by device seconds
        per token, then families none of whose machines can run it, each with its reason.

    Raises:
        PlanError: No family is known beside this machine.
    """
    say = progress or (lambda text: None)
    found: list[Compared] = []
    patterns = [s.pattern for s in host().instance_types.specs() if s.platform != "cpu"]
    if not patterns:
        raise PlanError(
            "no accelerator is known to compare",
            hint="install a hardware plugin; `axcore plugins list` shows what there is",
        )
    for pattern in sorted(patterns):
        say(f"looking at {pattern}")
        found += _family(pattern, assemble_on, dict(prices or {}))
    for pattern in prices or {}:
        if not any(pattern_matches(pattern, row.instance) for row in found):
            say(f"the price of {pattern} is that of no machine here")
    return tuple(sorted(found, key=_cost))


def _cost(row: Compared) -> tuple[int, float, str]:
    if row.prediction is None:
        return (2, 0.0, row.instance)
    if row.usd_per_million_tokens is not None:
        return (0, row.usd_per_million_tokens, row.instance)
    return (1, row.devices / row.prediction.tokens_per_second, row.instance)


def _family(
    pattern: str,
    assemble_on: Callable[[str], Assembled],
    prices: Mapping[str, float],
) -> list[Compared]:
    rows: list[Compared] = []
    last: Compared | None = None
    for instance in _machines(pattern):
        try:
            assembled = assemble_on(instance.name)
            prediction = predict_step(assembled.cfg, instance)
        except AxcoreError as error:
            last = Compared(instance.name, instance.num_devices, None, reason=error.message)
            continue
        limit = budget_bytes(instance)
        if prediction.memory.total > limit:
            needs, has = prediction.memory.total / 2**30, limit / 2**30
            reason = f"needs {needs:.1f} of {has:.1f} GiB on each device"
            last = Compared(instance.name, instance.num_devices, None, reason=reason)
            continue
        usd = _usd_per_hour(instance, prices)
        if usd is not None:
            usd *= 1e6 / (3600 * prediction.tokens_per_second)
        rows.append(Compared(instance.name, instance.num_devices, prediction, usd))
        if len(rows) == _SIZES:
            break
    return rows or ([last] if last is not None else [])


def _machines(pattern: str) -> Iterator[Instance]:
    """Yields the machines of a family, a power of two in count, smallest first."""
    count = 1
    while count <= _LARGEST:
        name = pattern.replace("*", str(count))
        try:
            yield resolve_instance(name)
        except AxcoreError:
            continue  # the family has no machine of this size
        finally:
            count *= 2


def _usd_per_hour(instance: Instance, prices: Mapping[str, float]) -> float | None:
    for pattern, price in prices.items():
        if pattern_matches(pattern, instance.name):
            return price * instance.num_devices
    return instance.price_per_hour


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Returns prices from ``PATTERN=USD`` texts.

    Raises:
        PlanError: One is not of that form.
    """
    prices: dict[str, float] = {}
    for text in texts:
        pattern, equals, value = text.rpartition("=")
        try:
            prices[pattern] = float(value)
        except ValueError:
            equals = ""
        if not equals or not pattern or not 0 <= prices[pattern] < math.inf:
            raise PlanError(
                f"--price got {text!r}, expected PATTERN=USD per device and hour",
                hint='for example --price "tpu-v5p-*=4.2"',
            )
    return prices
