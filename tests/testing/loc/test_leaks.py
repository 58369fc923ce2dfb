"""The scanner finds what is planted and nothing beside it."""

import textwrap

import pytest

from axcore.testing.loc import find_leaks


@pytest.fixture
def leaks(tmp_path):
    def scan(source: str, *words: str):
        (tmp_path / "m.py").write_text(textwrap.dedent(source))
        return [(leak.line, leak.kind, leak.name) for leak in find_leaks([tmp_path], words)]

    return scan


@pytest.mark.parametrize(
    ("source", "kind", "name"),
    [
        ("def f(x, use_rope=False): pass", "argument", "use_rope"),
        ("def f(x, *, rope_base: float): pass", "argument", "rope_base"),
        ("f = lambda ropeBase: ropeBase", "argument", "ropeBase"),
        ("class C:\n    rope: bool = False", "field", "rope"),
        ("class C:\n    rope_base = 1e4", "field", "rope_base"),
        ("class C:\n    class Config:\n        RoPE_theta: float = 1.0", "field", "RoPE_theta"),
        ("if cfg.rope: pass", "branch", "rope"),
        ("if isinstance(x, RoPE): pass", "branch", "RoPE"),
        ("y = a if kind == 'rope' else b", "branch", "rope"),
        ("y = [a for a in b if a.is_rope]", "branch", "is_rope"),
        ("while rope: pass", "branch", "rope"),
        ("assert not rope", "branch", "rope"),
        ("match x:\n    case RoPE(): pass", "branch", "RoPE"),
        ("match x:\n    case 'rope': pass", "branch", "rope"),
        ("if f(rope=1): pass", "branch", "rope"),
    ],
)
def test_planted_leaks_are_found(leaks, source, kind, name):
    assert [found[1:] for found in leaks(source, "rope")] == [(kind, name)]


@pytest.mark.parametrize(
    "source",
    [
        "from axlearn_rope import RoPE\ncfg.query_key_transform = RoPE.Config(base=1e4)",
        "# rope\ndef f():\n    'Knows nothing of rope.'\n    return 'rope'",
        "class C:\n    properties: int = 0\n    europe: int = 0\n    tropes = ()",
        "if property_of(x): pass",
        "def transform(q, k): pass",
    ],
    ids=["use", "text", "other words", "branch on another word", "plain"],
)
def test_use_text_and_other_words_are_none(leaks, source):
    assert leaks(source, "rope") == []


def test_place_and_scope_are_told(tmp_path):
    path = tmp_path / "m.py"
    path.write_text("class A:\n    def f(self, x, moe):\n        return x\n")
    (leak,) = find_leaks([path], {"moe"})
    assert str(leak) == f"{path}:2: argument 'moe' in A.f"
