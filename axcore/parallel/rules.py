"""Sharding rules: tables from logical axes to mesh axes, as values that stand in a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from axcore.config import FrozenMapping
from axcore.errors import ShardingError, did_you_mean
from axcore.parallel.axes import LOGICAL_AXES, MESH_AXES, AxisRule, axis_line

__all__ = [
    "DEFAULT_ACTIVATION_RULES",
    "DEFAULT_CACHE_RULES",
    "DEFAULT_PARAM_RULES",
    "RuleTable",
    "ShardingRules",
    "TableName",
]

TableName = Literal["param", "optimizer", "activation", "cache"]
Rules = Mapping[str, AxisRule]

DEFAULT_PARAM_RULES: Rules = FrozenMapping(
    {
        "embed": ("fsdp",),
        "mlp": ("model",),
        "heads": ("model",),
        # Fewer key-value heads than model parts is common: then every part holds them all.
        "kv_heads": (("model",), ()),
        "vocab": ("model",),
        "experts": ("expert",),
        "layers": ("pipeline",),
        "head_dim": (),
        "lora_rank": (),
        "seq": (),
        "batch": (),
    }
)
DEFAULT_ACTIVATION_RULES: Rules = FrozenMapping(
    {
        "batch": ("data", "expert", "fsdp"),
        "seq": ("seq",),
        "embed": (),
        "mlp": ("model",),
        "heads": ("model",),
        "kv_heads": (("model",), ()),
        "vocab": ("model",),
        "experts": ("expert",),
        "layers": (),
        "head_dim": (),
        "lora_rank": (),
    }
)
# A decoder extends its cache along seq one position at a time, so that dim stays whole.
DEFAULT_CACHE_RULES: Rules = FrozenMapping({"seq": ()})


@dataclass(frozen=True)
class RuleTable:
    """One table, complete: every logical axis that may be met, and where its dims go.

    Attributes:
        name: The table's name, for messages.
        rules: Logical axis -> rule.
    """

    name: str
    rules: Rules

    def alternatives(self, axis: str, where: str = "") -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes to try for a logical axis, in order.

        The axis's own entry wins, then the rule it was declared with, then its parent's.

        Args:
            axis: The logical axis.
            where: The array it belongs to, for the message.

        Raises:
            ShardingError: Nobody declared the axis, or nothing says where it goes.
        """
        line = axis_line(axis)
        if not line:
            raise ShardingError(
                f"unknown logical axis {axis!r}; known: {', '.join(LOGICAL_AXES)}",
                code="AX454",
                where=where or None,
                hint=did_you_mean(axis, LOGICAL_AXES)
                or f'declare it with axcore.parallel.Axis("{axis}", like="...")',
            )
        for link in line:
            rule = self.rules.get(link.name, link.rule)
            if rule is not None:
                return as_alternatives(rule)
        raise ShardingError(
            f"logical axis {axis!r} has no entry in {self.name}_rules and no parent",
            code="AX454",
            where=where or None,
            hint=f'add {axis}=() to the table, or declare it with Axis("{axis}", like="...")',
        )


@dataclass(frozen=True)
class ShardingRules:
    """The four tables. Each states only what differs from what it builds on.

    Attributes:
        param_rules: Parameters; differences from the defaults (fully sharded ``embed``, tensor
            parallel ``mlp``, heads and ``vocab``).
        optimizer_rules: Optimizer state; differences from the parameters' table. ZeRO-1 is
            ``param_rules={"embed": ()}, optimizer_rules={"embed": ("fsdp",)}``.
        activation_rules: Activations and batches; differences from the defaults.
        cache_rules: KV caches; differences from the activations' table.

    Raises:
        ShardingError: A mesh axis is unknown or an entry is no rule. Logical axes are checked by
            :meth:`check`, when the packages that declare them have been imported.
    """

    param_rules: Mapping[str, AxisRule] = dataclasses.field(default_factory=FrozenMapping[AxisRule])
    optimizer_rules: Mapping[str, AxisRule] = dataclasses.field(
        default_factory=FrozenMapping[AxisRule]
    )
    activation_rules: Mapping[str, AxisRule] = dataclasses.field(
        default_factory=FrozenMapping[AxisRule]
    )
    cache_rules: Mapping[str, AxisRule] = dataclasses.field(default_factory=FrozenMapping[AxisRule])

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            rules = FrozenMapping({a: _checked(field.name, a, r) for a, r in given.items()})
            object.__setattr__(self, field.name, rules)

    def table(self, name: TableName) -> RuleTable:
        """Returns a table with what it builds on filled in."""
        params = {**DEFAULT_PARAM_RULES, **self.param_rules}
        activations = {**DEFAULT_ACTIVATION_RULES, **self.activation_rules}
        rules = {
            "param": params,
            "optimizer": {**params, **self.optimizer_rules},
            "activation": activations,
            "cache": {**activations, **DEFAULT_CACHE_RULES, **self.cache_rules},
        }[name]
        return RuleTable(name, FrozenMapping(rules))

    def check(self) -> None:
        """Checks that every logical axis that a table names is declared.

        Raises:
            ShardingError: One is not: its entry would never apply.
        """
        for field in dataclasses.fields(self):
            for axis in getattr(self, field.name):
                if axis not in LOGICAL_AXES:
                    raise ShardingError(
                        f"unknown logical axis {axis!r}; known: {', '.join(LOGICAL_AXES)}",
                        code="AX454",
                        where=field.name,
                        hint=did_you_mean(axis, LOGICAL_AXES) or None,
                    )


def as_alternatives(rule: AxisRule) -> tuple[tuple[str, ...], ...]:
    """Returns a rule as alternatives; a plain tuple of mesh axes is the only one."""
    if rule and not isinstance(rule[0], str):
        return cast("tuple[tuple[str, ...], ...]", rule)
    return (cast("tuple[str, ...]", rule),)


def _checked(table: str, axis: str, rule: Any) -> AxisRule:
    where = f"{table}.{axis}"
    if isinstance(rule, str) or not isinstance(rule, (tuple, list)):
        raise ShardingError(
            f"rule {rule!r} is not a tuple of mesh axes or of alternatives",
            code="AX455",
            where=where,
            hint=f"write ({rule!r},)" if isinstance(rule, str) else "write () for no sharding",
        )
    items = tuple(tuple(r) if isinstance(r, (tuple, list)) else r for r in rule)
    kinds = {type(item) for item in items}
    if not kinds <= {str} and kinds != {tuple}:
        raise ShardingError(
            f"rule {rule!r} mixes mesh axes and alternatives", code="AX455", where=where
        )
    for alternative in as_alternatives(cast("AxisRule", items)):
        for mesh_axis in alternative:
            if mesh_axis not in MESH_AXES:
                raise ShardingError(
                    f"unknown mesh axis {mesh_axis!r}; known: {', '.join(MESH_AXES)}",
                    code="AX453",
                    where=where,
                    hint=did_you_mean(str(mesh_axis), MESH_AXES) or None,
                )
        if len(set(alternative)) != len(alternative):
            raise ShardingError(f"{alternative} names a mesh axis twice", code="AX455", where=where)
    return cast("AxisRule", items)
