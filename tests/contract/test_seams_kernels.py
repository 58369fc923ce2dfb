"""Kernels of a plugin outside core: which may serve, which do, and what installing one changes.

The plugin is ``seams/seam_plugin``; it owns the machines ``seam-N`` of platform ``npu``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from axcore import experiments, functional, ops
from axcore.collection import total_loss
from axcore.errors import OpError
from axcore.inference import Generator, load_model
from axcore.layers import LayerNorm, RMSNorm
from axcore.ops import DotGeneral
from axcore.parallel import ProgramTarget, SetModifier, build_mesh, compile_step
from axcore.plugins import PluginHost, find_candidates, reset_host
from axcore.testing import write_distribution
from axcore.train import assemble, read_metrics, train

SEAMS = Path(__file__).parent / "seams"
RIVAL = """
from axcore.plugins import CompilerOptionSpec, KernelSpec, MeshRuleSpec, hookimpl

@hookimpl
def axcore_kernels():
    return [
        KernelSpec(op=op, implementation="rival", platforms=("*",), target="rival:kernel",
                   partitioning={"x": ("batch", "seq")}, priority=1000)
        for op in ("rms_norm", "layer_norm", "attention")
    ]

@hookimpl
def axcore_mesh_rules():
    return [MeshRuleSpec(name="r", pattern="cpu", target="rival:RULE", reason="it is better")]

@hookimpl
def axcore_compiler_options():
    return [CompilerOptionSpec(name="o", pattern="cpu*", key="xla_cpu_rival", value=True,
                               reason="it is faster")]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two distributions on the path: the plugin, and its rival."""
    path = tmp_path_factory.mktemp("site")
    write_distribution(
        path,
        "seam-plugin",
        None,
        entry_points={"seam-plugin": "seam_plugin.plugin"},
        module="seam_plugin/__init__",
    )
    write_distribution(path, "rival", RIVAL)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SEAMS))
        patch.syspath_prepend(str(path))
        yield path
        jax.config.update("jax_disable_most_optimizations", False)
        for name in [n for n in sys.modules if n.startswith(("seam_", "rival"))]:
            del sys.modules[name]


@pytest.fixture
def install(folder):
    """Makes the process see core and the named distributions only."""
    former = reset_host()

    def with_plugins(*names):
        candidates = [c for c in find_candidates([str(folder)]) if c.distribution in names]
        host = PluginHost(candidates)
        assert {r.status for r in host.records} == {"active"}
        reset_host(host)
        return host

    yield with_plugins
    reset_host(former)


def micro(model_dim=16):
    """tiny-lm with RMSNorm, as small as it gets."""
    cfg = experiments.get("tiny-lm")
    cfg.replace(LayerNorm.Config, RMSNorm.Config())
    cfg.model.model_dim = model_dim
    cfg.model.decoder.num_layers = 1
    cfg.set(max_step=3, batch_size=8, seq_len=16, sample_prompt=None)
    cfg.evalers["heldout"].max_documents = 1
    return cfg


def target_of(assembled):
    """What a run of this config compiles for."""
    cfg, instance = assembled.cfg, assembled.instance
    return ProgramTarget.for_instance(
        instance,
        build_mesh(cfg.mesh_shape, jax.devices()[: instance.num_devices]),
        cfg.sharding_rules,
        kernels={op: rule.implementations for op, rule in cfg.ops.items() if rule.implementations},
        fallbacks=[op for op, rule in cfg.ops.items() if rule.fallback == "allow"],
    )


def program(assembled):
    """Text of the training step as lowered for the config's machine."""
    trainer, target = assembled.cfg.instantiate(name="trainer"), target_of(assembled)
    row = (assembled.cfg.batch_size, assembled.cfg.seq_len)
    batch = {n: jax.ShapeDtypeStruct(row, np.int32) for n in ("input_ids", "target_ids")}

    def step(state, batch):
        return trainer.train_step(state, batch, target=target)

    return jax.jit(step).lower(trainer.abstract_state(), batch).as_text()


def loss(assembled):
    """Loss of the first step, sharded or not."""
    trainer, target = assembled.cfg.instantiate(name="trainer"), target_of(assembled)
    params = jax.jit(trainer.model.initialize)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, (8, 17), dtype=np.int32)
    batch = {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}

    def run(params, batch):
        _, collection = functional(
            trainer.model, state=params, inputs=batch, is_training=True, target=target
        )
        return total_loss(collection)

    return float(compile_step(run, params, batch)(params, batch))


def listed(assembled):
    return assembled.cfg.ops["rms_norm"].implementations


# -- who may serve ---------------------------------------------------------------------------


def test_installing_a_plugin_changes_no_config_and_no_program(install):
    install()
    alone = assemble(micro(), instance="cpu")
    text, lowered = alone.cfg.to_text(), program(alone)
    golden = assemble(experiments.get("tiny-lm"), instance="cpu-8").cfg.to_text()
    install("rival", "seam-plugin")
    together = assemble(micro(), instance="cpu")
    assert together.cfg.to_text() == text
    assert together.cfg.fingerprint() == alone.cfg.fingerprint()
    assert program(together) == lowered
    assert assemble(experiments.get("tiny-lm"), instance="cpu-8").cfg.to_text() == golden
    assert {
        ("kernels", "rival:rms_norm.rival"),
        ("kernels", "seam-plugin:rms_norm.seam_cpu"),
        ("mesh_rules", "rival:r"),
        ("compiler_options", "rival:o"),
    } <= set(together.rules.candidates)


def test_use_makes_a_kernel_serve_and_stands_in_the_config(install):
    install("rival", "seam-plugin")
    plain, used = (assemble(micro(), instance="cpu", use=use) for use in ((), ("seam-plugin",)))
    assert listed(used) == ("seam_cpu",)
    assert used.cfg.set_by("ops.rms_norm.implementations").kind == "rule"
    assert "seam_cpu" in used.cfg.to_text()
    assert "_seam_cpu" in program(used) and "_seam_cpu" not in program(plain)
    np.testing.assert_allclose(loss(used), loss(plain), rtol=1e-6)


def test_the_owner_of_a_machine_needs_no_use(install):
    install("rival", "seam-plugin")
    owned = assemble(micro(), instance="seam-1")
    assert owned.rules.distributions == ("axcore", "seam-plugin")
    assert listed(owned) == ("seam_npu",)
    assert "_seam_npu" in program(owned)


def test_a_rule_may_name_a_kernel(install):
    install("seam-plugin")
    cfg = micro()
    names = SetModifier.Config(values={"ops.rms_norm.implementations": ("seam_cpu",)})
    cfg.mesh_rules = [("cpu", [names])]
    assert "_seam_cpu" in program(assemble(cfg, instance="cpu"))


def test_a_list_that_the_user_states_stays(install):
    install("seam-plugin")
    sets = ["ops.rms_norm.implementations=('xla',)"]
    kept = assemble(micro(), instance="seam-1", sets=sets)
    assert listed(kept) == ("xla",)
    assert "_seam_npu" not in program(kept)


def test_a_kernel_runs_on_its_shards(install):
    install("seam-plugin")
    one, eight = (assemble(micro(), instance=i, use=["seam-plugin"]) for i in ("cpu", "cpu-8"))
    assert "manual_computation" in program(eight) or "shard_map" in program(eight)
    np.testing.assert_allclose(loss(eight), loss(one), rtol=1e-6)


# -- who does --------------------------------------------------------------------------------


def test_a_refusal_is_recorded_with_its_reason(install):
    install("seam-plugin")
    refused = assemble(micro(model_dim=24), instance="cpu", use=["seam-plugin"])
    with ops.record_choices() as choices:
        text = program(refused)
    norms = [c for c in choices if c.op == "rms_norm"]
    assert {c.chosen for c in norms} == {"xla"} and all(c.fallback for c in norms)
    (refusal,) = norms[0].refused
    assert refusal.implementation == "seam_cpu"
    assert refusal.reason == "needs a last dim that is a multiple of 16, got 24"
    assert "decoder/final_norm" in {c.site.replace(".", "/") for c in norms}
    assert "_seam_cpu" not in text


def test_on_an_accelerator_a_refusal_is_an_error_unless_the_config_allows_it(install):
    install("seam-plugin")
    with pytest.raises(OpError, match="seam_npu: needs a last dim that is a multiple of 16") as e:
        program(assemble(micro(model_dim=24), instance="seam-1"))
    assert "ops.rms_norm.fallback=allow" in str(e.value.hint)
    sets = ["ops.rms_norm.fallback=allow"]
    allowed = assemble(micro(model_dim=24), instance="seam-1", sets=sets)
    assert listed(allowed) == ("seam_npu",)
    assert "_seam_npu" not in program(allowed)


def test_each_target_of_a_process_gets_its_own_kernel(install):
    install("seam-plugin")
    machines = {m: assemble(micro(), instance=m, use=["seam-plugin"]) for m in ("cpu", "seam-1")}
    model = machines["cpu"].cfg.instantiate(name="trainer").model
    params = jax.eval_shape(model.initialize, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((2, 16), np.int32)
    target = None

    def logits(params, ids):
        return functional(
            model, state=params, inputs=(ids,), is_training=False, method="logits", target=target
        )[0]

    texts = []
    for name in ("cpu", "seam-1", "cpu"):
        target = target_of(machines[name])
        texts.append(compile_step(logits, params, ids).lowered.as_text())
    assert "_seam_cpu" in texts[0] and "_seam_npu" not in texts[0]
    assert "_seam_npu" in texts[1] and "_seam_cpu" not in texts[1]
    assert texts[2] == texts[0]


# -- a whole run -----------------------------------------------------------------------------


def test_a_plugin_s_modifier_and_kernel_train_and_generate(install, tmp_path):
    install("seam-plugin")
    a = assemble(
        micro(), instance="cpu", modifiers=["seam-plugin:int8:bits=6"], use=["seam-plugin"]
    )
    assert not any(type(node) is DotGeneral.Config for _, node in a.cfg.walk())
    report = train(a.cfg, out=tmp_path / "run", instance=a.instance).report
    chosen = {row["op"]: row["chosen"] for row in report["kernels"]}
    assert chosen["rms_norm"] == "seam_cpu"
    assert report["plugins"]["seam-plugin"] == "1.0"
    losses = [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert len(losses) == 3 and losses[-1] < losses[0]

    loaded = load_model(tmp_path / "run")  # config.txt names the plugin's layers
    assert loaded.model.decoder.layer.children["0:1:1"].feed_forward.up.dot.cfg.bits == 6
    generator = Generator(loaded.model, loaded.state, max_seq_len=16)
    assert len(generator.generate([[72, 105]], 4).tokens[0]) == 4
