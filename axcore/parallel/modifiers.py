"""Modifiers that rules are made of: mesh shape, remat by path pattern, any value by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from axcore.config import REQUIRED, Config, Modifier, Required, matches
from axcore.errors import ConfigError
from axcore.parallel.mesh import MeshShape
from axcore.remat import Remat

__all__ = [
    "CollectiveMatmulModifier",
    "MeshShapeModifier",
    "PipelineModifier",
    "RematModifier",
    "SequenceParallelModifier",
    "SetModifier",
]


class MeshShapeModifier(Modifier):
    """Sets the mesh shape of a trainer's config.

    Example:
        >>> rule = ("tpu-v5e-*", (MeshShapeModifier.Config(mesh_shape={"data": -1, "fsdp": 256}),))
    """

    class Config(Modifier.Config):
        """What it sets."""

        # A shape, or axis name -> size.
        mesh_shape: Required[MeshShape | Mapping[str, int]] = REQUIRED

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with the mesh shape.

        Raises:
            ConfigError: It has no field ``mesh_shape``.
            ShardingError: The mapping is no mesh shape.
        """
        return cfg.set(mesh_shape=MeshShape.of(self.cfg.mesh_shape))


class RematModifier(Modifier):
    """Sets what configs with a ``remat`` field (layer stacks) recompute.

    Example:
        >>> modifier = RematModifier.Config(remat=Remat("sites", save=("qkv_proj", "attn_out")))
    """

    class Config(Modifier.Config):
        """What it sets."""

        # One for all, or path pattern -> one, in order: a later pattern wins.
        remat: Required[Remat | Mapping[str, Remat]] = REQUIRED

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with the remat values.

        Raises:
            ConfigError: A pattern matches no config with a ``remat`` field.
        """
        remat = self.cfg.remat
        for pattern, value in ({"**": remat} if isinstance(remat, Remat) else remat).items():
            _set_where(cfg, pattern, "remat", value)
        return cfg


class PipelineModifier(Modifier):
    """Runs scanned layer stacks as pipelines over the mesh axis that their layers lie on.

    The stages are those of ``mesh_shape`` (axis ``pipeline``). Embedding and head are no stage:
    with ``split_batch`` their rows are divided over the stages' devices too, outermost, so that
    nothing is computed twice and each stage's microbatches wait on the devices that they come from.

    Example:
        >>> rule = ("gpu-h100-*", (PipelineModifier.Config(num_microbatches=16, num_repeats=2),))
    """

    class Config(Modifier.Config):
        """``num_microbatches`` and ``num_repeats`` as ``PipelinedTransformer`` has them."""

        num_microbatches: Required[int] = REQUIRED
        num_repeats: int = 1
        # Whether the stages divide the batch outside of the layers.
        split_batch: bool = True

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with its scanned stacks replaced.

        Raises:
            ConfigError: It has no scanned stack.
        """
        from axcore.layers import PipelinedTransformer, RepeatedTransformer

        new = PipelinedTransformer.Config(
            num_microbatches=self.cfg.num_microbatches, num_repeats=self.cfg.num_repeats
        )
        cfg.replace(RepeatedTransformer.Config, new)
        if not self.cfg.split_batch or "sharding_rules" not in cfg.fields():
            return cfg
        rules = cfg.sharding_rules
        stages = rules.table("param").alternatives("layers")[0]
        batch = tuple(
            (*stages, *(axis for axis in over if axis not in stages))
            for over in rules.table("activation").alternatives("batch")
        )
        table = {**rules.activation_rules, "batch": batch[0] if len(batch) == 1 else batch}
        return cfg.set(sharding_rules=dataclasses.replace(rules, activation_rules=table))


class SequenceParallelModifier(Modifier):
    """Splits what lies between the branches of layers over the mesh axis ``model`` too.

    Norms, residuals and what is kept of them for the backward pass then take ``1 / model`` of the
    memory; the sum after each branch becomes a reduce-scatter, and a gather goes before the next
    (Korthikanti et al., arXiv:2205.05198). The sequence length must divide into seq x model parts.

    Example:
        >>> rule = ("gpu-h100-*", (SequenceParallelModifier.Config(),))
    """

    class Config(Modifier.Config):
        """The mesh axes that split the positions between branches."""

        mesh_axes: tuple[str, ...] = ("seq", "model")

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with the rule for ``residual_seq`` in its activations' table.

        Raises:
            ConfigError: It has no field ``sharding_rules``.
            ShardingError: There is no such mesh axis.
        """
        rules = cfg.sharding_rules
        table = {**rules.activation_rules, "residual_seq": self.cfg.mesh_axes}
        return cfg.set(sharding_rules=dataclasses.replace(rules, activation_rules=table))


class CollectiveMatmulModifier(Modifier):
    """Hides the transfers of sequence parallelism behind the products beside them.

    Plain products of linear layers at the borders of branches become
    :class:`axcore.layers.CollectiveDot`, and a ring is what serves them. Where positions between
    branches are not split further, or a dim does not divide, they stay plain products.

    Example:
        >>> rule = (
        ...     "gpu-h100-*",
        ...     (SequenceParallelModifier.Config(), CollectiveMatmulModifier.Config()),
        ... )
    """

    class Config(Modifier.Config):
        """What serves, best first, and where."""

        implementations: tuple[str, ...] = ("ring", "xla")
        # Path pattern of the linear layers.
        include: str = "**"

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with such products.

        Raises:
            ConfigError: The pattern matches no linear layer with a plain product.
        """
        from axcore.layers import CollectiveDot, Linear
        from axcore.ops import DotGeneral, OpRule

        plain: dict[str, tuple[Linear.Config, DotGeneral.Config]] = {}
        for path, node in cfg.walk():
            if isinstance(node, Linear.Config) and isinstance(node.dot, DotGeneral.Config):
                if type(node.dot) is DotGeneral.Config:  # and no replacement of it
                    plain[path] = (node, node.dot)
        found = [both for path, both in plain.items() if matches(self.cfg.include, path)]
        if not found:
            raise ConfigError(
                f"pattern {self.cfg.include!r} matches no linear layer with a plain product",
                code="AX108",
                hint=f"those that have one: {', '.join(plain) or 'none'}",
            )
        for node, dot in found:
            node.set(dot=CollectiveDot.Config(precision=dot.precision))
        if "ops" not in cfg.fields():
            return cfg
        rule = OpRule(self.cfg.implementations)
        return cfg.set(ops={**cfg.ops, "all_gather_matmul": rule, "matmul_reduce_scatter": rule})


class SetModifier(Modifier):
    """Sets values by path; ``*`` stands for one segment of a path and ``**`` for any number.

    Example:
        >>> modifier = SetModifier.Config(values={"**.param_dtype": "bfloat16"})
    """

    class Config(Modifier.Config):
        """What it sets."""

        # Path or pattern of fields -> value.
        values: Required[Mapping[str, Any]] = REQUIRED

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with the values.

        Raises:
            ConfigError: There is no such path, a pattern matches none, or a value has the wrong
                type.
        """
        for path, value in self.cfg.values.items():
            if "*" in path:
                pattern, _, field = path.rpartition(".")
                _set_where(cfg, pattern, field, value)
            else:
                cfg.set_path(path, value)
        return cfg


def _set_where(cfg: Config, pattern: str, field: str, value: Any) -> None:
    """Sets a field of every config that has it and whose path matches; the root's path is ''."""
    having = {path: node for path, node in cfg.walk() if field in node.fields()}
    found = [node for path, node in having.items() if matches(pattern, path)]
    if not found:
        raise ConfigError(
            f"pattern {pattern!r} matches no config with a field {field!r}",
            code="AX108",
            hint=f"those that have it: {', '.join(p or '(root)' for p in having) or 'none'}",
        )
    for node in found:
        node.set(**{field: value})
