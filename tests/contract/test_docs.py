"""The code on the documentation's pages runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from axcore.testing import run_page

DOCS = Path(__file__).parents[2] / "docs"
SIGNATURES = "hooks.md"  # its blocks are written by axcore.testing.hook_docs, and call nothing
PAGES = sorted(
    path.name
    for path in DOCS.glob("*.md")
    if path.name != SIGNATURES and "\n```python\n" in path.read_text()
)


def test_pages_with_code_are_found():
    assert {"guide.md", "interop.md", "quantization.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page):
    run_page(DOCS / page)


def test_every_kernel_is_on_the_page_of_kernels(plugin_host):
    text = (DOCS / "kernels.md").read_text()
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", text))
    registered = {spec.implementation for spec in plugin_host.kernels.specs()}
    assert registered <= named, registered - named
