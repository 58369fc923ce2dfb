"""A page's code runs in order, as one module, and its errors name the page's line."""

from __future__ import annotations

import sys
import traceback

import pytest

from axcore.testing import run_page


def page(tmp_path, text):
    path = tmp_path / "a-page.md"
    path.write_text(text)
    return path


def test_blocks_see_what_earlier_ones_define(tmp_path):
    text = "```python\na = 2\n```\n```text\nno\n```\n```python\nb = a + 1\n```\n"
    module = run_page(page(tmp_path, text))
    assert (module.a, module.b) == (2, 3)
    assert module.__name__ not in sys.modules


def test_an_error_names_the_line_of_the_page(tmp_path):
    path = page(tmp_path, "# A\n\n```python\na = 1\nb = a / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(path)
    last = traceback.extract_tb(caught.tb)[-1]
    assert (last.filename, last.lineno) == (str(path), 5)
    assert "page_a_page" not in sys.modules


def test_a_page_without_code_is_no_page_to_run(tmp_path):
    with pytest.raises(AssertionError, match="no block of Python"):
        run_page(page(tmp_path, "# A\n"))
