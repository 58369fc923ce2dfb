"""The loss curve of a run as a picture (extra ``plots``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axcore._files import atomic_write
from axcore.train.writers import read_metrics

__all__ = ["plot_loss"]

_POINTS = 100  # of the smoothed curve


def plot_loss(metrics: Path, target: Path, *, title: str = "") -> str | None:
    """Draws the training loss, smoothed, and every held-out loss over the step.

    Args:
        metrics: A ``metrics.jsonl``.
        target: The PNG file to write; its directory is made.
        title: Title of the picture.

    Returns:
        None when the picture is there, else the reason why not and what to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"plots need matplotlib ({error}): pip install 'axcore[plots]'"
    try:
        rows = read_metrics(metrics)
    except OSError as error:
        return f"{metrics} cannot be read: {error.strerror or error}"
    steps, losses = _series(rows, "loss")
    if not steps:
        return f"{metrics} holds no loss yet"

    figure = Figure(figsize=(8, 4.5), layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="training loss")
    width = max(1, len(losses) // _POINTS)
    if width > 1:
        axes.plot(steps[width - 1 :], _means(losses, width), color="C0", label=f"mean of {width}")
    held_out = sorted({name for row in rows for name in row if name.endswith("/loss")})
    for index, name in enumerate(held_out, 1):
        axes.plot(*_series(rows, name), "o-", color=f"C{index}", markersize=4, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, picture.getvalue())
    except OSError as error:  # the run itself is good: its report must not be lost to a picture
        return f"{target} cannot be written: {error.strerror or error}"
    return None


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _means(values: Sequence[float], width: int) -> list[float]:
    """Means over the last ``width`` values at each place."""
    total, out = 0.0, []
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        if i >= width - 1:
            out.append(total / width)
    return out
