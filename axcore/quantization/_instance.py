"""Whether a machine can run what a recipe multiplies."""

from __future__ import annotations

import functools

from axcore.config import Config
from axcore.errors import ConfigError
from axcore.layers.placement import build_model
from axcore.plugins import Instance, host
from axcore.quantization._place import find_sites

__all__ = ["check_instance", "is_quantized"]


def check_instance(cfg: Config, instance: Instance) -> None:
    """Checks that an instance multiplies the dtypes of a config's quantized products.

    The CPU runs everything, slowly: it is where recipes are tested.

    Args:
        cfg: A trainer's config, or a model's.
        instance: The machine.

    Raises:
        ConfigError: It states no rate for one of the dtypes (AX435).
    """
    if instance.platform == "cpu" or not is_quantized(cfg):
        return
    multiplies = functools.partial(_multiplies, frozenset(instance.peak_flops))
    for path, site in find_sites(build_model(cfg)).items():
        dtypes: tuple[str, ...] = getattr(site.module, "operand_dtypes", ())
        missing = [dtype for dtype in dtypes if not multiplies(dtype)]
        if not missing:
            continue
        runs = sorted(
            name
            for name in host().quantization.names()
            if all(d == "float32" or multiplies(d) for d in host().quantization.get(name).dtypes)
        )
        raise ConfigError(
            f"{instance.name} does not multiply {' or '.join(missing)}, which "
            f"{type(site.module).__name__} at {path} does",
            code="AX435",
            where=site.config_path,
            hint=f"it multiplies {', '.join(sorted(instance.peak_flops)) or 'nothing known'}; "
            f"recipes that it can run: {', '.join(runs)}",
        )


def is_quantized(cfg: Config) -> bool:
    """Whether a config has products that say which dtypes they multiply."""
    return any(hasattr(node.target, "operand_dtypes") for _, node in cfg.walk())


def _multiplies(stated: frozenset[str], dtype: str) -> bool:
    """Whether a rate is stated for a dtype; e4m3fn's counts for e5m2, as hardware has both."""
    pair = ("float8_e4m3fn", "float8_e5m2")
    return dtype in stated or (dtype in pair and pair[0] in stated)
