"""Chat templates: messages to text, in jinja's sandbox; users' text kept apart from markup.

A template comes with a model, from anyone. It runs in ``ImmutableSandboxedEnvironment``: no Python
attributes, no imports, no files. The dialect is the one that published templates are written in:
``trim_blocks``, ``lstrip_blocks``, loop controls, ``{% generation %}``, ``tojson``,
``raise_exception`` and ``strftime_now``. What it computes and holds is counted (``_chat_limits``).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from axcore.data._chat_limits import compiled_with_limits, limits
from axcore.errors import DataError

__all__ = ["guard", "render_chat", "unguarded"]

_MAX_TEMPLATE_CHARS = 2**20
# Noncharacters: reserved by Unicode for a program's own use, so no message needs them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], *, where: str = "", **variables: Any
) -> str:
    """Returns the prompt that a template makes of messages.

    Args:
        template: Jinja source.
        messages: ``{"role": ..., "content": ...}`` and what else the template knows.
        where: For errors: whose template it is.
        **variables: ``bos_token``, ``add_generation_prompt``, ``tools`` and the like.

    Raises:
        DataError: The template is broken, refuses the messages or does what the sandbox forbids.
    """
    if not messages:
        raise DataError("got no messages, expected at least one", code="AX541")
    jinja2 = _jinja2()
    try:
        compiled = _compiled(template)
        with limits():
            return compiled.render(messages=list(messages), **variables)
    except DataError as e:
        raise DataError(e.message, code=e.code, where=e.where or where, hint=e.hint) from e
    except MemoryError as e:
        raise DataError("the chat template takes all memory", code="AX541", where=where) from e
    except RecursionError as e:
        raise DataError("the chat template never ends", code="AX541", where=where) from e
    except (jinja2.TemplateError, Exception) as e:
        raise DataError(
            f"the chat template fails on these messages: {e}",
            code="AX541",
            where=where,
            hint="messages are {'role': 'user', 'content': TEXT}; some templates want user and "
            "assistant in turn",
        ) from e


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise DataError(f"the chat template has {len(template):,} characters", code="AX541")
    jinja2 = _jinja2()
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``: marks the answer for training; here it is only its content."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        # jinja's own escapes <, > and & for web pages.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def extend(environment: Any) -> None:
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    return compiled_with_limits(
        ImmutableSandboxedEnvironment,
        template,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        extend=extend,
    )


def _jinja2() -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
    except ImportError as e:
        raise DataError(
            f"a chat template needs the package 'jinja2': {e}",
            code="AX536",
            hint='pip install "axcore[tokenizers]"',
        ) from e
    return jinja2


def guard(
    messages: Sequence[Mapping[str, Any]], special: Iterable[str]
) -> tuple[list[Any], list[str]]:
    """Replaces names of special tokens inside messages by marks that ``unguarded`` undoes.

    Returns:
        The messages, and the names that were replaced: mark i stands for the i-th.
    """
    names = sorted((name for name in special if name), key=len, reverse=True)
    marks: list[str] = []
    if not names:
        return [dict(m) for m in messages], marks
    pattern = re.compile("|".join(map(re.escape, names)))

    def mark(found: re.Match[str]) -> str:
        marks.append(found.group())
        return f"{_OPEN}{len(marks) - 1}{_CLOSE}"

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(mark, value)
        if isinstance(value, Mapping):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        return value

    return [walk(dict(message)) for message in messages], marks


def unguarded(text: str, marks: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yields (piece, whether it is a user's text) of a text made from guarded messages."""
    if not marks:
        yield text, False
        return
    for i, piece in enumerate(re.split(f"{_OPEN}([0-9]+){_CLOSE}", text)):
        if i % 2 == 0:
            if piece:
                yield piece, False
        elif int(piece) < len(marks):
            yield marks[int(piece)], True
