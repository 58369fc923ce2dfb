"""What a run reports beside its losses, and how values become JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from axcore.data import BaseInput, reference_bits_per_byte
from axcore.train._program import Program

__all__ = ["finite", "kernel_report", "reference", "sample", "to_json"]

# xz looks back over the whole text; past this size the yardstick costs more than it tells.
_REFERENCE_BYTES = 8 << 20


def reference(data: BaseInput) -> dict[str, float]:
    """Bits per byte of a general compressor on all of the text, to stand beside the model's."""
    xz = reference_bits_per_byte(data.texts(), max_bytes=_REFERENCE_BYTES)
    return {"xz_bits_per_byte": xz, "uniform_bits_per_byte": 8.0}


def sample(
    program: Program, params: Mapping[str, Any], data: BaseInput, prompt: str
) -> dict[str, str]:
    """A continuation of ``prompt`` by the model."""
    from axcore.inference import Generator, Sampling

    cfg, tokenizer = program.trainer.cfg, data.tokenizer
    assert tokenizer is not None  # checked before the run
    generator = Generator(
        program.trainer.model,
        params,
        max_seq_len=getattr(cfg.model, "max_seq_len", None),
        eos_id=tokenizer.stop_ids,
        # One prompt does not divide among devices: there the compiler places it as it likes.
        target=program.target if program.mesh.size == 1 else None,
    )
    ids = tokenizer.encode_prompt(prompt).tolist()
    made = generator.generate([ids], 200, Sampling(temperature=0.7), slide=True)
    return {"prompt": prompt, "text": tokenizer.decode(made.tokens[0])}


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the values with None for what JSON lacks."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def to_json(value: Any) -> Any:
    """Returns a value with everything that JSON lacks written as null or text."""
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def kernel_report(choices: Any) -> list[dict[str, Any]]:
    """One row per distinct choice, with the sites it was made at."""
    rows: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for choice in choices:
        row = rows.setdefault(
            (choice.op, choice.chosen, choice.fallback),
            {
                "op": choice.op,
                "chosen": choice.chosen,
                "fallback": choice.fallback,
                "sites": [],
                "refused": [],
            },
        )
        if choice.site not in row["sites"]:
            row["sites"].append(choice.site)
        for refusal in choice.refused:
            entry = {"implementation": refusal.implementation, "reason": refusal.reason}
            if entry not in row["refused"]:
                row["refused"].append(entry)
    return list(rows.values())
