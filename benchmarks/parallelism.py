"""The table of docs/parallelism.md: one model, every strategy, three kinds of hardware.

    python benchmarks/parallelism.py [--model fuji-7B-v2] [--batch 1024]

Nothing is compiled: bytes and seconds are the cost model's (docs/cost.md), for a mesh that the
strategy names and everything else as the experiment has it, with whole layers recomputed.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from axcore import experiments
from axcore.config import apply_modifier
from axcore.parallel import (
    MeshShape,
    MeshShapeModifier,
    PipelineModifier,
    RematModifier,
    SequenceParallelModifier,
    SetModifier,
    ShardingRules,
    resolve_instance,
)
from axcore.parallel.cost import predict_step
from axcore.remat import Remat

INSTANCES = ("tpu-v5p-512", "gpu-h100-256", "neuron-trn2.48xlarge-4")
GIB = 2**30
ZERO_1 = ShardingRules(param_rules={"embed": ()}, optimizer_rules={"embed": ("fsdp",)})


def mesh(**sizes):
    return MeshShapeModifier.Config(mesh_shape=MeshShape(**sizes))


def attention(name):
    return SetModifier.Config(values={"ops.attention.implementations": (name,)})


def strategies():
    """Yields (name, what says it, modifier configs)."""
    zero = SetModifier.Config(values={"sharding_rules": ZERO_1})
    sequence = SequenceParallelModifier.Config()
    yield "data parallel", "`data=-1`", [mesh(data=-1)]
    yield "ZeRO-1", "`fsdp=-1`, rules", [mesh(fsdp=-1), zero]
    yield "FSDP (ZeRO-3)", "`fsdp=-1`", [mesh(fsdp=-1)]
    yield "HSDP", "`data=-1 fsdp=8`", [mesh(data=-1, fsdp=8)]
    yield "FSDP x tensor", "`fsdp=-1 model=8`", [mesh(fsdp=-1, model=8)]
    yield "... and sequence", "`sequence-parallel`", [mesh(fsdp=-1, model=8), sequence]
    yield "FSDP x ring", "`fsdp=-1 seq=4`", [mesh(fsdp=-1, seq=4), attention("ring")]
    yield "FSDP x all-to-all", "`fsdp=-1 seq=4`", [mesh(fsdp=-1, seq=4), attention("all_to_all")]
    pipeline = mesh(pipeline=4, fsdp=-1)
    for repeats, name in ((1, "FSDP x GPipe"), (2, "FSDP x circular")):
        modifier = PipelineModifier.Config(num_microbatches=16, num_repeats=repeats)
        yield name, f"`pipeline=4 fsdp=-1`, R={repeats}", [pipeline, modifier]
    stages = PipelineModifier.Config(num_microbatches=8)
    yield (
        "all but context",
        "`pipeline=2 data=4 fsdp=-1 model=4`",
        [mesh(pipeline=2, data=4, fsdp=-1, model=4), stages, sequence],
    )


def traffic(prediction) -> str:
    """Returns bytes that a device receives in a step, by kind and mesh axes."""
    short = {
        "all_gather": "gather",
        "reduce_scatter": "scatter",
        "all_reduce": "reduce",
        "all_to_all": "exchange",
        "permute": "permute",
    }
    parts = [
        f"{short[kind]} {axes} {n / GIB:.3g}"
        for (kind, axes), n in sorted(prediction.collective_bytes.items(), key=lambda i: -i[1])
        if n > 0.005 * GIB
    ]
    return ", ".join(parts) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="fuji-7B-v2")
    parser.add_argument("--batch", type=int, default=1024)
    args = parser.parse_args()
    base = experiments.get(args.model).set(batch_size=args.batch, accumulation_steps=1)
    base = apply_modifier(base, RematModifier.Config(remat=Remat("full")))
    machines = [resolve_instance(name) for name in INSTANCES]
    heads = " | ".join(f"{m.family}: s / MFU %" for m in machines)
    print(f"{args.model}, {args.batch} rows of {base.seq_len} tokens, on "
          + ", ".join(f"{m.name} ({m.num_devices} devices)" for m in machines) + "\n")  # fmt: skip
    print(f"| strategy | said by | GiB a device | GiB received in a step | {heads} |")
    print("|---|---|---|---|" + "---|" * len(machines))
    for name, said, modifiers in strategies():
        cfg = base
        for modifier in modifiers:
            cfg = apply_modifier(cfg, modifier)
        found = [predict_step(cfg, machine) for machine in machines]
        cells = []
        for machine, p in zip(machines, found, strict=True):
            fits = "" if p.memory.total <= 0.92 * machine.hbm_bytes else " (does not fit)"
            cells.append(f"{p.step_seconds:.2f} / {100 * p.mfu_noncausal:.1f}{fits}")
        first = found[0]
        print(
            f"| {name} | {said} | {first.memory.total / GIB:.1f} | {traffic(first)} | "
            + " | ".join(cells)
            + " |"
        )


if __name__ == "__main__":
    main()
