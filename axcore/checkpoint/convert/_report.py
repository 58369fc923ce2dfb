"""What ``conversion.json`` says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["Comparison", "ConversionReport", "MappedTensor", "plain"]


@dataclasses.dataclass(frozen=True)
class MappedTensor:
    """One group of foreign tensors and the parameters made of them, or the reverse.

    Attributes:
        foreign: Foreign names; empty when the parameters were filled with a constant.
        path: Our paths.
        transform: How the arrays correspond.
        foreign_shapes: Shapes of the foreign tensors.
        foreign_dtypes: Their dtypes or block formats, as stored.
        foreign_sha256: Hashes of their bytes, as stored.
        shapes: Our shapes.
        dtypes: Our dtypes.
        sha256: Hashes of our values: little-endian, C order.
    """

    foreign: tuple[str, ...]
    path: tuple[str, ...]
    transform: str
    foreign_shapes: tuple[tuple[int, ...], ...]
    foreign_dtypes: tuple[str, ...]
    foreign_sha256: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    sha256: tuple[str, ...]

    @property
    def changes_shape(self) -> bool:
        """Whether the shapes differ between the two sides."""
        return self.foreign_shapes != self.shapes


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our outputs against the source's own, on fixed prompts.

    Attributes:
        max_abs_difference: The largest difference, or None when the source was not run.
        reason: Why it was not run, or None.
        max_abs_output: The source's largest output, to hold the difference against.
        tolerance: The difference that would have been refused.
        same_top: Share of positions where both have the same largest output.
        input_ids: The prompts, rows of token ids.
    """

    max_abs_difference: float | None
    reason: str | None = None
    max_abs_output: float | None = None
    tolerance: float | None = None
    same_top: float | None = None
    input_ids: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """Content of ``conversion.json``.

    Attributes:
        direction: ``import`` or ``export``.
        source: Where the tensors came from: path, format, architecture, files with sizes.
        out: The directory that was written.
        family: The converter, ``FORMAT:ARCHITECTURE``, and the distribution that provides it.
        dtype: Dtype that was asked for, or None.
        mapped: Every tensor that was taken.
        initialized: Parameters that kept their initial values, with the reason.
        unmapped: Parameters that the source does not hold and that were allowed to be missing.
        unused: Foreign tensors that nothing took and that were allowed.
        tied: Foreign tensors that repeat another one, equal to the bit.
        ignored: Foreign tensors that are no parameters, with the reason.
        not_finite: Parameters with NaN or infinite values, which were allowed.
        allow: What was allowed, as patterns.
        settings: The source's settings.
        settings_unread: Those that the converter did not look at.
        generation_config: The source's settings for generation.
        tokenizer: The tokenizer's class and vocabulary, or None when there is none.
        comparison: The evidence.
    """

    direction: str
    source: Mapping[str, Any]
    out: str
    family: Mapping[str, str]
    dtype: str | None
    mapped: tuple[MappedTensor, ...]
    initialized: Mapping[str, str]
    unmapped: tuple[str, ...]
    unused: tuple[str, ...]
    tied: Mapping[str, str]
    ignored: Mapping[str, str]
    not_finite: tuple[str, ...]
    allow: tuple[str, ...]
    settings: Mapping[str, Any]
    settings_unread: tuple[str, ...]
    generation_config: Mapping[str, Any] | None
    tokenizer: Mapping[str, Any] | None
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object."""
        parameters = sum(len(m.path) for m in self.mapped)
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found["mapped"] = [dataclasses.asdict(m) for m in self.mapped]
        found["comparison"] = dataclasses.asdict(self.comparison)
        said = {
            "max_abs_logit_difference": self.comparison.max_abs_difference,
            "tensors": sum(len(m.foreign) for m in self.mapped),
            "parameters": parameters,
            **found,
            "shape_changes": [
                {
                    "foreign": list(m.foreign),
                    "path": list(m.path),
                    "from": [list(s) for s in m.foreign_shapes],
                    "to": [list(s) for s in m.shapes],
                }
                for m in self.mapped
                if m.changes_shape and m.foreign
            ],
        }
        return plain(said)


def plain(value: Any) -> Any:
    """Returns a value in JSON's types; numbers that JSON lacks become their names."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
