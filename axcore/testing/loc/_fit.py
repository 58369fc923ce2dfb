r"""The order of growth of a count over N modules and M variants, by BIC.

The counts are fitted by least squares with each subset of the terms {1, N, M, NM} that holds the
constant. With ``n`` counts, ``k`` terms and residual variance ``s``, floored at 1/12 (what rounding
to whole lines leaves), ``BIC = n ln(s) + k ln(n)``. A further term must earn its place: the chosen
subset is the smallest whose BIC is within 6 of the best ("strong evidence" begins there: Kass and
Raftery 1995, doi:10.1080/01621459.1995.10476572). The class is the fastest growing chosen term.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from axcore.errors import CliError

__all__ = ["Fit", "fit_growth"]

_STRONG = 6.0
_ROUNDING = 1 / 12
_TERMS = ("N", "M", "NM")


@dataclass(frozen=True)
class Fit:
    """An order of growth.

    Attributes:
        growth: ``O(1)``, ``O(N)``, ``O(M)``, ``O(N+M)`` or ``O(NM)``.
        coefficients: Term -> lines per unit of it; the terms that were chosen.
        bic: Chosen terms, joined by ``+`` -> BIC, of each subset tried.
    """

    growth: str
    coefficients: Mapping[str, float]
    bic: Mapping[str, float]


def fit_growth(counts: Mapping[tuple[int, int], float]) -> Fit:
    """Fits counts.

    Args:
        counts: (N, M) -> lines. At least two values of N and of M, over a full grid.

    Raises:
        CliError: The points cannot tell the terms apart.
    """
    points = sorted(counts)
    y = np.array([counts[p] for p in points], np.float64)
    n = np.array([p[0] for p in points], np.float64)
    m = np.array([p[1] for p in points], np.float64)
    columns = {"N": n, "M": m, "NM": n * m}
    whole = np.stack([np.ones_like(n), *columns.values()], axis=1)
    if len(points) < 4 or np.linalg.matrix_rank(whole) < whole.shape[1]:
        raise CliError(
            f"{len(points)} code bases {points} cannot tell O(1), O(N), O(M) and O(NM) apart",
            code="AX870",
            hint="measure a grid of at least two sizes N and two sizes M",
        )
    found: list[tuple[float, tuple[str, ...], np.ndarray]] = []
    for size in range(len(_TERMS) + 1):
        for terms in itertools.combinations(_TERMS, size):
            x = np.stack([np.ones_like(n), *(columns[t] for t in terms)], axis=1)
            solution = np.linalg.lstsq(x, y, rcond=None)[0]
            variance = max(float(np.mean((y - x @ solution) ** 2)), _ROUNDING)
            bic = len(points) * math.log(variance) + x.shape[1] * math.log(len(points))
            found.append((bic, terms, solution))
    best = min(bic for bic, _, _ in found)
    strong = [each for each in found if each[0] <= best + _STRONG]
    _, terms, solution = min(strong, key=lambda each: (len(each[1]), each[0]))
    values = (round(float(value), 9) + 0.0 for value in solution)
    coefficients = dict(zip(("1", *terms), values, strict=True))
    return Fit(_growth(terms), coefficients, {"+".join(("1", *t)): b for b, t, _ in found})


def _growth(terms: tuple[str, ...]) -> str:
    if "NM" in terms:
        return "O(NM)"
    return f"O({'+'.join(terms)})" if terms else "O(1)"
