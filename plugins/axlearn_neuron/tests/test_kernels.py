"""Kernels of axlearn-neuron without the vendor's packages: what they serve, and what absence does.

Their results, with fakes of these packages: ``test_nki.py``.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments, ops
from axcore.context import functional
from axcore.errors import OpError
from axcore.layers import RMSNorm
from axcore.ops import Causal, Full, SegmentIds, SlidingWindow
from axcore.ops.references import few_logits
from axcore.parallel import resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.parallel.target import ProgramTarget
from axcore.plugins import OpCall, host
from axcore.train import aot, assemble
from axcore.train.kernels import explain_kernels
from axlearn_neuron import supports
from axlearn_neuron.kernels import NKI

INSTANCE = "neuron-trn2.48xlarge-1"
absent = pytest.mark.skipif(
    importlib.util.find_spec("jax_neuronx") is not None, reason="the vendor's packages are here"
)


def call(shapes=None, dtype="bfloat16", **fields):
    shapes = shapes or {n: (1, 4096, 8, 128) for n in "qkv"}
    fields.setdefault("mask", Causal())
    dtypes = dict.fromkeys(shapes, dtype)
    return OpCall(
        op="attention", shapes=shapes, dtypes=dtypes, instance=INSTANCE, platform="neuron", **fields
    )


def sized(t, dim=128, s=None):
    return call({"q": (1, t, 8, dim), "k": (1, s or t, 8, dim), "v": (1, s or t, 8, dim)})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(), None),
        (call(dtype="float32", mask=Full(), purpose="prefill"), None),
        (call(mask=Causal() & SegmentIds()), None),
        (call({n: (1, 16384, 8, 128) for n in "qkv"}, mask=SegmentIds()), "up to 8192 positions"),
        (call(mask=Causal() & SlidingWindow(left=9)), "knows full and causal masks"),
        (call(purpose="decode"), "is for many queries"),
        (call(view="dense"), "reads no key/value cache"),
        (call(dtype="float16"), "bfloat16 or float32, got float16"),
        (call(options={"logit_cap": 30.0}), "no soft cap"),
        (call(options={"dot_general": "replaced"}), "products cannot be replaced"),
        (call({**call().shapes, "sinks": (8,)}), "takes no sinks"),
        (call({**call().shapes, "logit_scale": ()}), "a static logit scale"),
        (call({**call().shapes, "q_positions": (4096,)}), "positions for indices"),
        (sized(1024, 192), "head dims up to 128, got 192"),
        (sized(1000), "tiles of 512 keys, got 1000"),
        (sized(512, s=1024), "as many queries as keys"),
    ],
)
def test_what_the_flash_attention_serves(asked, reason):
    got = supports.nki_flash(asked)
    assert got is reason is None or reason in got


def test_the_reference_serves_what_no_kernel_is_for():
    assert "fewer than 2048 keys" in few_logits(sized(2048))
    assert few_logits(sized(1000)) is None
    assert few_logits(call(purpose="decode")) is None
    norm = {"op": "rms_norm", "platform": "neuron", "dtypes": {"x": "bfloat16"}}
    wide, usual = (OpCall(shapes={"x": (2, 8, dim)}, **norm) for dim in (16384, 8192))
    assert "up to 8192 values" in supports.nki_rms_norm(wide)
    assert supports.xla_norm(wide) is supports.nki_rms_norm(usual) is None
    assert "does not serve" in supports.xla_norm(usual)


# -- absence --------------------------------------------------------------------------------------


def normalize(fallbacks=()):
    """Runs a layer as a program for the machine does; returns its result and its choices."""
    kernels = assemble(experiments.get("tiny-lm"), instance=INSTANCE).cfg.ops["rms_norm"]
    instance = resolve_instance(INSTANCE)
    target = ProgramTarget.for_instance(
        instance, None, kernels={"rms_norm": kernels.implementations}, fallbacks=fallbacks
    )
    layer = RMSNorm.Config(input_dim=8).instantiate(name="norm")
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))
    with ops.record_choices() as choices:
        state = {"scale": jnp.ones(8)}
        out, _ = functional(layer, state=state, inputs=(x,), is_training=True, target=target)
    return x, out, choices


@absent
def test_absence_is_an_error_at_selection_that_names_package_index_and_document():
    with pytest.raises(OpError) as caught:
        normalize()
    text = str(caught.value)
    assert caught.value.code == "AX410"
    for part in ("nki: ", "'jax-neuronx'", "vendor's package index", "README.md", "fallback=allow"):
        assert part in text


@absent
def test_the_reference_runs_in_place_of_what_is_absent_only_if_configured():
    x, out, (choice,) = normalize(fallbacks=("rms_norm",))
    assert (choice.chosen, choice.fallback) == ("xla", True)
    assert choice.refused[0].implementation == "nki"
    assert "jax-neuronx" in choice.refused[0].reason
    np.testing.assert_allclose(out, ops.reference("rms_norm")(x), rtol=1e-6)


@absent
def test_explaining_a_program_tells_that_its_kernels_are_not_installed_here():
    """It says what the machine will run; that this installation cannot is a recorded reason."""
    cfg = experiments.get("tiny-lm").copy().set(seq_len=512)
    choices = explain_kernels(assemble(cfg, instance=INSTANCE))
    told = {c.chosen: c.to_json()["absent"] for c in choices}
    for part in ("'jax-neuronx'", "vendor's package index", "README.md"):
        assert part in told["nki_flash"]
    assert told["xla"] is None  # of the ops that the machine has no kernel for


# -- lists and stand-ins --------------------------------------------------------------------------


def test_lists_begin_with_the_kernels_and_end_with_the_reference():
    rules = assemble(experiments.get("tiny-lm"), instance=INSTANCE).cfg.ops
    assert rules["attention"].implementations == ("nki_flash", "xla_neuron")
    assert rules["rms_norm"].implementations == ("nki", "xla_neuron")


def test_the_memory_model_counts_kernels_that_it_cannot_trace():
    compiler = compiler_for(resolve_instance(INSTANCE))
    assert tuple(compiler.stand_ins) == NKI
    assert {f"{op}.{name}" for op, name in NKI} <= set(host().kernels.names())
    cfg = experiments.get("tiny-lm").copy().set(seq_len=512)
    report = aot(assemble(cfg, instance=INSTANCE)).to_json()
    assert report["with_stand_ins"]
    assert "README.md" in str(report["substituted"])
