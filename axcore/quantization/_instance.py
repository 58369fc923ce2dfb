"""Whether a machine can run what a recipe multiplies."""

from __future__ import annotations

import functools
from typing import Any

from axcore.config import Config
from axcore.errors import ConfigError
from axcore.layers.placement import build_model
from axcore.plugins import Instance, host
from axcore.quantization._place import Site, find_sites

__all__ = ["check_instance", "is_quantized"]

#: Attribute of an instance: why its compiler takes no products in blocks, each with a scale.
NO_BLOCKS = "no_block_scales"
#: Attribute of an instance: the compiler option that such products need, ``KEY=VALUE``.
BLOCKS_NEED = "block_scales_need"


def check_instance(cfg: Config, instance: Instance) -> None:
    """Checks that an instance multiplies what a config's quantized products do.

    The CPU runs everything, slowly: it is where recipes are tested. An instance states the dtypes
    by their rates, and with two attributes what its compiler cannot do with scales for each block:
    ``no_block_scales``, the reason, and ``block_scales_need``, an option as ``KEY=VALUE``.

    Args:
        cfg: A trainer's config, or a model's.
        instance: The machine.

    Raises:
        ConfigError: It states no rate for one of the dtypes (AX435), or takes no products in
            blocks (AX990), or not with the compiler options at hand (AX991).
    """
    if instance.platform == "cpu" or not is_quantized(cfg):
        return
    multiplies = functools.partial(_multiplies, frozenset(instance.peak_flops))
    for path, site in find_sites(build_model(cfg)).items():
        dtypes: tuple[str, ...] = getattr(site.module, "operand_dtypes", ())
        missing = [dtype for dtype in dtypes if not multiplies(dtype)]
        if missing:
            raise ConfigError(
                f"{instance.name} does not multiply {' or '.join(missing)}, which "
                f"{type(site.module).__name__} at {path} does",
                code="AX435",
                where=site.config_path,
                hint=f"it multiplies {', '.join(sorted(instance.peak_flops)) or 'nothing known'}; "
                f"{_runs(instance)}",
            )
        if _in_blocks(site):
            _check_blocks(cfg, instance, path, site)


def _check_blocks(cfg: Config, instance: Instance, path: str, site: Site) -> None:
    """Raises ConfigError unless the instance's compiler takes products in blocks."""
    what = f"{type(site.module).__name__} at {path}, whose blocks have scales of their own"
    reason = instance.attributes.get(NO_BLOCKS)
    if reason is not None:
        raise ConfigError(
            f"{instance.name} cannot run {what}: {reason}",
            code="AX990",
            where=site.config_path,
            hint=_runs(instance),
        )
    key, _, value = instance.attributes.get(BLOCKS_NEED, "").partition("=")
    options = getattr(cfg, "compiler_options", None)
    if not key or options is None or str(options.get(key)).lower() == value.lower():
        return
    raise ConfigError(
        f"the compiler of {instance.name} does not know the product of {what}, while {key} is "
        f"{options.get(key)}, expected {value}",
        code="AX991",
        where=f"compiler_options.{key}",
        hint=f"--xla {key}={value}",
    )


def _runs(instance: Instance) -> str:
    """Says which recipes an instance can run."""
    multiplies = functools.partial(_multiplies, frozenset(instance.peak_flops))
    recipes = host().quantization
    names = sorted(
        name
        for name in recipes.names()
        if all(d == "float32" or multiplies(d) for d in recipes.get(name).dtypes)
        and (NO_BLOCKS not in instance.attributes or not _makes_blocks(recipes.load(name)))
    )
    return f"recipes that it can run: {', '.join(names)}"


def _in_blocks(site: Site) -> bool:
    plan = getattr(site.module, "plan", None)
    return plan is not None and any(
        operand is not None and operand.granularity == "block"
        for operand in (plan.lhs, plan.rhs, plan.grad)
    )


def _makes_blocks(recipe: Any) -> bool:
    """Whether a registered recipe is of blocks: it has their size among its fields."""
    return "block" in (recipe.Config() if isinstance(recipe, type) else recipe()).fields()


def is_quantized(cfg: Config) -> bool:
    """Whether a config has products that say which dtypes they multiply."""
    return any(hasattr(node.target, "operand_dtypes") for _, node in cfg.walk())


def _multiplies(stated: frozenset[str], dtype: str) -> bool:
    """Whether a rate is stated for a dtype; e4m3fn's counts for e5m2, as hardware has both."""
    pair = ("float8_e4m3fn", "float8_e5m2")
    return dtype in stated or (dtype in pair and pair[0] in stated)
