"""What one rendering of a chat template may compute and hold.

A sandbox keeps a template from Python; it does not keep it from looping for ever or from making a
text of a terabyte. The tree of the template is rewritten so that every turn of a loop, every call
and every piece of output is counted, and operators and filters that multiply sizes are asked first.
This stops accidents and the simple bombs; it is no substitute for a process of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from axcore.errors import DataError

__all__ = ["MAX_CHARS", "MAX_STEPS", "compiled_with_limits", "limits"]

MAX_STEPS = 1_000_000
"""Turns of loops, and calls."""

MAX_CHARS = 2**26
"""Characters of text and items of lists that are made, intermediate ones included."""

_MAX_WIDTH = 10_000
_COUNT, _SIZE = "axcore_counted", "axcore_sized"
# Numbers in a format that would pad to more than _MAX_WIDTH, or take their width from an argument.
_WIDE = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*")
_left: contextvars.ContextVar[dict[str, int] | None] = contextvars.ContextVar("left", default=None)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Gives what is rendered inside a budget of its own."""
    token = _left.set({"steps": MAX_STEPS, "chars": MAX_CHARS})
    try:
        yield
    finally:
        _left.reset(token)


def compiled_with_limits(environment_class: type, source: str, **options: Any) -> Any:
    """Returns a template of a sandboxed environment whose work counts against ``limits``.

    Args:
        environment_class: A sandboxed environment of jinja.
        source: The template.
        **options: Of the environment; ``extend`` is called with it before it compiles.

    Raises:
        DataError: While it renders: there is too much of it (AX541).
    """
    from jinja2 import nodes, pass_context

    extend: Callable[[Any], None] = options.pop("extend")

    class Limited(environment_class):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            _spend("steps", 1)
            _check_method(obj, args, kwargs)
            return _sized(super().call(context, obj, *args, **kwargs))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operator(operator, left, right)
            return _sized(super().call_binop(context, operator, left, right))

    environment = Limited(**options)
    environment.globals.pop("lipsum", None)
    extend(environment)
    environment.filters = {name: _checked(f) for name, f in environment.filters.items()}
    environment.filters["join"] = _bounded_join(environment.filters["join"])
    # Filters that see the context are never evaluated while the template is compiled.
    environment.filters[_COUNT] = pass_context(lambda _, items: _counted(items))
    environment.filters[_SIZE] = pass_context(lambda _, value: _sized(value))

    def through(name: str, node: Any) -> Any:
        return nodes.Filter(node, name, [], [], None, None)

    tree = environment.parse(source)
    for node in list(tree.find_all(nodes.For)):
        node.iter = through(_COUNT, node.iter)
    for node in list(tree.find_all(nodes.AssignBlock)):
        node.filter = through(_SIZE, node.filter)
    for node in list(tree.find_all(nodes.Output)):
        node.nodes = [through(_SIZE, part) for part in node.nodes]
    for node in list(tree.find_all(nodes.Concat)):
        node.nodes = [through(_SIZE, part) for part in node.nodes]
    tree.set_environment(environment)
    return environment.from_string(tree)


def _spend(what: str, amount: int) -> None:
    left = _left.get()
    if left is None:
        return
    left[what] -= amount
    if left[what] < 0:
        raise _too_much(f"more than {MAX_STEPS if what == 'steps' else MAX_CHARS:,} {what}")


def _too_much(what: str) -> DataError:
    return DataError(
        f"the chat template takes {what}",
        code="AX541",
        hint="it may never end; use a template of the model's publisher, or --prompt",
    )


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend("steps", 1)
        yield item


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _spend("chars", len(value))
    return value


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                _refuse_above(MAX_CHARS, len(sequence) * times)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _refuse_above(_MAX_WIDTH, left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


def _check_method(obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses methods of texts that would make a long one of a short one."""
    obj = getattr(obj, "__wrapped__", obj)  # the sandbox's own str.format
    text = getattr(obj, "__self__", None)
    if not isinstance(text, str):
        return
    name = getattr(obj, "__name__", "")
    if name in ("format", "format_map"):
        _check_format(text)
    elif name == "replace" and len(args) >= 2:
        _check_replace(text, *args[:2])
    elif name == "join" and args:
        _spend_joined(text, args[0])
    else:
        _check_widths((*args, *kwargs.values()))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses wide arguments and counts what it makes."""
    name = getattr(function, "__name__", "")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_widths((*args[1:], *kwargs.values()))
        if name == "do_format":
            _check_format(str(args[0]))
        texts = [a for a in args if isinstance(a, str)]
        if name == "do_replace" and len(texts) >= 3:
            _check_replace(*texts[:3])
        return _sized(function(*args, **kwargs))

    return checked


def _bounded_join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def join(first: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        value = list(value)
        _spend_joined(str(d), value)
        return function(first, value, d, attribute)

    return join


def _spend_joined(between: str, items: Any) -> None:
    if isinstance(items, list | tuple):
        _spend("chars", sum(len(between) + len(i) for i in items if isinstance(i, str)))


def _check_widths(arguments: Iterable[Any]) -> None:
    for value in arguments:
        if isinstance(value, int):
            _refuse_above(_MAX_WIDTH, value)


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise _too_much(f"a format that is wider than {_MAX_WIDTH:,} characters")


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _refuse_above(MAX_CHARS, len(text) + text.count(old) * len(new))


def _refuse_above(most: int, size: int) -> None:
    if size > most:
        raise _too_much(f"a size of {size:,}, more than {most:,}")
