"""The cost model beside published step times: one fitted efficiency per hardware kind.

    python benchmarks/cost_model.py                    # tables; no accelerator, about 20 s
    python benchmarks/cost_model.py --json

**Rows.** Seconds per step of 1,024 rows and MFU are those of the AXLearn paper (MLSys 2026, text
version), which does not print the settings of each row. Taken here, in this order: what the paper
prints as the rule of the hardware (H100: ``fsdp=-1, model=8``, query/key/value projections and
attention's output saved), unless the row cannot have used it (its collectives and memory traffic
alone would take longer than the published step); then the rule of the experiment in the public
repository (apple/axlearn, axlearn/experiments/text/gpt/fuji.py, commit 01ebc3ff): 7B H100 and v5p
``data=-1, fsdp=8``, 70B v5p ``fsdp=-1``, Trainium2 ``fsdp=-1, model=4``. Gradients are accumulated
over the fewest microbatches that fit by the memory model. Products are bfloat16, whatever a rule
says: the published MFUs are against that peak. ``others`` are the settings that were not taken;
they are predicted too, at the fitted efficiency.

**Fit.** One number per kind: the share of the peak that products reach, by least squares of the
logarithm of seconds, on the rows of dense models. Leave-one-out: each row predicted at the
efficiency of the others of its kind. Rows of mixtures of experts are predicted at the dense rows'
number, and at the instance's own where there are none.

**Not seen by the model**: see ``docs/cost.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from axcore import experiments
from axcore.errors import AxcoreError, PluginLookupError
from axcore.parallel import MeshShape
from axcore.parallel.cost import StepModel, StepPrediction
from axcore.remat import Remat
from axcore.train.assemble import assemble

BATCH = 1024
MEMORY_SHARE = 0.92  # what compilers leave to a program
ATTENTION_SAVED = Remat("sites", save=("qkv_proj", "attn_out"))


@dataclass(frozen=True)
class Row:
    """A published figure.

    Attributes:
        experiment: Name in the catalog.
        instance: The machine, by our name.
        seconds: Published, per step.
        mfu: Published, attention counted without causality, percent.
        mesh: Setting taken.
        seq_len: Tokens per row.
        others: Settings that were not taken.
        is_fitted: Whether it takes part in the fit. A mixture of experts does not: it is predicted
            at the number of the dense rows, since its efficiency is another quantity.
    """

    experiment: str
    instance: str
    seconds: float
    mfu: float
    mesh: Mapping[str, int] = field(hash=False)
    seq_len: int = 4096
    others: tuple[Mapping[str, int], ...] = field(default=(), hash=False)
    is_fitted: bool = True

    @property
    def name(self) -> str:
        """What it is about."""
        return f"{self.experiment} on {self.instance}"


ROWS = (
    Row(
        *("fuji-7B-v2", "gpu-p5.48xlarge-256", 1.4, 54.2, {"data": -1, "fsdp": 8}),
        others=({"fsdp": -1, "model": 8},),
    ),
    Row(
        *("fuji-70B-v2", "gpu-p5.48xlarge-512", 9.2, 40.0, {"fsdp": -1, "model": 8}),
        others=({"data": -1, "fsdp": 128},),
    ),
    Row("fuji-7B-v2", "tpu-v5p-512", 2.5, 66.2, {"data": -1, "fsdp": 8}),
    Row("fuji-70B-v2", "tpu-v5p-1024", 11.6, 68.0, {"fsdp": -1}),
    Row("fuji-7B-v2", "neuron-trn2.48xlarge-64", 1.2, 24.2, {"fsdp": -1, "model": 4}),
    Row("fuji-70B-v2", "neuron-trn2.48xlarge-64", 11.2, 25.0, {"fsdp": -1, "model": 4}),
    # Settings not published anywhere: fully sharded is assumed.
    Row("qwen3-30B-A3B", "tpu-v5p-1024", 12.9, 31.6, {"fsdp": -1}, 16384, is_fitted=False),
    Row("qwen3-30B-A3B", "gpu-b200-512", 4.3, 19.2, {"fsdp": -1}, 16384, is_fitted=False),
)

# Published MFU in percent at the fewest and the most chips; the settings are not published.
WEAK_SCALING = (
    # Slices of 256 chips over the data centre network, two rows a chip as on 512 chips.
    ("70B", "tpu-v5p-512-{slices}", (1, 2, 4, 8, 16), 2, (63.0, 52.4)),
    # 8,192 chips and more are several slices of any generation; which one is not said. v6e is the
    # reading that is taken (it is among the peaks that the paper lists), 7x the alternative.
    ("150B", "tpu-v6e-256-{slices}", (32, 64, 128), 1, (40.6, 37.6)),
    ("150B", "tpu-7x-4096-{slices}", (2, 4, 8), 1, (40.6, 37.6)),
)


# A flag's recipe wins over a rule's.
BFLOAT16 = "quantize:recipe=none"


def model_of(
    experiment: str, instance: str, mesh: Mapping[str, Any], *, seq_len: int, batch: int = BATCH
) -> StepModel:
    """Returns the model of a step with the fewest microbatches that fit into memory.

    Attention's values are saved; where that never fits, everything is recomputed.

    Raises:
        AxcoreError: The experiment or a plugin is missing, or the mesh does not fit.
    """
    built = assemble(_experiment(experiment), modifiers=(BFLOAT16,), instance=instance)
    cfg, machine = built.cfg, built.instance
    shape = MeshShape.of(mesh)
    cfg.set(batch_size=batch, seq_len=seq_len, mesh_shape=shape)
    sites = [path for path, node in cfg.walk() if "remat" in node.fields()]
    sizes = shape.sizes(machine.num_devices, machine.num_slices)
    rows = max(batch // math.prod(sizes[a] for a in ("data", "expert", "fsdp")), 1)
    tried: list[StepModel] = []
    for remat in (ATTENTION_SAVED, Remat("full")):
        for path in sites:
            cfg.set_path(f"{path}.remat", remat)
        for steps in (n for n in range(1, rows + 1) if rows % n == 0):
            tried.append(StepModel(cfg.copy().set(accumulation_steps=steps), machine))
            if tried[-1].memory.total <= MEMORY_SHARE * machine.hbm_bytes:
                return tried[-1]
    return tried[-1]


def _experiment(name: str) -> Any:
    if name != "150B":
        return experiments.get({"70B": "fuji-70B-v2"}.get(name, name))
    cfg = experiments.get("fuji-70B-v2")
    # 153 billion parameters: the 70B shape, half as wide again. The paper's own shape is not known.
    cfg.set_path("model.model_dim", 12288)
    for _, node in cfg.walk():
        if "num_heads" in node.fields():
            node.set(num_heads=96)
        if "hidden_dim" in node.fields():
            node.set(hidden_dim=43008)
    return cfg


def fit(found: Iterable[tuple[StepModel, float]]) -> float:
    """Returns the efficiency with the least squares of log(predicted / published)."""
    pairs = list(found)

    def loss(efficiency: float) -> float:
        return sum(math.log(m.at(efficiency).step_seconds / s) ** 2 for m, s in pairs)

    low, high = 0.02, 1.0
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-3:
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return round((low + high) / 2, 3)


@dataclass(frozen=True)
class Fitted:
    """A row, predicted.

    Attributes:
        row: The row.
        kind: Hardware kind.
        prediction: At the efficiency of all rows of the kind.
        left_out: Seconds at the efficiency of the others, or of the instance for a row that is not
            fitted; None where there are none.
        others: Settings that were not taken -> (seconds, leave-one-out error of this row, of the
            worst other row of the kind), had the row used them.
        microbatches: How many were taken.
    """

    row: Row
    kind: str
    prediction: StepPrediction
    left_out: float | None
    others: Mapping[str, tuple[float, float | None, float | None]]
    microbatches: int

    @property
    def error(self) -> float | None:
        """Leave-one-out error of the seconds, signed."""
        return None if self.left_out is None else self.left_out / self.row.seconds - 1


def calibrate(rows: Iterable[Row] = ROWS) -> tuple[list[Fitted], dict[str, str]]:
    """Fits all kinds.

    Returns:
        The rows that could be predicted; row name -> why not, of the others.
    """
    models: dict[Row, StepModel] = {}
    skipped: dict[str, str] = {}
    for row in rows:
        if row.experiment not in experiments.names():
            skipped[row.name] = f"the catalog has no {row.experiment}"
            continue
        try:
            models[row] = _model(row, row.mesh)
        except PluginLookupError as error:
            skipped[row.name] = str(error).splitlines()[0]
    kinds = {row: model.instance.family for row, model in models.items()}
    fitted: list[Fitted] = []
    for row, model in models.items():
        alike = [r for r in models if kinds[r] == kinds[row] and r.is_fitted]
        own = model.instance.matmul_efficiency
        efficiency = fit((models[r], r.seconds) for r in alike) if alike else own
        rest = [r for r in alike if r is not row]
        left = None
        if rest:
            left = model.at(fit((models[r], r.seconds) for r in rest)).step_seconds
        elif not row.is_fitted:
            left = model.at(efficiency).step_seconds
        others: dict[str, tuple[float, float | None, float | None]] = {}
        for mesh in row.others:
            instead = _model(row, mesh)
            seconds = instead.at(efficiency).step_seconds
            mine = other = None
            if rest:
                mine = instead.at(fit((models[r], r.seconds) for r in rest)).step_seconds
                mine = mine / row.seconds - 1
                fits = fit([(instead, row.seconds)])
                errors = [models[r].at(fits).step_seconds / r.seconds - 1 for r in rest]
                other = max(errors, key=abs)
            others[MeshShape.of(mesh).describe()] = (seconds, mine, other)
        found = model.at(efficiency)
        fitted.append(Fitted(row, kinds[row], found, left, others, model.steps))
    return fitted, skipped


def _model(row: Row, mesh: Mapping[str, int]) -> StepModel:
    return model_of(row.experiment, row.instance, mesh, seq_len=row.seq_len)


def weak_scaling() -> list[dict[str, Any]]:
    """Predicts MFU while chips and rows grow together, at the instance's own efficiency."""
    found: list[dict[str, Any]] = []
    for size, pattern, slices, rows, (first, last) in WEAK_SCALING:
        series: list[dict[str, Any]] = []
        for n in slices:
            name = pattern.format(slices=n)
            machine = assemble(experiments.get("tiny-lm"), instance=name).instance
            chips = int(machine.attributes["chips"]) * n
            mesh = {"data": -1, "fsdp": 256, "across_slices": {"data": -1}}
            model = model_of(size, name, mesh, seq_len=4096, batch=rows * machine.num_devices)
            prediction = model.at()
            exposed = prediction.step_seconds + prediction.hidden_seconds.get("data", 0.0)
            series.append(
                {
                    "chips": chips,
                    "mfu": 100 * prediction.mfu_noncausal,
                    # If nothing that crosses slices ran beside compute.
                    "mfu_exposed": 100
                    * prediction.mfu_noncausal
                    * (prediction.step_seconds / exposed),
                    "seconds": prediction.step_seconds,
                    "memory_gib": prediction.memory.total / 2**30,
                    "fits": prediction.memory.total <= machine.hbm_bytes,
                    "bound_by": prediction.bound_by,
                }
            )
        found.append({"model": size, "on": pattern, "published": [first, last], "series": series})
    return found


def main(argv: list[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="predicted beside published step times")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    fitted, skipped = calibrate()
    scaling = weak_scaling()
    if args.json:
        json.dump(_json(fitted, skipped, scaling), sys.stdout, indent=1)
        return 0
    line = "{:42} {:22} {:>3} {:>6} {:>7} {:>7} {:>7} {:>7} {:>7} {:>8}  {}"
    heads = (
        "row",
        "mesh",
        "mb",
        "publ s",
        "pred s",
        "publ %",
        "full %",
        "caus %",
        "effic",
        "l-o-o",
    )
    write = sys.stdout.write
    write(line.format(*heads, "bound by") + "\n")
    for f in fitted:
        p = f.prediction
        numbers = (f"{f.row.seconds}", f"{p.step_seconds:.2f}", f"{f.row.mfu}")
        numbers += (f"{100 * p.mfu_noncausal:.1f}", f"{100 * p.mfu_causal:.1f}")
        numbers += (f"{p.efficiency:.3f}", "-" if f.error is None else f"{100 * f.error:+.1f} %")
        mesh = MeshShape.of(f.row.mesh).describe()
        write(line.format(f.row.name, mesh, f.microbatches, *numbers, p.bound_by) + "\n")
        for name, (seconds, mine, other) in f.others.items():
            write(f"    with {name} instead: {seconds:.2f} s")
            if mine is not None and other is not None:
                write(f"; leave-one-out {100 * mine:+.0f} % here, {100 * other:+.0f} % elsewhere")
            write("\n")
    for name, reason in skipped.items():
        write(f"skipped {name}: {reason}\n")
    errors = [abs(f.error) for f in fitted if f.error is not None and f.row.is_fitted]
    if errors:
        write(f"leave-one-out error: largest {100 * max(errors):.1f} %, ")
        write(f"mean {100 * sum(errors) / len(errors):.1f} %\n")
    for series in scaling:
        write(f"weak scaling, {series['model']} on {series['on']}: published ")
        write(" -> ".join(f"{m} %" for m in series["published"]) + "; predicted ")
        points = (
            f"{p['chips']} chips {p['mfu']:.1f} % ({p['mfu_exposed']:.1f} % if nothing that "
            "crosses slices is hidden)" + ("" if p["fits"] else ", does not fit")
            for p in series["series"]
        )
        write(", ".join(points) + "\n")
    write(f"{time.perf_counter() - start:.0f} s\n")
    return 0


def _json(
    fitted: list[Fitted], skipped: Mapping[str, str], scaling: list[dict[str, Any]]
) -> dict[str, Any]:
    rows = [
        {
            "row": f.row.name,
            "kind": f.kind,
            "mesh": dict(f.row.mesh),
            "microbatches": f.microbatches,
            "published": {"seconds": f.row.seconds, "mfu": f.row.mfu},
            "predicted": f.prediction.to_json(),
            "leave_one_out_error": f.error,
            "others": dict(f.others),
        }
        for f in fitted
    ]
    return {"rows": rows, "skipped": dict(skipped), "weak_scaling": scaling}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AxcoreError as error:
        sys.exit(f"error: {error}")
