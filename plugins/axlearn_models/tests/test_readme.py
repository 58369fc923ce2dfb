"""The code on the README runs."""

from pathlib import Path

from axcore.config import diff
from axcore.testing import run_page


def test_the_blocks_of_the_readme_run_in_order():
    page = run_page(Path(__file__).parents[1] / "README.md")
    # The example is the catalog's own function.
    assert not diff(page.qwen3_1_7b(), page.experiments.get("qwen3-1.7B"))
