"""What differs between two configs."""

from __future__ import annotations

from axcore.config import _write
from axcore.config._tree import Node


def diff(a: Node, b: Node) -> dict[str, tuple[str | None, str | None]]:
    """Returns path -> (value in ``a``, value in ``b``), in text form, where they differ.

    None stands for a path that one of them does not have. The root's path is ``""``.

    Example:
        >>> diff(parent, child)
        {'model.dim': ('64', '128')}
    """
    old, new = _write.lines(a), _write.lines(b)
    paths = dict.fromkeys([*new, *old])
    return {p: (old.get(p), new.get(p)) for p in paths if old.get(p) != new.get(p)}
