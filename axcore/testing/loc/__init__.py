"""LoC-complexity: the lines of existing code that adding a feature changes, as code grows.

:func:`measure` generates code bases of N modules and M variants before and after each feature,
counts the changed lines of files that were there before, checks that the feature works in every one
of them, and fits the growth. See ``docs/loc.md`` for the method and its limits.

Example:
    >>> from axcore.testing.loc import QUICK, find_features, measure
    >>> report = measure(find_features(["logit_cap"]), QUICK)  # doctest: +SKIP
    >>> [(row.name, row.fit.growth, row.changed_lines) for row in report.features]  # doctest: +SKIP
    [('logit_cap', 'O(1)', 0)]
"""

from axcore.testing.loc._configs import ConfigsResult
from axcore.testing.loc._features import FOLDER, Feature, find_features, parse_feature
from axcore.testing.loc._fit import Fit, fit_growth
from axcore.testing.loc._git import Landing, find_checkout, landings
from axcore.testing.loc._leaks import Leak, find_leaks
from axcore.testing.loc._measure import (
    FULL,
    MAX_INTEGRATION_LINES,
    QUICK,
    Grid,
    Report,
    Row,
    measure,
)
from axcore.testing.loc._normalize import changed_lines, code_lines, normalized
from axcore.testing.loc._published import COMPARED, PUBLISHED, SOURCE

__all__ = [
    "COMPARED",
    "FOLDER",
    "FULL",
    "MAX_INTEGRATION_LINES",
    "PUBLISHED",
    "QUICK",
    "SOURCE",
    "ConfigsResult",
    "Feature",
    "Fit",
    "Grid",
    "Landing",
    "Leak",
    "Report",
    "Row",
    "changed_lines",
    "code_lines",
    "find_checkout",
    "find_features",
    "find_leaks",
    "fit_growth",
    "landings",
    "measure",
    "normalized",
    "parse_feature",
]
