"""The harness counts what is changed, and sees what does not work."""

import textwrap

import pytest

from axcore.testing.loc import Grid, find_features, measure, parse_feature

pytestmark = pytest.mark.xdist_group("loc")

GRID = Grid(modules=(2, 3), variants=(1, 2), num_configs=4, num_bases=1)

EDITED = '''
"""A flag that every module must know."""

# %% edit modules/m*.py
def edit(text):
    text = text.replace("def experiment(**sizes):", "def experiment(doubled=True, **sizes):")
    return text.replace("    return cfg", "    return double(cfg) if doubled else cfg") + DOUBLE


DOUBLE = """

def double(cfg):
    from axcore.layers import Attention

    for attention in cfg.find(Attention.Config).values():
        attention.logit_scale = 2.0
    return cfg
"""

# %% integration
def integrate(cfg):
    """Nothing: it is built in."""

# %% check
def is_present(cfg, model):
    return True

def check(probe):
    probe.differ(probe.after_logits, probe.before_logits, "the result changes")
'''.lstrip()

PER_VARIANT = (
    EDITED.replace("modules/m*.py", "variants/v*.py")
    .replace("def experiment(**sizes)", "def apply(cfg)")
    .replace("def experiment(doubled=True, **sizes)", "def apply(cfg, doubled=True)")
)

IDLE = '''
"""A feature that does nothing in the second module."""

# %% integration
from axcore.layers import Attention

def integrate(cfg):
    if cfg.model.module_index != 1:
        cfg.at("model.decoder.layer.attention").set(logit_scale=2.0)

# %% check
def is_present(cfg, model):
    return True

def check(probe):
    probe.differ(probe.after_logits, probe.before_logits, "the result changes")
'''.lstrip()


def control():
    return find_features(["logit_cap"])


@pytest.mark.parametrize(("text", "growth"), [(EDITED, "O(N)"), (PER_VARIANT, "O(M)")])
def test_a_feature_that_edits_files_is_counted(text, growth):
    feature = parse_feature("edited", text, "test")
    report = measure([feature], GRID, control=control())
    (row,) = report.features
    assert row.gate is not None and not row.gate.failures
    assert row.fit.growth == growth
    # Signature, return, and four lines more: the last one of the file is there already.
    num_files = {"O(N)": 3, "O(M)": 2}[growth]
    assert row.changed_lines == 6 * num_files
    assert any(f"edited: {growth}" in problem for problem in report.problems)


def test_a_feature_that_does_not_work_everywhere_is_a_problem():
    report = measure([parse_feature("idle", IDLE, "test")], GRID, control=control())
    (row,) = report.features
    assert row.gate is not None
    assert set(row.gate.failures) == {(1, 0)}
    assert "the result changes" in row.gate.failures[1, 0]
    assert any(p.startswith("idle: module 1, variant 0") for p in report.problems)


def test_a_snippet_that_raises_is_a_failure_with_its_error():
    text = IDLE.replace("if cfg.model.module_index != 1:", "if cfg.nothing:")
    report = measure([parse_feature("idle", text, "test")], GRID, control=control())
    gate = report.features[0].gate
    assert gate is not None and len(gate.failures) == 6
    assert all("nothing" in why for why in gate.failures.values())


def test_a_long_snippet_is_a_problem():
    lines = "".join(f"    number_{i} = {i}\n" for i in range(11))
    text = IDLE.replace("    if cfg.model.module_index != 1:\n        ", lines + "    ")
    report = measure([parse_feature("long", text, "test")], GRID, control=control())
    assert any("long: 13 integration lines" in problem for problem in report.problems)


def test_a_control_that_is_not_of_order_nm_is_a_problem():
    # Without a body and a flag in the call there is nothing that grows: the harness must say so.
    text = IDLE + textwrap.dedent('''
        # %% flat mask
        def flat(mask, positions, *, idle=False):
            """Nothing."""
    ''')
    report = measure([parse_feature("idle", text, "test")], GRID)
    assert any("flat idle changes nothing" in problem for problem in report.problems)


def test_a_run_without_control_is_a_problem():
    report = measure([], GRID)
    assert any("nothing shows that the harness counts" in p for p in report.problems)
