"""Writes ``docs/hooks.md`` from the hook specifications: ``python -m axcore.testing.hook_docs``.

With ``--check`` it writes nothing and exits with 1 if the page is not current.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from pathlib import Path

from axcore.plugins import HOOKS, Hook, Spec

__all__ = ["render"]

_HEAD = """\
# Hooks

A plugin is a module of hook functions and strings, named by an entry point in the group `axcore`:

```toml
[project.entry-points.axcore]
acme-kernels = "acme_kernels.plugin"
```

All hooks are optional, take no arguments and return an iterable of frozen specs from
`axcore.plugins`. A *target* is a string `"module:attribute"`, imported when the thing is used; a
plugin module itself must not import JAX. Hooks run once, when the plugin host starts, and their
order never matters. Arguments may be added to a hook within a major version, never removed.

`axcore plugins new NAME` writes a complete plugin to start from; `axcore plugins check` tells
whether it is well.

<!-- Written by `python -m axcore.testing.hook_docs`; edit axcore/plugins/hookspecs.py instead. -->
"""


def render() -> str:
    """Returns the page."""
    parts = [_HEAD]
    parts += [_hook(hook) for hook in HOOKS]
    parts.append("\n# Specs\n")
    parts += [_spec(cls) for cls in dict.fromkeys(hook.spec for hook in HOOKS)]
    return "\n".join(parts).rstrip() + "\n"


def _hook(hook: Hook) -> str:
    doc = hook.doc.replace("``", "`")
    signature = f"def {hook.name}() -> Iterable[{hook.spec.__name__}]"
    return f"## `{hook.name}`\n\n```python\n{signature}\n```\n\n{doc}\n"


def _spec(cls: type[Spec]) -> str:
    """Describes a spec's fields, from its docstring and those of its bases."""
    described: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        described |= _attributes(inspect.getdoc(base) or "") if issubclass(base, Spec) else {}
    first = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    lines = [f"## `{cls.__name__}`\n", f"{first}\n"]
    for field in dataclasses.fields(cls):
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        told = described.get(field.name, "").replace("``", "`")
        if field.name == "name" and cls.named_by:
            told = f"Follows from {' and '.join(cls.named_by)}; leave it out."
        lines.append(f"- `{field.name}: {field.type}`{'' if required else ' (optional)'}: {told}")
    return "\n".join(lines) + "\n"


def _attributes(doc: str) -> dict[str, str]:
    """Parses the ``Attributes:`` section of a Google docstring."""
    _, _, section = doc.partition("Attributes:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail unless the page is current")
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/hooks.md"))
    args = parser.parse_args()
    if args.check:
        return int(not args.path.exists() or args.path.read_text() != render())
    args.path.write_text(render())
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
