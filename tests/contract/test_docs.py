"""The code on the documentation's pages runs."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["guide.md", "interop.md", "moe.md", "peft.md", "quantization.md"])
def test_the_blocks_of_a_page_run_in_order(page, monkeypatch):
    text = (DOCS / page).read_text()
    # A module of its own, so that config classes on the page have a public path.
    module = types.ModuleType("docs_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 3
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(DOCS / page), "exec")
        exec(code, vars(module))
