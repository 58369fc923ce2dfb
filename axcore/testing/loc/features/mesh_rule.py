"""A new mesh axis rule: hidden units are split over two mesh axes."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402

# %% integration
from axcore.parallel import ShardingRules


def integrate(cfg):
    """Splits hidden units over ``seq`` and ``model``."""
    cfg.set(sharding_rules=ShardingRules(param_rules={"mlp": ("seq", "model")}))


# %% check
import math
from typing import Any

import jax

from axcore.parallel import partition_spec

MESH: Any = jax.sharding.AbstractMesh((2, 2, 2), ("fsdp", "seq", "model"))


def is_present(cfg, model):
    """Whether the rule stands in the config."""
    return cfg.sharding_rules.param_rules["mlp"] == ("seq", "model")


def check(probe):
    """Parameters with hidden units are split in four there, and nothing else changes."""

    def parts(cfg):
        table = cfg.sharding_rules.table("param")
        specs = jax.tree_util.tree_leaves_with_path(
            probe.before_model.parameter_specs(), is_leaf=lambda x: hasattr(x, "axes")
        )
        found = {}
        for path, spec in specs:
            split = partition_spec(spec.shape, spec.axes, MESH, table, name=str(path))
            for axis, entry in zip(spec.axes, split, strict=True):
                names = (entry,) if isinstance(entry, str) else entry or ()
                found[str(path), axis] = math.prod(MESH.shape[name] for name in names)
        return found

    before, after = parts(probe.before), parts(probe.after)
    hidden = [key for key in before if key[1] == "mlp"]
    probe.require(hidden and all(before[key] == 2 for key in hidden), "2 parts before")
    probe.require(all(after[key] == 4 for key in hidden), "4 parts of hidden units after")
    rest = [key for key in before if key[1] != "mlp"]
    probe.require(all(before[key] == after[key] for key in rest), "other dims stay as they are")
