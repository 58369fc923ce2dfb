"""The code on the README runs."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

from axcore.config import diff

PAGE = Path(__file__).parents[1] / "README.md"


def test_the_blocks_of_the_readme_run_in_order(monkeypatch):
    text = PAGE.read_text("utf-8")
    module = types.ModuleType("models_readme")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == 2
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), vars(module))
    # The example is the catalog's own function.
    assert not diff(module.qwen3_1_7b(), module.experiments.get("qwen3-1.7B"))
