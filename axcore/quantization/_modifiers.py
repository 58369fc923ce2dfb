"""Recipes as modifiers: which products of any model are quantized, and how."""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping
from typing import Any, Literal

from axcore.config import REQUIRED, Config, Modifier, Required
from axcore.errors import ConfigError, did_you_mean
from axcore.module import Module
from axcore.ops import DotGeneral
from axcore.plugins import host
from axcore.quantization._delayed import DelayedFp8Dot
from axcore.quantization._dots import (
    Fp8Dot,
    Int4Dot,
    Int8Dot,
    MxFp8Dot,
    QuantizedDot,
)
from axcore.quantization._place import DEFAULT_EXCLUDE, KINDS, Kind, Site, choose, matching, place

_log = logging.getLogger("axcore.config")  # reports edits, which a search over configs turns off

__all__ = [
    "DelayedFp8Recipe",
    "Fp8Recipe",
    "Int4Recipe",
    "Int8Recipe",
    "MxFp8Recipe",
    "QuantizeModifier",
    "Recipe",
    "Unquantized",
    "copied",
]


class Recipe(Modifier):
    """Replaces the products of a model: the base of recipes for training.

    Patterns are globs over the layers' paths in the model (``**/feed_forward/*``,
    ``decoder/layer/[0-3]/**``), the same in both stack forms. Linear layers are meant unless the
    fields say more. The learner is not touched: master weights stay as they are.
    """

    class Config(Modifier.Config):
        """Which products; a recipe's own fields say how."""

        include: str | tuple[str, ...] = "**"
        exclude: str | tuple[str, ...] = DEFAULT_EXCLUDE
        # Also linear layers with a matrix for each group of rows, such as experts.
        grouped: bool = True
        # Also what scores the vocabulary, and linear layers inside embeddings.
        head: bool = False
        # Also attention's own two products; kernels that have theirs built in then cannot serve.
        attention: bool = False
        # Takes the place of an earlier recipe instead of refusing to.
        override: bool = False

    #: Whether it makes sense for a trained model only, so that no flag or rule may choose it.
    for_trained: bool = False

    @abc.abstractmethod
    def product(self, site: Site) -> Config:
        """Returns what replaces the product at a site: the config of a ``DotGeneral``."""

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with quantized products.

        Raises:
            ConfigError: A pattern matches nothing (AX430), a product is quantized already (AX431),
                it cannot run inside a kernel (AX432), or layers of a scan would differ.
        """
        # What is left out on purpose is stated, so that a machine's rule leaves it out too where a
        # flag has chosen the recipe.
        place(cfg, self._chosen, stated=("linear", "grouped"))
        return cfg

    def _takes(self, module: Module) -> bool:
        """Whether a product may give way to this recipe's without being told to."""
        return type(module) is DotGeneral

    def _chosen(self, sites: dict[str, Site]) -> dict[str, Config | None]:
        own = self.cfg
        kinds: list[Kind] = [k for k in KINDS if k == "linear" or getattr(own, k)]
        found = choose(sites, _tuple(own.include), _tuple(own.exclude), kinds)
        for path in found:
            module = sites[path].module
            if not self._takes(module) and not own.override:
                raise ConfigError(
                    f"the product at {path} is {type(module).__name__} already",
                    code="AX431",
                    where=sites[path].config_path,
                    hint="apply one recipe only, or say override=True",
                )
        made = {path: self.product(sites[path]) for path in found}
        for path, product in made.items():
            _check_place(sites[path], product)
        self._tell(sites, made)
        if own.override:
            # A narrower recipe must not leave parts of the earlier one behind.
            for path, site in sites.items():
                if path not in made and isinstance(site.module, QuantizedDot):
                    made[path] = DotGeneral.Config()
        return {path: made.get(path) for path in sites}

    def _tell(self, sites: dict[str, Site], made: Mapping[str, Config]) -> None:
        """Says which products stay as they are because this recipe's do not multiply groups."""
        target: Any = next(iter(made.values())).target
        grouped = [path for path, site in sites.items() if site.kind == "grouped"]
        left = matching(grouped, _tuple(self.cfg.include), _tuple(self.cfg.exclude))
        if left and not _in_groups(target):
            _log.info(
                "%d products of groups of rows, such as %s, stay as they are: %s does not "
                "multiply groups; the recipes int8, fp8 and fp8-delayed do",
                len(left),
                left[0],
                target.__qualname__.removesuffix(".Config"),
            )


def _in_groups(product: Any) -> bool:
    return product is DotGeneral or getattr(product, "in_groups", False)


def _check_place(site: Site, product: Config) -> None:
    """Raises when a product that needs a context would stand inside a kernel."""
    if site.kind == "linear":
        return
    target: Any = product.target
    if site.kind == "grouped" and not _in_groups(target):
        raise ConfigError(
            f"{target.__name__} does not multiply groups of rows, as {site.path} does",
            code="AX432",
            where=site.config_path,
            hint="leave it out with grouped=False, or take the recipe int8, fp8 or fp8-delayed",
        )
    needs = getattr(product, "stochastic_rounding", False)
    if site.kind != "grouped":  # groups of rows are given state, if no random numbers
        needs = needs or getattr(target, "needs_context", False)
    if needs:
        raise ConfigError(
            f"{target.__name__} keeps state or draws random numbers, and the product at "
            f"{site.path} runs inside a kernel, which has neither",
            code="AX432",
            where=site.config_path,
            hint=f"leave it out with {site.kind}=False, or take a recipe that scales by the "
            "values at hand",
        )


class Int8Recipe(Recipe):
    """:class:`Int8Dot`: int8 forward and backward, a scale per channel."""

    class Config(Recipe.Config):
        """See :class:`Int8Dot`."""

        activation_clip: float = 1.0
        stochastic_rounding: bool = False
        quantize_lhs_grad: bool = True
        quantize_rhs_grad: bool = True

    def product(self, site: Site) -> Config:
        """Returns an :class:`Int8Dot`."""
        del site
        return copied(self.cfg, Int8Dot.Config())


class Fp8Recipe(Recipe):
    """:class:`Fp8Dot`: float8 scaled by the values at hand."""

    class Config(Recipe.Config):
        """See :class:`Fp8Dot`."""

        dtype: str = "float8_e4m3fn"
        grad_dtype: str = "float8_e5m2"
        granularity: Literal["tensor", "channel"] = "tensor"
        quantize_lhs_grad: bool = True
        quantize_rhs_grad: bool = True

    def product(self, site: Site) -> Config:
        """Returns an :class:`Fp8Dot`."""
        del site
        return copied(self.cfg, Fp8Dot.Config())


class DelayedFp8Recipe(Recipe):
    """:class:`DelayedFp8Dot`: float8 scaled by earlier steps' magnitudes."""

    class Config(Recipe.Config):
        """See :class:`DelayedFp8Dot`."""

        dtype: str = "float8_e4m3fn"
        grad_dtype: str = "float8_e5m2"
        granularity: Literal["tensor", "channel"] = "tensor"
        history_length: int = 128
        headroom: float = 1.0

    def product(self, site: Site) -> Config:
        """Returns a :class:`DelayedFp8Dot`."""
        del site
        return copied(self.cfg, DelayedFp8Dot.Config())


class MxFp8Recipe(Recipe):
    """:class:`MxFp8Dot`: float8 in blocks with powers of two."""

    class Config(Recipe.Config):
        """See :class:`MxFp8Dot`, which does not multiply groups of rows."""

        grouped: bool = False

        dtype: str = "float8_e4m3fn"
        grad_dtype: str = "float8_e4m3fn"
        block: int = 32

    def product(self, site: Site) -> Config:
        """Returns an :class:`MxFp8Dot`."""
        del site
        return copied(self.cfg, MxFp8Dot.Config())


class Int4Recipe(Recipe):
    """:class:`Int4Dot`: training for weights of four bits."""

    class Config(Recipe.Config):
        """See :class:`Int4Dot`."""

        activations: Literal["int8"] | None = "int8"

    def product(self, site: Site) -> Config:
        """Returns an :class:`Int4Dot`."""
        del site
        return copied(self.cfg, Int4Dot.Config())


class Unquantized(Recipe):
    """The plain product everywhere, stated: what a rule chooses for the machine then stays out."""

    class Config(Recipe.Config):
        """Replaces whatever there is."""

        head: bool = True
        attention: bool = True
        override: bool = True
        exclude: str | tuple[str, ...] = ()

    def product(self, site: Site) -> Config:
        """Returns the plain product."""
        del site
        return DotGeneral.Config()


class QuantizeModifier(Modifier):
    """Applies a recipe by its registered name; what rules and ``--modifier`` flags use.

    Example:
        >>> rule = QuantizeModifier.Config(recipe="int8", override=True)
        >>> cfg = apply_modifier(
        ...     cfg, QuantizeModifier.Config(recipe="fp8", include="**/feed_forward/*"))
    """

    class Config(Modifier.Config):
        """Fields that stay None are the recipe's own."""

        recipe: Required[str] = REQUIRED
        include: str | tuple[str, ...] | None = None
        exclude: str | tuple[str, ...] | None = None
        grouped: bool | None = None
        head: bool | None = None
        attention: bool | None = None
        override: bool | None = None
        # Further fields of the recipe, such as {"history_length": 16}.
        options: Mapping[str, Any] = {}

    def __call__(self, cfg: Any) -> Any:
        """Returns what the recipe makes of ``cfg``.

        Raises:
            PluginLookupError: No plugin registers the recipe.
            ConfigError: The recipe has no such field, is for trained models only, or does not
                apply.
        """
        recipe = self.recipe_config()
        if getattr(recipe.target, "for_trained", False):
            raise ConfigError(
                f"recipe {self.cfg.recipe!r} stores the weights of a trained model",
                code="AX438",
                hint=f"axcore quantize --from DIR --recipe {self.cfg.recipe} --out DIR",
            )
        return recipe.instantiate()(cfg)

    def recipe_config(self) -> Any:
        """Returns the modifier config that the name and the fields stand for."""
        own = self.cfg
        target: Any = host().quantization.load(own.recipe)
        recipe: Any = target() if not isinstance(target, type) else target.Config()
        fields = {
            name: getattr(own, name)
            for name in ("include", "exclude", "grouped", "head", "attention", "override")
            if getattr(own, name) is not None
        }
        for name, value in {**fields, **own.options}.items():
            if name not in recipe.fields():
                raise ConfigError(
                    f"recipe {own.recipe!r} has no field {name!r}",
                    code="AX434",
                    hint=did_you_mean(name, tuple(recipe.fields()))
                    or f"it has: {', '.join(recipe.fields())}",
                )
            setattr(recipe, name, value)
        return recipe


def copied(recipe: Any, product: Any) -> Any:
    """Returns the product's config with the fields of the same name from the recipe's."""
    for name in product.fields():
        if name in recipe.fields():
            setattr(product, name, getattr(recipe, name))
    return product


def _tuple(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns
