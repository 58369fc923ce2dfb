"""What counts as a changed line, and what does not."""

import textwrap

import pytest

from axcore.testing.loc import changed_lines, code_lines, normalized

BEFORE = textwrap.dedent('''
    """A module."""

    import b
    from a import c, d


    def f(x, scale=1.0):
        """Scales."""
        if x:
            return x * scale
        return 0
''')


def changed(after: str, before: str = BEFORE) -> int:
    return changed_lines({"m.py": before}, {"m.py": textwrap.dedent(after)})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    if x:", "    # why\n\n    if (x):  # because"),
        ("def f(x, scale=1.0):", "def f(\n    x,\n    scale=1.0,\n):"),
        ("import b\nfrom a import c, d", "from a import d\nfrom a import c\nimport b"),
        ('"""Scales."""', '"""Scales a number, or not."""'),
        ('"""A module."""\n', ""),
        ("        return x * scale", "        return (x * scale)"),
    ],
    ids=["comment", "layout", "imports", "docstring", "no docstring", "parentheses"],
)
def test_layout_comments_and_order_of_imports_do_not_count(old, new):
    assert old in BEFORE
    assert changed(BEFORE.replace(old, new)) == 0


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("scale=1.0", "scale=2.0", 1),
        ("def f(x, scale=1.0)", "def f(x, scale=1.0, *, flag=False)", 1),
        ("        return x * scale", "        x = x + 1\n        return x * scale", 1),
        ("    return 0\n", "", 1),
        ("from a import c, d", "from a import c, d, e", 1),
        ("    if x:\n        return x * scale", "    while x:\n        x -= 1", 2),
    ],
    ids=["default", "signature", "added", "removed", "import", "replaced"],
)
def test_what_the_code_says_counts(old, new, count):
    assert old in BEFORE
    assert changed(BEFORE.replace(old, new)) == count


def test_new_files_do_not_count_and_lost_ones_count_whole():
    files = {"a.py": "x = 1\n\ny = 2\n", "b.txt": "one\ntwo\n"}
    assert changed_lines(files, {**files, "new.py": "z = 3\n"}) == 0
    assert changed_lines(files, {"a.py": files["a.py"]}) == 2
    assert changed_lines(files, {**files, "b.txt": "one\nthree\nfour\n"}) == 2


def test_a_function_that_is_only_documented_stays_one():
    assert normalized('def f():\n    """Nothing."""\n') == ("def f():", "    pass")


def test_code_lines_are_those_of_the_layout():
    source = '''
        """Doc."""
        from a import b  # why

        def f(
            x,
        ):
            """Doc of two
            lines."""

            return b(
                x
            )
    '''
    assert code_lines(textwrap.dedent(source)) == 1 + 3 + 3
