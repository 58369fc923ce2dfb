import jax
import jax.numpy as jnp
import pytest

from axcore.errors import ModuleError
from axcore.remat import KNOWN_SITES, Remat, declare_site, site, weight_product


def _block(x, w):
    h = site(jnp.sin(x @ w), "ffn_hidden")
    h = site(jnp.cos(h), "ffn_out")
    return jnp.sum(jnp.sin(h) ** 2)


@jax.custom_vjp
def _own_product(x, w):
    return x @ w


_own_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def _two_products(x, w):
    h = jnp.sin(weight_product(_own_product(x, w)))
    return jnp.sum(jnp.sin(weight_product(_own_product(h, w))))


def _saved(remat: Remat) -> set[tuple[int, ...]]:
    """Shapes of the residuals that the backward pass keeps, by JAX's own account."""
    w = jnp.ones((4, 3))
    fn = remat.wrap(lambda x: _block(x, w), platform="cpu")
    _, pullback = jax.vjp(fn, jnp.ones((2, 4)))
    return [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.shape == (2, 3)]


@pytest.mark.parametrize(
    "remat",
    [
        Remat(),
        Remat("full"),
        Remat("dots"),
        Remat("dots", save=("ffn_out",)),
        Remat("dots_no_batch"),
        Remat("offload_dots"),
        Remat("sites", save=("ffn_hidden",)),
        Remat("sites", save=("ffn_hidden",), offload=("ffn_out",)),
    ],
    ids=str,
)
def test_no_policy_changes_the_gradient(remat):
    x, w = jnp.linspace(0, 1, 8).reshape(2, 4), jnp.linspace(-1, 1, 12).reshape(4, 3)
    expected = jax.grad(_block, (0, 1))(x, w)
    got = jax.jit(jax.grad(remat.wrap(_block, platform="cpu"), (0, 1)))(x, w)
    for g, e in zip(got, expected, strict=True):
        assert jnp.allclose(g, e, atol=1e-6)


def test_full_keeps_no_activation_and_none_keeps_several():
    assert len(_saved(Remat("full"))) == 0
    assert len(_saved(Remat())) >= 2


def test_sites_keep_the_named_ones_only():
    assert len(_saved(Remat("sites", save=("ffn_hidden",)))) == 1
    assert len(_saved(Remat("sites", save=("ffn_hidden", "ffn_out")))) == 2
    assert len(_saved(Remat("sites"))) == 0


@pytest.mark.parametrize("policy", ["dots", "dots_no_batch", "offload_dots"])
def test_products_with_derivatives_of_their_own_are_kept(policy):
    def kept(remat: Remat) -> int:
        fn = remat.wrap(lambda x: _two_products(x, jnp.ones((4, 4))), platform="cpu")
        _, pullback = jax.vjp(fn, jnp.ones((2, 4)))
        return sum(leaf.shape == (2, 4) for leaf in jax.tree.leaves(pullback))

    assert kept(Remat(policy)) == kept(Remat("full")) + 2


def test_none_leaves_the_function_alone():
    assert Remat().wrap(_block, platform="cpu") is _block
    assert not Remat().enabled


def test_unknown_policy_names_the_nearest():
    with pytest.raises(ModuleError, match=r"unknown remat policy 'dot'.*\n.*did you mean 'dots'"):
        Remat("dot")  # pyright: ignore[reportArgumentType]


def test_unknown_site_names_the_nearest():
    with pytest.raises(ModuleError, match=r"unknown remat site 'ffn_hiden'(.|\n)*'ffn_hidden'"):
        Remat("sites", save=("ffn_hiden",)).jax_policy("cpu")
    with pytest.raises(ModuleError, match=r"'qkv_prj'(.|\n)*'qkv_proj'"):
        site(jnp.ones(2), "qkv_prj")


def test_sites_that_the_policy_ignores_are_refused():
    with pytest.raises(ModuleError, match="'full' does not use save"):
        Remat("full", save=("ffn_out",))
    with pytest.raises(ModuleError, match="'dots' does not use offload"):
        Remat("dots", offload=("ffn_out",))


def test_a_site_is_saved_or_offloaded_not_both():
    with pytest.raises(ModuleError, match="both saved and offloaded"):
        Remat("sites", save=("ffn_out",), offload=("ffn_out",))


def test_a_string_is_no_tuple_of_sites():
    with pytest.raises(ModuleError, match="expected a tuple of site names"):
        Remat("sites", save="ffn_out")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("remat", [Remat("offload_dots"), Remat("sites", offload=("ffn_out",))])
def test_offload_without_host_memory_is_refused(remat):
    with pytest.raises(ModuleError, match="platform 'abacus' does not have"):
        remat.jax_policy("abacus")


def test_packages_add_sites():
    declare_site("test_router_logits", "logits of a router, (batch, seq, experts)")
    declare_site("test_router_logits", "logits of a router, (batch, seq, experts)")
    assert "test_router_logits" in KNOWN_SITES
    assert Remat("sites", save=("test_router_logits",)).jax_policy("tpu") is not None
    with pytest.raises(ModuleError, match="declared twice"):
        declare_site("test_router_logits", "something else")


def test_the_policy_none_is_text_and_not_pythons_none():
    from axcore import experiments

    cfg = experiments.get("tiny-lm")
    cfg.set_path_text("model.decoder.stack.remat.policy", "none")
    assert cfg.model.decoder.stack.remat == Remat("none")
