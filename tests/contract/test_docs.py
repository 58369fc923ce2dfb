"""The code on the documentation's pages runs."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SIGNATURES = "hooks.md"  # its blocks are written by axcore.testing.hook_docs, and call nothing
PAGES = sorted(
    path.name
    for path in DOCS.glob("*.md")
    if path.name != SIGNATURES and BLOCK.search(path.read_text())
)


def test_pages_with_code_are_found():
    assert {"guide.md", "interop.md", "quantization.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page, monkeypatch):
    text = (DOCS / page).read_text()
    # A module of its own, so that config classes on the page have a public path.
    module = types.ModuleType("docs_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(DOCS / page), "exec")
        exec(code, vars(module))


def test_every_kernel_is_on_the_page_of_kernels(plugin_host):
    text = (DOCS / "kernels.md").read_text()
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", text))
    registered = {spec.implementation for spec in plugin_host.kernels.specs()}
    assert registered <= named, registered - named
