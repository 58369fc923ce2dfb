"""Multi-axis rotary positions: which axis each rotary frequency reads."""

from __future__ import annotations

import dataclasses
from typing import Literal

from axcore.errors import ConfigError

__all__ = ["MultiAxis"]


@dataclasses.dataclass(frozen=True)
class MultiAxis:
    """Rotary frequencies divided among several position axes, such as time, height and width.

    Positions come from ``info.token_values[name]``, int (batch, seq, num_axes). A text token has
    the same position on every axis, which makes it equal to ordinary RoPE.

    ``layout="blocks"`` gives the first ``sections[0]`` frequencies to axis 0, the next
    ``sections[1]`` to axis 1, and so on (Qwen2-VL, arXiv:2409.12191, section 2.1).
    ``"interleaved"`` deals them out in turn, so that every axis has high and low frequencies:
    frequency ``i`` belongs to axis ``i mod num_axes`` until that axis has its share, and what
    remains belongs to axis 0 (Qwen3-VL, arXiv:2511.21631).

    Attributes:
        sections: Number of frequencies of each axis; they add up to half of the rotary dims.
        layout: How they are laid out.
        name: The entry of ``info.token_values`` that holds the positions.

    Raises:
        ConfigError: A section is no positive int, or the axes do not fit interleaved.
    """

    sections: tuple[int, ...]
    layout: Literal["blocks", "interleaved"] = "blocks"
    name: str = "rope_positions"

    def __post_init__(self) -> None:
        sections = self.sections
        if not sections or any(type(n) is not int or n < 1 for n in sections):
            raise ConfigError(
                f"MultiAxis(sections={sections!r}): expected a positive int for each axis",
                code="AX382",
                hint="for example (16, 24, 24) for 128 dims of time, height and width",
            )
        if self.layout not in ("blocks", "interleaved"):
            raise ConfigError(
                f"MultiAxis(layout={self.layout!r}): expected 'blocks' or 'interleaved'",
                code="AX382",
            )
        num, total = len(sections), sum(sections)
        if self.layout == "interleaved" and any(
            axis > 0 and axis + num * (count - 1) >= total for axis, count in enumerate(sections)
        ):
            raise ConfigError(
                f"MultiAxis(sections={sections!r}) cannot be interleaved: dealt out in turn, an "
                f"axis would run past the last of {total} frequencies",
                code="AX382",
                hint="make the later sections smaller, as in (24, 20, 20), or use blocks",
            )

    def axis_of_frequency(self) -> tuple[int, ...]:
        """Returns the axis that each of the ``sum(sections)`` frequencies reads."""
        if self.layout == "blocks":
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        num = len(self.sections)
        return tuple(
            i % num if i // num < self.sections[i % num] else 0 for i in range(sum(self.sections))
        )
