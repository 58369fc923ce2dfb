"""What a general compressor makes of the same text: a yardstick beside a model's bits per byte."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterable

__all__ = ["bits_per_byte", "reference_bits_per_byte"]

_MIB = 2**20


def reference_bits_per_byte(
    documents: Iterable[str | bytes], *, max_bytes: int = 64 * _MIB
) -> float:
    """Returns the bits per byte that xz (LZMA2, extreme preset) needs for the documents together.

    Documents are joined by a blank line. The Python language reference comes to 1.63.

    Args:
        documents: Texts, or their UTF-8 bytes.
        max_bytes: Stops reading after this many bytes; memory is about 11 times as much, at most.

    Returns:
        Bits per byte; ``nan`` when there is no text.
    """
    parts: list[bytes] = []
    total = 0
    for document in documents:
        part = document if isinstance(document, bytes) else document.encode("utf-8")
        parts.append(part[: max_bytes - total])
        total += len(parts[-1])
        if total >= max_bytes:
            break
    data = b"\n\n".join(parts)
    if not data:
        return float("nan")
    # A dictionary of the text's size instead of the preset's 64 MiB: the same result, and not the
    # 670 MiB of memory that the preset takes for any input.
    dict_size = 1 << max(12, (len(data) - 1).bit_length())
    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": dict_size}]
    packed = lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters)
    return len(packed) * 8 / len(data)


def bits_per_byte(total_nats: float, num_bytes: int) -> float:
    """Returns a summed cross-entropy in nats as bits per byte of text."""
    return total_nats / math.log(2) / num_bytes
