"""Collections, keys, and the guards around JAX transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import Module, current_context, functional, transforms
from axcore.collection import apply_state_updates, expand_path, merge, total_loss
from axcore.errors import ModuleError


def module_of(fn, **methods):
    """Returns a module whose forward is ``fn(ctx, *args)``."""

    class Probe(Module):
        def forward(self, *args):
            return fn(current_context(), *args)

    return Probe.Config().instantiate(name="m")


def run(fn, *args, state=None, key=None, is_training=True):
    module = module_of(fn)
    return functional(module, state=state or {}, inputs=args, is_training=is_training, key=key)


def test_a_duplicate_name_raises_instead_of_overwriting():
    def forward(ctx):
        ctx.add_summary("loss", 1.0)
        ctx.add_summary("loss", 2.0)

    with pytest.raises(ModuleError, match=r"'loss' was added twice"):
        run(forward)


@pytest.mark.parametrize(
    ("reduction", "values", "weights", "expected"),
    [
        ("sum", [1.0, 2.0, 4.0], None, 7.0),
        ("mean", [1.0, 2.0, 6.0], None, 3.0),
        ("weighted_mean", [1.0, 5.0, 9.0], [1.0, 3.0, 0.0], 4.0),
        ("max", [1.0, 5.0, 2.0], None, 5.0),
        ("last", [1.0, 5.0, 2.0], None, 2.0),
    ],
)
def test_one_merge_serves_calls_scans_and_loops(reduction, values, weights, expected):
    weights = weights or [1.0] * len(values)
    xs = (jnp.asarray(values), jnp.asarray(weights))

    def observe(x):
        current_context().add_summary("v", x[0], reduction=reduction, weight=x[1])

    def scanned(ctx):
        transforms.scan(lambda c, x: (c, observe(x)), None, xs)

    def mapped(ctx):
        transforms.vmap(observe)(xs)

    def looped(ctx):
        def body(i):
            observe((xs[0][i], xs[1][i]))
            return i + 1

        transforms.while_loop(lambda i: i < len(values), body, 0)

    for forward in (scanned, mapped, looped):
        _, col = run(forward)
        np.testing.assert_allclose(col.summaries["v"].result(), expected, err_msg=str(forward))
    parts = [
        run(lambda ctx, v, w: ctx.add_summary("v", v, reduction=reduction, weight=w), v, w)[1]
        for v, w in zip(values, weights, strict=True)
    ]
    merged = merge(merge(parts[0], parts[1]), parts[2])
    np.testing.assert_allclose(merged.summaries["v"].result(), expected)


def test_what_weighs_zero_never_poisons_a_mean():
    _, col = run(lambda ctx: ctx.add_loss("a", jnp.nan, num_items=0.0))
    assert total_loss(col) == 0.0


def test_total_loss_is_the_weighted_sum_of_means():
    def forward(ctx):
        ctx.add_loss("a", 2.0, num_items=10)
        ctx.add_loss("b", 3.0, weight=0.5)

    _, col = run(forward)
    np.testing.assert_allclose(total_loss(col), 3.5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.lax.scan(lambda c, x: (c, f(x)), None, jnp.arange(2.0)),
        lambda f: jax.vmap(f)(jnp.arange(2.0)),
        lambda f: jax.checkpoint(f)(1.0),
        lambda f: jax.grad(lambda x: f(x) * x)(1.0),
        lambda f: jax.jit(f)(1.0),
        lambda f: jax.lax.cond(True, f, lambda x: x, 1.0),
    ],
    ids=["scan", "vmap", "checkpoint", "grad", "jit", "cond"],
)
@pytest.mark.parametrize("what", ["key", "summary", "state", "output"])
def test_a_raw_jax_transform_raises_and_names_the_helper(transform, what):
    def body(x):
        ctx = current_context()
        if what == "key":
            return x + jax.random.uniform(ctx.key())
        if what == "summary":
            ctx.add_summary("s", x)
        if what == "state":
            ctx.set_state("s", x)
        if what == "output":
            ctx.add_output("s", x)
        return x

    with pytest.raises(ModuleError, match=r"axcore\.transforms"):
        run(lambda ctx: transform(body), key=jax.random.key(0))


def test_a_scan_draws_a_fresh_key_each_iteration():
    def forward(ctx):
        _, ys = transforms.scan(
            lambda c, x: (c, jax.random.uniform(current_context().key())), None, jnp.arange(8)
        )
        return ys

    ys, _ = run(forward, key=jax.random.key(0))
    assert len(np.unique(ys)) == 8


def test_a_second_call_of_the_same_function_keeps_its_summaries():
    """JAX traces one function object once; a fresh closure per call keeps side outputs."""

    class Child(Module):
        def forward(self, x):
            current_context().add_summary("x", x)
            return x

    class Parent(Module):
        class Config(Module.Config):
            child: Child.Config = Child.Config()

        def __init__(self, cfg, *, parent=None):
            super().__init__(cfg, parent=parent)
            self.child = self._add_child("child", cfg.child, Child)

        def forward(self, x):
            for helper in (transforms.remat, transforms.jit):
                call = helper(self.child)
                x = call(call(x))
            return x

    module = Parent.Config().instantiate(name="m")
    _, col = functional(module, state={}, inputs=(1.0,), is_training=False)
    names = {"child/x", "child#1/x", "child#2/x", "child#3/x"}
    assert set(col.summaries) == names


def test_training_and_evaluation_never_share_a_trace():
    """Inner functions that JAX caches by function object see which program they belong to."""

    @jax.jit
    def inner(x):
        return x * (2.0 if current_context().is_training else 3.0)

    module = module_of(lambda ctx, x: inner(x))
    results = [
        float(functional(module, state={}, inputs=(1.0,), is_training=t)[0])
        for t in (True, False, True)
    ]
    assert results == [2.0, 3.0, 2.0]


def test_grad_through_the_helper_matches_jax_and_keeps_the_collection():
    def forward(ctx, x):
        def f(x):
            current_context().add_summary("x", x)
            return x**3

        return transforms.value_and_grad(f)(x)

    (value, grad), col = run(forward, 2.0)
    assert (float(value), float(grad)) == (8.0, 12.0)
    assert float(col.summaries["x"].result()) == 2.0


def test_branches_that_collect_different_names_are_refused():
    def forward(ctx):
        return transforms.cond(
            jnp.array(True), lambda: current_context().add_summary("a", 1.0), lambda: None
        )

    with pytest.raises(ModuleError, match="different names"):
        run(forward)


def test_cond_keeps_what_the_taken_branch_collects():
    def branch(value):
        return lambda x: (current_context().add_summary("a", value), x * value)[1]

    def forward(ctx, p):
        return transforms.cond(p, branch(2.0), branch(3.0), 10.0)

    for p, expected in ((True, 2.0), (False, 3.0)):
        out, col = run(forward, jnp.array(p))
        assert float(out) == 10 * expected and float(col.summaries["a"].result()) == expected


def test_shard_map_combines_over_replicas():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def forward(ctx, x):
        def body(x):
            current_context().add_summary("mean", jnp.mean(x), weight=x.size)
            current_context().add_summary("max", jnp.max(x), reduction="max")
            noise = jax.random.uniform(current_context().key(), (1,))
            return noise

        return transforms.shard_map(body, in_specs=spec, out_specs=spec, mesh=mesh)(x)

    noise, col = run(forward, jnp.arange(8.0), key=jax.random.key(0))
    assert float(col.summaries["mean"].result()) == 3.5
    assert float(col.summaries["max"].result()) == 7.0
    assert noise[0] != noise[1]


def test_a_key_is_needed_only_where_one_is_drawn():
    run(lambda ctx: None)
    with pytest.raises(ModuleError, match="none was given"):
        run(lambda ctx: ctx.key())


def test_state_updates_are_checked_and_applied():
    def forward(ctx, value):
        ctx.set_state("count", value)

    state = {"count": jnp.zeros((), jnp.int32), "other": jnp.ones(2)}
    _, col = run(forward, jnp.int32(4), state=state)
    new = apply_state_updates(state, col)
    assert int(new["count"]) == 4 and int(state["count"]) == 0
    with pytest.raises(ModuleError, match=r"int32\[\] and was set to float32"):
        run(forward, jnp.float32(1.0), state=state)


def test_inputs_must_be_a_tuple_or_a_mapping():
    module = module_of(lambda ctx, x: x)
    with pytest.raises(ModuleError, match=r"inputs=\(x,\)"):
        functional(module, state={}, inputs=jnp.ones(3), is_training=False)
    with pytest.raises(ModuleError, match="no public method 'backward'"):
        functional(module, state={}, inputs=(), is_training=False, method="backward")


def test_stacked_paths_expand_layer_by_layer():
    assert dict(expand_path("a/1:5:2/b")) == {"a/1/b": (0,), "a/3/b": (1,)}
    assert dict(expand_path("a/b")) == {"a/b": ()}


def test_copy_context_carries_the_call_into_a_callback():
    import contextvars

    def forward(ctx):
        inside = contextvars.copy_context()
        return inside.run(lambda: current_context().module)

    out, _ = run(forward)
    assert isinstance(out, Module)
