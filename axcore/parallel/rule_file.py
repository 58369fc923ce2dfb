"""Mesh rules in a file: what ``--rules FILE`` reads and a planner writes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from axcore.config import Config, Configurable
from axcore.errors import ConfigError, ShardingError

__all__ = ["MeshRules", "read_mesh_rules"]


class MeshRules(Configurable):
    """A list of mesh rules, such as a file of them holds.

    Example:
        The text of ``MeshRules.Config(rules=(("cpu-*", (MeshShapeModifier.Config(
        mesh_shape={"fsdp": -1}),)),))`` is::

            config("axcore.parallel.MeshRules")
            rules: tuple
            rules.0: tuple
            rules.0.0: "cpu-*"
            rules.0.1: tuple
            rules.0.1.0: config("axcore.parallel.MeshShapeModifier")
            rules.0.1.0.mesh_shape: {"fsdp": -1}
    """

    class Config(Configurable.Config):
        """The rules."""

        # (instance pattern, modifiers): as a trainer's mesh_rules.
        rules: tuple[tuple[str, tuple[Config, ...]], ...] = ()


def read_mesh_rules(
    path: str | Path, *, trusted: Iterable[str] = ()
) -> tuple[tuple[str, tuple[Config, ...]], ...]:
    """Returns the rules of a file that holds the text of a ``MeshRules.Config``.

    Args:
        path: The file.
        trusted: Packages that the text may name beside core's own.

    Raises:
        ShardingError: The file cannot be read (AX465).
        ConfigError: It holds something else, with the number of the line.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ShardingError(
            f"the file of rules cannot be read: {reason}",
            code="AX465",
            where=str(path),
            hint="--rules takes the config text of an axcore.parallel.MeshRules; "
            "`axcore train --help` shows one",
        ) from error
    try:
        return MeshRules.Config.from_text(text, trusted=tuple(trusted)).rules
    except ConfigError as error:
        error.where = f"{path}, {error.where}" if error.where else str(path)
        error.hint = error.hint or "`axcore train --help` shows a file of rules"
        raise
