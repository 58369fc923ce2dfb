"""The code on a page of documentation, run as its reader would."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

__all__ = ["run_page"]

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_page(path: Path) -> types.ModuleType:
    """Runs the Python blocks of a Markdown page, in order, as one module.

    Args:
        path: The page; a traceback names its lines.

    Returns:
        The module, with the names that the page defines.

    Raises:
        AssertionError: There is no such block.
        Exception: What the code raises.

    Example:
        ```python
        def test_the_code_on_the_readme_runs():
            run_page(Path(__file__).parents[1] / "README.md")
        ```
    """
    text = path.read_text("utf-8")
    blocks = list(_BLOCK.finditer(text))
    assert blocks, f"{path} has no block of Python"
    # Importable meanwhile, so that config classes on the page have a public path.
    module = types.ModuleType(f"page_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}")
    sys.modules[module.__name__] = module
    try:
        for block in blocks:
            line = text[: block.start(1)].count("\n")
            exec(compile("\n" * line + block[1], str(path), "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return module
