"""The code on the README runs."""

import re
import sys
import types
from pathlib import Path

PAGE = Path(__file__).parents[1] / "README.md"


def test_the_blocks_of_the_readme_run_in_order(monkeypatch):
    text = PAGE.read_text()
    module = types.ModuleType("rope_readme")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 5
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), vars(module))
