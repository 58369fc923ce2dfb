"""The code on the README runs."""

from pathlib import Path

from axcore.testing import run_page


def test_the_blocks_of_the_readme_run_in_order():
    page = run_page(Path(__file__).parents[1] / "README.md")
    assert page.rope.scaling.factor == 4.0  # the last block's
