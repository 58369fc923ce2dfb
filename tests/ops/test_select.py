"""Selection: the target's list, reasons, fallbacks, and kernels on shards."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore.plugins
from axcore import Module, functional, ops
from axcore.context import LocalTarget
from axcore.errors import OpError, PluginError
from axcore.ops import Causal
from axcore.parallel import MeshShape, ProgramTarget, build_mesh
from axcore.plugins import KernelSpec, Registry


class Norm(Module):
    def forward(self, x):
        return ops.rms_norm(x, implementation=None)


class Root(Module):
    class Config(Module.Config):
        norm: Norm.Config = Norm.Config()

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        self.norm = self._add_child("norm", cfg.norm, Norm)

    def forward(self, x):
        return self.norm(x)


class Attend(Module):
    def forward(self, q, k, v):
        return ops.attention(q, k, v)


X = jnp.arange(1.0, 25.0).reshape(2, 3, 4)


def target(platform="tpu", **kwargs):
    return ProgramTarget(f"{platform}-test", platform, **kwargs)


def run(target, *inputs, module=Root, is_training=True):
    """Outputs and choices of a module call under a target."""
    m = module.Config().instantiate(name="m")
    with ops.record_choices() as choices:
        outputs, _ = functional(
            m, state={}, inputs=inputs or (X,), is_training=is_training, target=target
        )
    return outputs, choices


@pytest.fixture
def kernels(monkeypatch):
    """Registers kernels for the test: ``kernels(op, name, function, supports, **spec)``."""
    module = types.ModuleType("fake_kernels")
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    entries = {}
    host = types.SimpleNamespace(kernels=None)
    monkeypatch.setattr(axcore.plugins, "host", lambda: host)

    def register(op, name, function, supports=None, platforms=("tpu",), **spec):
        if function is not None:  # None: what it names is not there
            setattr(module, f"{op}_{name}", function)
        if supports is not None:
            setattr(module, f"{op}_{name}_supports", supports)
        made = KernelSpec(
            op=op,
            implementation=name,
            platforms=platforms,
            target=f"fake_kernels:{op}_{name}",
            supports=None if supports is None else f"fake_kernels:{op}_{name}_supports",
            **spec,
        )
        entries[made.name] = (made, "fake")
        host.kernels = Registry("kernels", entries, lambda: ())

    host.kernels = Registry("kernels", {}, lambda: ())
    return register


def marked(value):
    """A norm that gives a constant, so that one sees which kernel ran."""
    return lambda x, scale=None, *, eps: jnp.full_like(x, value)


def test_without_a_target_the_reference_serves():
    with ops.record_choices() as choices:
        ops.rms_norm(X)
    assert [(c.site, c.op, c.chosen, c.refused) for c in choices] == [("", "rms_norm", "xla", ())]


def test_the_first_kernel_without_objection_is_chosen_and_reasons_are_kept(kernels):
    kernels("rms_norm", "picky", marked(1.0), lambda call: "the last dim is not 128")
    kernels("rms_norm", "gpu_only", marked(2.0), platforms=("gpu",))
    kernels("rms_norm", "good", marked(3.0), lambda call: None)
    kernels("rms_norm", "broken", None)
    names = ("picky", "gpu_only", "broken", "good", "xla")
    outputs, (choice,) = run(target(kernels={"rms_norm": names}))
    np.testing.assert_array_equal(outputs, 3.0)
    assert (choice.site, choice.op, choice.chosen, choice.fallback) == (
        "norm",
        "rms_norm",
        "good",
        False,
    )
    assert {r.implementation: r.reason.partition(" (did")[0] for r in choice.refused} == {
        "picky": "the last dim is not 128",
        "gpu_only": "runs on gpu, the target is tpu",
        "broken": "target 'fake_kernels:rms_norm_broken': 'fake_kernels' has no attribute"
        " 'rms_norm_broken'",
    }
    assert choice.to_json()["refused"][0] == {
        "implementation": "picky",
        "reason": "the last dim is not 128",
    }


def test_below_the_list_is_an_error_on_an_accelerator(kernels):
    kernels("rms_norm", "a", marked(1.0), lambda call: "too small")
    kernels("rms_norm", "b", marked(2.0), lambda call: "too odd")
    with pytest.raises(OpError, match=r"on tpu-test: a: too small; b: too odd") as caught:
        run(target(kernels={"rms_norm": ("a", "b")}))
    assert caught.value.where == "norm"
    assert "ops.rms_norm.fallback=allow" in str(caught.value)


def test_an_allowed_fallback_is_recorded_as_one(kernels):
    kernels("rms_norm", "a", marked(1.0), lambda call: "too small")
    allowed = target(kernels={"rms_norm": ("a",)}, fallbacks=frozenset({"rms_norm"}))
    outputs, (choice,) = run(allowed)
    np.testing.assert_allclose(outputs, ops.rms_norm(X))
    assert (choice.chosen, choice.fallback, choice.refused[0].reason) == ("xla", True, "too small")


def test_on_cpu_the_reference_is_acceptable_by_default(kernels):
    kernels("rms_norm", "a", marked(1.0))
    outputs, (choice,) = run(target("cpu", kernels={"rms_norm": ("a",)}))
    np.testing.assert_allclose(outputs, ops.rms_norm(X))
    assert choice.fallback and choice.refused[0].reason == "runs on tpu, the target is cpu"


def test_the_platform_is_the_targets_and_not_the_hosts(kernels):
    seen = []
    kernels("rms_norm", "a", marked(1.0), lambda call: seen.append(call))
    run(target(kernels={"rms_norm": ("a",)}))
    assert jax.default_backend() == "cpu"
    assert (seen[0].platform, seen[0].instance) == ("tpu", "tpu-test")


def test_a_forced_kernel_that_cannot_serve_is_an_error_even_on_cpu(kernels):
    kernels("rms_norm", "a", marked(1.0), lambda call: "no")
    with pytest.raises(OpError, match=r"no acceptable implementation of rms_norm .*: a: runs on"):
        ops.rms_norm(X, implementation="a")
    with pytest.raises(OpError, match=r"has an implementation 'b' of rms_norm; known: a, xla"):
        ops.rms_norm(X, implementation="b")
    kernels("rms_norm", "broken", None, platforms=("*",))
    with pytest.raises(PluginError, match="has no attribute 'rms_norm_broken'"):
        ops.rms_norm(X, implementation="broken")


def test_a_forced_kernel_runs(kernels):
    kernels("rms_norm", "a", marked(7.0), platforms=("*",))
    np.testing.assert_array_equal(ops.rms_norm(X, implementation="a"), 7.0)


def test_a_name_that_nobody_has_is_an_error_in_a_list_too(kernels):
    kernels("rms_norm", "pallas", marked(1.0))
    for platform in ("cpu", "tpu"):
        with pytest.raises(OpError, match="did you mean 'pallas'") as caught:
            run(target(platform, kernels={"rms_norm": ("palas",)}))
        assert (caught.value.code, caught.value.where) == ("AX415", "ops.rms_norm.implementations")


def test_a_near_miss_is_named(kernels):
    kernels("rms_norm", "pallas", marked(1.0))
    with pytest.raises(OpError, match="did you mean 'pallas'"):
        ops.rms_norm(X, implementation="palas")


def test_a_call_describes_itself(kernels):
    seen = []
    kernels("attention", "a", None, lambda call: seen.append(call) or "only looking")
    mesh = build_mesh(MeshShape(data=2, model=2), jax.devices()[:4])
    looked = target(mesh=mesh, kernels={"attention": ("a", "xla")})
    q = jnp.ones((4, 8, 4, 2), jnp.bfloat16)
    k = jnp.ones((4, 8, 2, 2), jnp.bfloat16)
    run(looked, q, k, k, module=Attend)
    run(looked, q, k, k, module=Attend, is_training=False)
    call = seen[0]
    assert call.shapes["q"] == (4, 8, 4, 2)
    assert call.device_shapes["q"] == (2, 8, 2, 2)
    assert call.device_shapes["k"] == (2, 8, 1, 2)
    assert call.dtypes["k"] == "bfloat16"
    assert call.axes["q"] == ("batch", "seq", "heads", "head_dim")
    assert call.mesh_axes == {"batch": ("data",), "heads": ("model",), "kv_heads": ("model",)}
    assert call.mask == Causal()
    assert [(c.purpose, c.needs_gradient) for c in seen] == [("train", True), ("prefill", False)]


ALL = ("batch", "heads", "kv_heads")
PARTS = {"q": ALL, "k": ALL, "v": ALL}


def local_attention(q, k, v, *, mask, logit_scale, **_):
    """The reference, after checking that it sees one device's share."""
    assert q.shape[:1] + q.shape[2:3] == (2, 2)
    return ops.reference("attention")(q, k, v, mask=mask, logit_scale=logit_scale)


def test_a_kernel_runs_on_each_devices_share(kernels):
    kernels("attention", "local", local_attention, partitioning=PARTS)
    mesh = build_mesh(MeshShape(data=2, model=2), jax.devices()[:4])
    sharded = target(mesh=mesh, kernels={"attention": ("local",)})
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (4, 8, 4, 2))
    k, v = (jax.random.normal(key, (4, 8, 2, 2)) for key in keys[1:])

    def loss(q, k, v):
        return jnp.sum(jnp.sin(run(sharded, q, k, v, module=Attend)[0]))

    got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    expected = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(ops.attention(*x))), (0, 1, 2))(
        q, k, v
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize(
    ("sizes", "partitioning", "q_shape", "kv_heads", "reason"),
    [
        ({"seq": 2}, PARTS, (4, 8, 4, 2), 2, "does not tolerate dim seq of q sharded over seq"),
        ({"data": 2}, {"q": ALL}, (4, 8, 4, 2), 2, "dim batch of k sharded over data"),
        ({"data": 2}, PARTS, (3, 8, 4, 2), 2, r"dim batch of q \(3\) does not divide over 2"),
        ({"model": 4}, PARTS, (4, 8, 6, 2), 2, r"heads of q \(6\) does not divide over 4"),
    ],
)
def test_what_a_kernel_does_not_tolerate_sharded_is_a_refusal(
    kernels, sizes, partitioning, q_shape, kv_heads, reason
):
    kernels("attention", "local", local_attention, partitioning=partitioning)
    num = int(np.prod(list(sizes.values())))
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[:num])
    q = jnp.ones(q_shape)
    k = jnp.ones((q_shape[0], 8, kv_heads, 2))
    with pytest.raises(OpError, match=reason):
        run(target(mesh=mesh, kernels={"attention": ("local",)}), q, k, k, module=Attend)


def test_one_program_per_target_keeps_its_own_kernel(kernels):
    kernels("rms_norm", "a", marked(1.0))
    module = Root.Config().instantiate(name="m")

    def step(x, chosen):
        call = lambda x: functional(  # noqa: E731
            module, state={}, inputs=(x,), is_training=False, target=chosen
        )[0]
        return jax.jit(call)(x)

    tpu = target(kernels={"rms_norm": ("a",)})
    expected = ops.rms_norm(X)
    for chosen, value in ((LocalTarget(), expected), (tpu, 1.0), (LocalTarget(), expected)):
        np.testing.assert_allclose(step(X, chosen), jnp.broadcast_to(value, X.shape))


def test_a_forced_reference_is_allowed_everywhere(kernels):
    with ops.record_choices() as choices:
        ops.rms_norm(X, implementation="xla")
    assert choices[0].chosen == "xla"


def test_recorders_nest():
    with ops.record_choices() as outer:
        ops.rms_norm(X)
        with ops.record_choices() as inner:
            ops.layer_norm(X)
    assert [c.op for c in inner] == ["layer_norm"]
    assert [c.op for c in outer] == ["rms_norm", "layer_norm"]


def test_every_reference_is_registered_as_a_kernel():
    from axcore.ops._select import REFERENCES

    for op, reference in REFERENCES.items():
        spec = axcore.plugins.host().kernels.get(f"{op}.{ops.REFERENCE}")
        assert (spec.target, spec.platforms) == (reference, ("*",))


def test_an_unknown_op_has_no_reference():
    with pytest.raises(OpError, match=r"no op named 'atention'.*\n.*'attention'"):
        ops.reference("atention")


def test_plain_xla_code_of_a_plugin_is_divided_by_the_compiler(kernels):
    mesh = build_mesh(MeshShape(fsdp=2), jax.devices()[:2])
    seen = []

    def norm(x, scale=None, *, eps):
        seen.append(x.shape)
        return x * 2

    kernels("rms_norm", "plain", norm, compiler_partitioned=True)
    split = target(mesh=mesh, kernels={"rms_norm": ("plain",)})
    outputs, (choice,) = run(split, X)
    assert choice.chosen == "plain" and seen == [X.shape]
    np.testing.assert_array_equal(outputs, X * 2)
