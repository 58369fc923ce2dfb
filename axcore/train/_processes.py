"""What the processes of one run tell each other on the host, outside of compiled programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from axcore.errors import TrainError
from axcore.plugins import host

__all__ = ["check_same", "gather_json"]


def check_same(config_text: str) -> None:
    """Processes of one run must have the same config and plugins; a collective call."""
    mine = {"config": config_text, "plugins": host().digest()}
    for index, theirs in enumerate(gather_json(mine)):
        differ = [name for name in mine if theirs[name] != mine[name]]
        if differ:
            raise TrainError(
                f"process {jax.process_index()} and process {index} have different "
                f"{' and '.join(differ)}",
                code="AX704",
                hint="start all processes with the same command in the same environment",
            )


def gather_json(value: Mapping[str, Any]) -> list[Any]:
    """Returns the values of all processes; a collective call."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data), np.int32)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:n])) for row, n in zip(rows, sizes.tolist(), strict=True)]
