"""Rematerialization by site name: which activations the backward pass keeps, moves or recomputes.

Layers mark sites, ``h = site(h, "ffn_hidden")``; a :class:`Remat` value says what becomes of them.
Neither knows the other: a hardware rule writes ``Remat(policy="sites", save=("qkv_proj",))`` once
and it serves every model that marks that site. Packages add sites with :func:`declare_site`.

Example:
    >>> remat = Remat(policy="sites", save=("qkv_proj", "attn_out"))
    >>> block = remat.wrap(lambda x: site(x * 2, "attn_out"), platform="cpu")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

from axcore.errors import ModuleError, did_you_mean

__all__ = [
    "KNOWN_SITES",
    "Policy",
    "Remat",
    "declare_site",
    "has_host_memory",
    "host_memory",
    "site",
    "weight_product",
]

Policy = Literal["none", "full", "dots", "dots_no_batch", "offload_dots", "sites"]
F = TypeVar("F", bound=Callable[..., Any])

_SITES: dict[str, str] = {
    "block_in": "input of a transformer layer, (batch, seq, embed)",
    "qkv_proj": "queries, keys and values after their projections, (batch, seq, heads, head_dim)",
    "attn_context": "attention's weighted values before the output projection",
    "attn_out": "output of attention, (batch, seq, embed)",
    "ffn_gate": "gate projection of a gated feed-forward layer, (batch, seq, mlp)",
    "ffn_hidden": "hidden activation of a feed-forward layer, (batch, seq, mlp)",
    "ffn_out": "output of a feed-forward layer, (batch, seq, embed)",
}
KNOWN_SITES: Mapping[str, str] = MappingProxyType(_SITES)
"""Site name -> what is there; grows as packages declare their own."""

# No site: not an identifier, so that nobody can declare it.
_PRODUCT = "weight product"

# Platforms whose XLA backend has a host memory space that a computation can write to.
_HOST_MEMORY = {"tpu": "pinned_host", "gpu": "pinned_host", "cuda": "pinned_host"}
_HOST_MEMORY["cpu"] = "pinned_host"  # the same memory under another name: for tests


def declare_site(name: str, description: str) -> str:
    """Declares a remat site; a package does it once, beside the layer that marks it.

    Args:
        name: An identifier, such as ``"router_logits"``.
        description: What is there, with its logical axes.

    Returns:
        The name.

    Raises:
        ModuleError: It is no identifier, or is declared with another description.
    """
    if not name.isidentifier():
        raise ModuleError(f"remat site {name!r} is not an identifier", code="AX345")
    if _SITES.setdefault(name, description) != description:
        raise ModuleError(
            f"remat site {name!r} is declared twice: {_SITES[name]!r} and {description!r}",
            code="AX345",
            hint="give the second one another name, or use the first one's",
        )
    return name


def site(x: jax.Array, name: str) -> jax.Array:
    """Marks ``x`` as the site ``name``; the value is unchanged.

    Args:
        x: Any activation.
        name: A known site.

    Raises:
        ModuleError: Nobody declared the site.
    """
    _check_sites((name,), "site")
    return checkpoint_name(x, name)


def weight_product(x: jax.Array) -> jax.Array:
    """Marks ``x`` as the result of a product with a weight, which the ``dots`` policies keep.

    JAX's own policies look for the primitive; a product with derivatives of its own hides it.
    """
    return checkpoint_name(x, _PRODUCT)


def _check_sites(names: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in _SITES:
            raise ModuleError(
                f"unknown remat site {name!r}; known: {', '.join(sorted(_SITES))}",
                code="AX346",
                where=where,
                hint=did_you_mean(name, _SITES)
                or "a package that adds one calls axcore.remat.declare_site",
            )


@dataclass(frozen=True)
class Remat:
    """What the backward pass of a layer finds of the forward pass; a value for configs.

    Attributes:
        policy: ``none`` keeps everything; ``full`` recomputes everything from the layer's input;
            ``dots`` keeps results of matrix multiplications, ``dots_no_batch`` only those of
            activations with weights, ``offload_dots`` moves the latter to host memory; ``sites``
            keeps and moves the sites named here and recomputes the rest.
        save: Sites to keep in device memory; with ``sites``, ``dots`` and ``dots_no_batch``.
        offload: Sites to move to host memory; with ``sites`` only.

    Raises:
        ModuleError: An unknown policy, sites that the policy does not use, or a site in both
            lists. Site names are checked when the policy is used, since packages declare more.
    """

    policy: Policy = "none"
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        policies = get_args(Policy)
        if self.policy not in policies:
            raise ModuleError(
                f"unknown remat policy {self.policy!r}, expected one of {', '.join(policies)}",
                code="AX347",
                hint=did_you_mean(str(self.policy), policies) or None,
            )
        for field in ("save", "offload"):
            names = getattr(self, field)
            if isinstance(names, str):
                raise ModuleError(
                    f"{field} is the string {names!r}, expected a tuple of site names",
                    code="AX347",
                    hint=f"write {field}=({names!r},)",
                )
            object.__setattr__(self, field, tuple(names))
        users = {"save": ("sites", "dots", "dots_no_batch"), "offload": ("sites",)}
        for field, allowed in users.items():
            if getattr(self, field) and self.policy not in allowed:
                raise ModuleError(
                    f"remat policy {self.policy!r} does not use {field}={getattr(self, field)}",
                    code="AX347",
                    hint=f"{field} goes with policy {' or '.join(map(repr, allowed))}",
                )
        if both := sorted(set(self.save) & set(self.offload)):
            raise ModuleError(f"sites {both} are both saved and offloaded", code="AX347")

    @property
    def enabled(self) -> bool:
        """Whether anything is recomputed or moved."""
        return self.policy != "none"

    def jax_policy(self, platform: str) -> Callable[..., Any] | None:
        """Returns the policy for ``jax.checkpoint``; None (JAX's own default) recomputes all.

        Args:
            platform: JAX platform of the target, never of the host that compiles.

        Raises:
            ModuleError: A site is unknown, or the platform has no host memory to offload to.
        """
        policies = jax.checkpoint_policies
        _check_sites(self.save, "Remat.save")
        _check_sites(self.offload, "Remat.offload")
        if self.policy == "full":
            return None
        if self.policy == "none":
            return policies.everything_saveable
        if self.policy == "offload_dots":
            return _offload_products(host_memory(platform))
        if self.policy == "sites":
            if not self.offload:
                return policies.save_only_these_names(*self.save)
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.save),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst=host_memory(platform),
            )
        dots = {
            "dots": policies.dots_saveable,
            "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
        }[self.policy]
        named = policies.save_only_these_names(_PRODUCT, *self.save)
        return policies.save_from_both_policies(dots, named)

    def wrap(self, fn: F, *, platform: str, prevent_cse: bool = True) -> F:
        """Returns ``fn`` under ``jax.checkpoint`` with this policy; ``fn`` itself for ``none``.

        Args:
            fn: A pure function; for one that calls children use ``axcore.transforms.remat``.
            platform: JAX platform of the target.
            prevent_cse: As for ``jax.checkpoint``; False inside a scan, where it costs speed.
        """
        if not self.enabled:
            return fn
        checkpoint: Any = jax.checkpoint
        return checkpoint(fn, policy=self.jax_policy(platform), prevent_cse=prevent_cse)


def _offload_products(host: str) -> Callable[..., Any]:
    """Returns the policy that moves products with weights to host memory, marked ones or plain."""
    policies = jax.checkpoint_policies
    named = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_PRODUCT],
        offload_src="device",
        offload_dst=host,
    )
    plain = policies.offload_dot_with_no_batch_dims(offload_src="device", offload_dst=host)

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        chosen = named if primitive.name == "name" else plain
        return chosen(primitive, *args, **params)

    return policy


def has_host_memory(platform: str) -> bool:
    """Tells whether programs of a JAX platform can offload to host memory."""
    return platform in _HOST_MEMORY


def host_memory(platform: str, what: str = "remat offload", *, where: str | None = None) -> str:
    """Returns the memory kind of host memory, for shardings and policies.

    Args:
        platform: JAX platform of the target, never of the host that compiles.
        what: What needs it, for the error.
        where: Config path of that.

    Raises:
        ModuleError: The platform has none.
    """
    kind = _HOST_MEMORY.get(platform)
    if kind is None:
        raise ModuleError(
            f"{what} needs host memory, which platform {platform!r} does not have; "
            f"platforms that do: {', '.join(sorted(_HOST_MEMORY))}",
            code="AX348",
            where=where,
            hint="keep in device memory what was to be moved, or recompute it",
        )
    return kind
