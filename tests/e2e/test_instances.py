"""Models of a catalog on machines of hardware plugins, neither of which knows the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from axcore import experiments
from axcore.cli import main
from axcore.parallel import MeshRules, MeshShapeModifier
from axcore.plugins import host
from axcore.train import assemble

ROOT = Path(__file__).parents[2]
HARDWARE = ("tpu", "gpu", "neuron")

# The tests ask for what the plugins give, so those must be there.
needs_plugins = pytest.mark.skipif(
    not {f"axlearn-{name}" for name in (*HARDWARE, "models")}
    <= {record.distribution for record in host(check=False).active_records()},
    reason="needs the plugins axlearn-tpu, axlearn-gpu, axlearn-neuron and axlearn-models",
)


@needs_plugins
@pytest.mark.parametrize(
    ("instance", "rule", "expected"),
    [
        (
            "tpu-v5e-256",
            "axlearn-tpu:v5e",
            {"mesh_shape": "fsdp=-1", "model.decoder.stack.remat": 'policy="offload_dots"'},
        ),
        (
            "gpu-p5.48xlarge-256",
            "axlearn-gpu:p5.48xlarge",
            {
                "mesh_shape": "fsdp=-1, seq=1, model=8",
                "model.decoder.stack.remat": 'save=("qkv_proj", "attn_out")',
                "accumulation_steps": "2",
            },
        ),
        (
            "neuron-trn2.48xlarge-64",
            "axlearn-neuron:trn2.48xlarge",
            {
                "mesh_shape": "fsdp=-1, seq=1, model=4",
                "model.decoder.stack.remat": 'save=("qkv_proj", "attn_out")',
            },
        ),
    ],
)
def test_explain_tells_which_rule_of_which_plugin_set_a_value(instance, rule, expected, capsys):
    assert main(["config", "explain", "fuji-7B-v2", "--instance", instance]) == 0
    text = capsys.readouterr().out
    plugin = rule.partition(":")[0]
    for path, value in expected.items():
        (line,) = re.findall(rf"^  {re.escape(path)}: .*$", text, flags=re.MULTILINE)
        assert value in line
        assert rule in line
        assert f"changed {path}:" in text
    assert f"  {rule} for " in text
    assert f"active for it: axcore, {plugin}\n" in text
    options = re.findall(r"^    option \w+ = .*  by (\S+):\S+  \(.+\)$", text, flags=re.MULTILINE)
    assert set(options) == ({plugin} if plugin != "axlearn-neuron" else set())


@needs_plugins
def test_a_rule_in_a_file_and_a_flag_beat_the_plugins(tmp_path, capsys):
    file = tmp_path / "rules.txt"
    mesh = MeshShapeModifier.Config(mesh_shape={"fsdp": 64, "model": -1})
    file.write_text(MeshRules.Config(rules=(("tpu-v5e-*", (mesh,)),)).to_text())
    argv = ["config", "explain", "fuji-7B-v2", "--instance", "tpu-v5e-256", "--rules", str(file)]
    assert main([*argv, "--set", "accumulation_steps=4"]) == 0
    text = capsys.readouterr().out
    (line,) = re.findall(r"^  mesh_shape: .*$", text, flags=re.MULTILINE)
    assert "fsdp=64" in line and "model=-1" in line and "--rules[tpu-v5e-*]" in line
    (line,) = re.findall(r"^  accumulation_steps: .*$", text, flags=re.MULTILINE)
    assert line.startswith("  accumulation_steps: 4") and "flag" in line


@needs_plugins
@pytest.mark.parametrize("experiment", ["fuji-70B-v2", "tiny-lm", "bert-test", "t5-test"])
@pytest.mark.parametrize("instance", ["tpu-v5p-64", "gpu-h100-16", "neuron-trn1.32xlarge-1"])
def test_every_kind_of_model_is_fitted_to_every_kind_of_machine(experiment, instance):
    names = experiments.names()
    name = next((n for n in names if n.startswith(experiment)), None)
    if name is None:
        pytest.skip(f"no experiment {experiment!r} in this catalog")
    cfg = assemble(experiments.get(name), instance=instance).cfg
    assert cfg.mesh_shape.fsdp == -1
    assert cfg.batch_size % cfg.accumulation_steps == 0


@needs_plugins
def test_hardware_plugins_name_no_model_and_models_name_no_hardware():
    families = {name.partition("-")[0] for name in experiments.names()} - {"tiny"}
    assert "fuji" in families
    model = re.compile(rf"\b({'|'.join(map(re.escape, sorted(families)))})\b", re.IGNORECASE)
    kinds = {spec.family for spec in host().instance_types.specs()} - {"cpu"}
    machine = re.compile(rf"\b({'|'.join(map(re.escape, sorted(kinds)))})\b", re.IGNORECASE)
    sources = [(model, name) for name in HARDWARE] + [(machine, "models")]
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for pattern, name in sources
        for path in (ROOT / "plugins" / f"axlearn_{name}" / "src").rglob("*.py")
        for match in pattern.finditer(path.read_text())
    ]
    assert not found, "\n".join(found)
