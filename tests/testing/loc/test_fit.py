"""The fitted class is that of the law which the counts were made from."""

import numpy as np
import pytest

from axcore.errors import CliError
from axcore.testing.loc import FULL, QUICK, fit_growth

LAWS = {
    "O(1)": lambda n, m: 12,
    "O(N)": lambda n, m: 3 + 4 * n,
    "O(M)": lambda n, m: 5 + 6 * m,
    "O(N+M)": lambda n, m: 2 + 3 * n + 5 * m,
    "O(NM)": lambda n, m: 4 + 2 * n * m,
}


@pytest.mark.parametrize("grid", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("growth", LAWS)
def test_exact_counts_give_their_law(growth, grid):
    fit = fit_growth({(n, m): LAWS[growth](n, m) for n, m in grid.sizes()})
    assert fit.growth == growth


def test_no_change_at_all_is_constant_zero():
    fit = fit_growth(dict.fromkeys(FULL.sizes(), 0))
    assert (fit.growth, dict(fit.coefficients)) == ("O(1)", {"1": 0.0})


@pytest.mark.parametrize("growth", LAWS)
def test_noise_of_a_line_or_two_does_not_change_the_class(growth):
    rng = np.random.default_rng(7)
    found = []
    for _ in range(100):
        counts = {p: LAWS[growth](*p) + rng.normal(0, 1.5) for p in FULL.sizes()}
        found.append(fit_growth(counts).growth)
    # Strong evidence is asked for, so a wrong class is rare: at most 5 in 100.
    assert found.count(growth) >= 95, found


def test_lower_terms_do_not_hide_the_fastest():
    fit = fit_growth({(n, m): 3 * n + 9 * n * m for n, m in FULL.sizes()})
    assert fit.growth == "O(NM)"
    assert fit.coefficients == pytest.approx({"1": 0, "N": 3, "NM": 9}, abs=1e-6)


def test_one_line_somewhere_is_no_growth():
    counts = dict.fromkeys(FULL.sizes(), 7)
    counts[20, 2] = 8
    assert fit_growth(counts).growth == "O(1)"


@pytest.mark.parametrize("points", [[(5, 1), (10, 1), (20, 1), (40, 1)], [(5, 1), (10, 2)]])
def test_a_grid_that_cannot_tell_is_refused(points):
    with pytest.raises(CliError, match="cannot tell"):
        fit_growth(dict.fromkeys(points, 1))
