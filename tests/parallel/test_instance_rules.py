import json
import types
from collections.abc import Mapping

import jax.numpy as jnp
import pytest

from axcore.config import REQUIRED, Config, Configurable, Modifier, Required, author
from axcore.errors import ConfigError, PluginError, PluginLookupError, ShardingError
from axcore.module import Module, ParameterSpec
from axcore.parallel import (
    MeshShape,
    MeshShapeModifier,
    RematModifier,
    SetModifier,
    Traits,
    apply_instance_rules,
    compute_traits,
    resolve_instance,
)
from axcore.plugins import (
    Candidate,
    CompilerOptionSpec,
    Instance,
    InstanceTypeSpec,
    LayerSpec,
    MeshRuleSpec,
    PluginHost,
    hookimpl,
    reset_host,
)
from axcore.remat import Remat

# -- a model, and rules that know nothing of it ---------------------------------------------------


def _zeros(key, spec):
    del key
    return jnp.zeros(spec.shape, spec.dtype)


class Block(Module):
    class Config(Module.Config):
        width: int = 16

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        shape = (cfg.width, cfg.width)
        self._add_parameter("weight", ParameterSpec(shape, "float32", ("embed", "mlp"), _zeros))
        self._add_parameter(
            "mean", ParameterSpec(shape, "float32", ("embed", "mlp"), _zeros, kind="state")
        )


class SparseBlock(Block):
    class Config(Block.Config):
        pass


class Net(Module):
    class Config(Module.Config):
        block: Block.Config = Block.Config()
        remat: Remat = Remat()
        num_layers: int = 3
        scan: bool = False

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._add_parameter("head", ParameterSpec((16, 2), "bfloat16", ("embed", None), _zeros))
        names = [f"0:{cfg.num_layers}:1"] if cfg.scan else map(str, range(cfg.num_layers))
        for name in names:
            self._add_child(name, cfg.block, Block, config_path="block")


class Experiment(Configurable):
    class Config(Configurable.Config):
        model: Module.Config = Net.Config()
        seq_len: int = 128
        batch_size: int = 8
        mesh_shape: MeshShape = MeshShape(data=-1)
        mesh_rules: tuple[tuple[str, tuple[Config, ...]], ...] = ()
        use: tuple[str, ...] = ()
        compiler_options: Mapping[str, bool | int | float | str] = {}


class SetModelModifier(Modifier):
    class Config(Modifier.Config):
        model: Required[Module.Config] = REQUIRED

    def __call__(self, cfg):
        return cfg.set(model=self.cfg.model)


FSDP = MeshShapeModifier.Config(mesh_shape={"fsdp": -1})
TP = (
    MeshShapeModifier.Config(mesh_shape={"data": -1, "model": 4}),
    RematModifier.Config(remat=Remat("full")),
)
SHRINK = SetModelModifier.Config(model=Net.Config(block=SparseBlock.Config(width=4), num_layers=1))
REMOVE = SetModelModifier.Config(model=Block.Config())
SEQ = MeshShapeModifier.Config(mesh_shape={"data": -1, "seq": 2})


def by_size(traits: Traits):
    return SetModifier.Config(values={"batch_size": traits.num_parameters})


def by_machine(traits: Traits, instance: Instance):
    return SetModifier.Config(values={"batch_size": traits.num_layers * instance.num_devices})


def resolve(name):
    return Instance(
        name=name, family="acme", platform="acme", num_hosts=1, devices_per_host=8, hbm_bytes=2**30
    )


def _rule(name, pattern, target, traits=()):
    return MeshRuleSpec(
        name=name, pattern=pattern, target=f"{__name__}:{target}", traits=traits, reason="measured"
    )


def _option(pattern, key, value):
    return CompilerOptionSpec(name=key, pattern=pattern, key=key, value=value, reason="measured")


RULES = (
    _rule("all", "acme-*", "FSDP"),
    _rule("big", "acme-big-*", "TP"),
    _rule("big-moe", "acme-big-*", "SEQ", traits=("moe",)),
    _rule("big-long", "acme-big-*", "SEQ", traits=("seq_len:32K+",)),
    _rule("sized", "acme-sized-*", "by_size"),
    _rule("machine", "acme-machine-*", "by_machine"),
    _rule("broken", "acme-broken", "resolve"),
    _rule("shrinking", "acme-shrink", "SHRINK"),
    _rule("removing", "acme-remove", "REMOVE"),
)


def _plugin(rules=(), options=(), instances=()):
    class Plugin(types.ModuleType):
        pass

    plugin = Plugin("plugin")

    @hookimpl
    def axcore_mesh_rules():
        return rules

    @hookimpl
    def axcore_compiler_options():
        return options

    @hookimpl
    def axcore_instance_types():
        return instances

    @hookimpl
    def axcore_layers():
        if not instances:
            return ()
        return (LayerSpec(name="sparse", target=f"{__name__}:SparseBlock", tags=("moe",)),)

    for hook in (axcore_mesh_rules, axcore_compiler_options, axcore_instance_types, axcore_layers):
        setattr(plugin, hook.__name__, hook)
    return plugin


@pytest.fixture
def acme():
    """A host with the plugin that owns acme machines and a rival that has rules for them."""
    kind = InstanceTypeSpec(
        pattern="acme-*", family="acme", platform="acme", target=f"{__name__}:resolve"
    )
    options = (
        _option("acme-*", "xla_a", 1),
        _option("acme-big-*", "xla_b", True),
    )
    owner = _plugin(RULES, options, (kind,))
    rival = _plugin((_rule("rival", "acme-big-8", "FSDP"),))
    plugins = [
        Candidate("axcore-acme", "1.0", "acme", lambda: owner),
        Candidate("axcore-rival", "1.0", "rival", lambda: rival),
    ]
    former = reset_host(PluginHost(plugins))
    yield
    reset_host(former)


# -- which rule -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("acme")
def test_the_most_specific_rule_of_the_owner_applies():
    cfg, report = apply_instance_rules(Experiment.Config(), "acme-big-8")
    assert cfg.mesh_shape == MeshShape(data=-1, model=4)
    assert cfg.model.remat == Remat("full")
    assert [(r.name, r.plugin, r.reason) for r in report.rules] == [
        ("axcore-acme:big", "axcore-acme", "measured")
    ]
    assert cfg.set_by("mesh_shape").kind == "rule"
    assert cfg.set_by("mesh_shape").name == "axcore-acme:big"


@pytest.mark.usefixtures("acme")
def test_the_experiment_itself_is_left_as_it_was():
    cfg = Experiment.Config()
    apply_instance_rules(cfg, "acme-big-8")
    assert cfg == Experiment.Config()


@pytest.mark.usefixtures("acme")
def test_tags_of_layers_are_traits():
    sparse = Net.Config(block=SparseBlock.Config())
    cfg, report = apply_instance_rules(Experiment.Config(model=sparse), "acme-big-8")
    assert report.traits.tags == {"moe"}
    assert cfg.mesh_shape == MeshShape(data=-1, seq=2)


@pytest.mark.usefixtures("acme")
def test_quantities_are_traits():
    cfg, _ = apply_instance_rules(Experiment.Config(seq_len=32768), "acme-big-8")
    assert cfg.mesh_shape == MeshShape(data=-1, seq=2)


@pytest.mark.usefixtures("acme")
def test_rules_that_fit_equally_well_are_an_error():
    model = Net.Config(block=SparseBlock.Config())
    with pytest.raises(PluginError, match="big-long and axcore-acme:big-moe fit"):
        apply_instance_rules(Experiment.Config(model=model, seq_len=32768), "acme-big-8")


@pytest.mark.usefixtures("acme")
def test_a_rival_is_a_candidate_until_it_is_used():
    _, report = apply_instance_rules(Experiment.Config(), "acme-big-8")
    assert ("mesh_rules", "axcore-rival:rival") in report.candidates
    cfg, report = apply_instance_rules(Experiment.Config(), "acme-big-8", ["axcore-rival"])
    assert report.rules[0].name == "axcore-rival:rival"
    assert cfg.mesh_shape == MeshShape(fsdp=-1)
    same, _ = apply_instance_rules(Experiment.Config(use=("axcore-rival",)), "acme-big-8")
    assert same.mesh_shape == MeshShape(fsdp=-1)


@pytest.mark.usefixtures("acme")
def test_a_rule_may_be_a_function_of_the_traits():
    cfg, report = apply_instance_rules(Experiment.Config(), "acme-sized-8")
    assert cfg.batch_size == report.traits.num_parameters == 3 * 16 * 16 + 16 * 2


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("of", [str, resolve_instance])
def test_a_rule_may_be_a_function_of_the_traits_and_the_machine(of):
    cfg, _ = apply_instance_rules(Experiment.Config(), of("acme-machine-8"))
    assert cfg.batch_size == 3 * 8


@pytest.mark.usefixtures("acme")
def test_a_rule_that_gives_no_modifiers_is_an_error():
    with pytest.raises(PluginError, match="'axcore-acme:broken' gives Instance"):
        apply_instance_rules(Experiment.Config(), "acme-broken")


@pytest.mark.usefixtures("acme")
def test_an_instance_without_a_rule_is_an_error_unless_the_experiment_has_one():
    reset_host(
        PluginHost(
            [
                Candidate(
                    "axcore-bare",
                    "1.0",
                    "bare",
                    lambda: _plugin(
                        instances=(
                            InstanceTypeSpec(
                                pattern="bare-*", family="bare", platform="bare", target="a:b"
                            ),
                        )
                    ),
                )
            ]
        )
    )
    with pytest.raises(PluginLookupError, match="no mesh rule for instance 'bare-8'"):
        apply_instance_rules(Experiment.Config(), "bare-8")
    cfg, _ = apply_instance_rules(Experiment.Config(mesh_rules=(("bare-*", (FSDP,)),)), "bare-8")
    assert cfg.mesh_shape == MeshShape(fsdp=-1)


def test_an_unknown_instance_is_an_error():
    with pytest.raises(PluginLookupError, match="cup"):
        apply_instance_rules(Experiment.Config(), "cup")


@pytest.mark.parametrize(
    ("name", "expected"), [("cpu", MeshShape(data=-1)), ("cpu-8", MeshShape(fsdp=-1))]
)
def test_the_cpu_has_rules_of_its_own(name, expected):
    cfg, report = apply_instance_rules(Experiment.Config(), resolve_instance(name))
    assert cfg.mesh_shape == expected
    assert report.rules[0].plugin == "axcore"


# -- who wins -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("acme")
def test_the_experiments_rules_win_over_plugins_and_the_users_over_both():
    cfg = Experiment.Config(mesh_rules=(("acme-*", (FSDP,)), ("other-*", (SEQ,))))
    got, report = apply_instance_rules(cfg, "acme-big-8")
    assert got.mesh_shape == MeshShape(fsdp=-1)
    assert got.model.remat == Remat("full")
    assert [r.name for r in report.rules] == ["axcore-acme:big", "mesh_rules[acme-*]"]
    got, report = apply_instance_rules(cfg, "acme-big-8", rules=[("acme-*", [SEQ])])
    assert got.mesh_shape == MeshShape(data=-1, seq=2)
    assert [c.rule for c in report.changes if c.path == "mesh_shape"] == [
        "axcore-acme:big",
        "mesh_rules[acme-*]",
        "--rules[acme-*]",
    ]


@pytest.mark.usefixtures("acme")
def test_two_rules_of_the_experiment_that_fit_equally_well_are_an_error():
    cfg = Experiment.Config(mesh_rules=(("acme-*", (FSDP,)), ("*-big-*", (SEQ,))))
    with pytest.raises(ShardingError, match=r"mesh_rules: rules 'acme-\*' and '\*-big-\*' fit"):
        apply_instance_rules(cfg, "acme-big-8")


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    "who", [("flag", "--set"), ("file", "mine.txt"), ("modifier", "--modifier axcore-x:y")]
)
def test_what_a_flag_or_file_set_stays(who):
    cfg = Experiment.Config()
    with author(*who):
        cfg.set(mesh_shape=MeshShape(fsdp=2, data=-1))
    got, report = apply_instance_rules(cfg, "acme-big-8")
    assert got.mesh_shape == MeshShape(fsdp=2, data=-1)
    assert got.set_by("mesh_shape").kind == who[0]
    assert got.model.remat == Remat("full")
    (kept,) = report.kept
    assert (kept.path, kept.rule, kept.set_by.kind) == ("mesh_shape", "axcore-acme:big", who[0])
    assert "model=4" in (kept.wanted or "")
    assert [c.path for c in report.changes] == ["model.remat", "compiler_options"]


@pytest.mark.usefixtures("acme")
def test_a_part_that_a_flag_set_keeps_the_whole():
    cfg = Experiment.Config()
    with author("flag", "--set"):
        cfg.set_path_text("mesh_shape.fsdp", "2")
    got, report = apply_instance_rules(cfg, "acme-big-8")
    assert got.mesh_shape == MeshShape(data=-1, fsdp=2)
    assert [k.path for k in report.kept] == ["mesh_shape"]


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("who", [("experiment", "x"), ("modifier", "x"), ("rule", "x")])
def test_what_the_experiment_set_gives_way(who):
    cfg = Experiment.Config()
    with author(*who):
        cfg.set(mesh_shape=MeshShape(fsdp=2, data=-1))
    got, report = apply_instance_rules(cfg, "acme-big-8")
    assert got.mesh_shape == MeshShape(data=-1, model=4)
    assert not report.kept


@pytest.mark.usefixtures("acme")
def test_a_flag_inside_what_a_rule_replaces_stays_where_it_can():
    cfg = Experiment.Config()
    with author("flag", "--set"):
        cfg.set_path_text("model.block.width", "32")
    got, _ = apply_instance_rules(cfg, "acme-shrink")
    assert (got.model.num_layers, got.model.block.width) == (1, 32)
    assert isinstance(got.model.block, SparseBlock.Config)


@pytest.mark.usefixtures("acme")
def test_a_flag_whose_path_a_rule_removes_is_an_error():
    cfg = Experiment.Config()
    with author("flag", "--set"):
        cfg.set_path_text("model.num_layers", "2")
    with pytest.raises(ConfigError, match=r"model.num_layers was set by flag \(--set\) to 2"):
        apply_instance_rules(cfg, "acme-remove")


# -- compiler options -----------------------------------------------------------------------------


@pytest.mark.usefixtures("acme")
def test_compiler_options_come_with_the_instance():
    cfg, report = apply_instance_rules(Experiment.Config(), "acme-big-8")
    assert (
        dict(cfg.compiler_options) == dict(report.compiler_options) == {"xla_a": 1, "xla_b": True}
    )
    cfg, report = apply_instance_rules(Experiment.Config(), "acme-small-8")
    assert dict(cfg.compiler_options) == {"xla_a": 1}
    (option,) = report.options
    assert (option.name, option.key, option.value, option.reason) == (
        "axcore-acme:xla_a",
        "xla_a",
        1,
        "measured",
    )


@pytest.mark.usefixtures("acme")
def test_ones_own_compiler_option_wins():
    cfg = Experiment.Config(compiler_options={"xla_a": 7})
    cfg, report = apply_instance_rules(cfg, "acme-big-8")
    assert dict(cfg.compiler_options) == {"xla_a": 7, "xla_b": True}
    assert [(k.path, k.value, k.wanted) for k in report.kept] == [
        ("compiler_options.xla_a", "7", "1")
    ]


@pytest.mark.usefixtures("acme")
def test_the_report_is_plain_data():
    _, report = apply_instance_rules(Experiment.Config(), "acme-big-8")
    data = json.loads(json.dumps(report.to_json()))
    assert data["rules"][0]["name"] == "axcore-acme:big"
    assert data["traits"]["seq_len"] == 128


# -- traits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", [False, True])
def test_sizes_are_those_of_the_parameters(scan):
    traits = compute_traits(Experiment.Config(model=Net.Config(scan=scan)))
    assert traits.num_parameters == 3 * 16 * 16 + 16 * 2
    assert traits.parameter_bytes == 3 * 16 * 16 * 4 + 16 * 2 * 2
    assert traits.layer_bytes == 16 * 16 * 4


def test_a_config_without_a_model_has_no_sizes():
    assert compute_traits(Block.Config()) == Traits()


@pytest.mark.parametrize("scan", [False, True])
def test_layers_widths_and_what_divides_tensors_are_those_of_the_parameters(scan):
    traits = compute_traits(Experiment.Config(model=Net.Config(scan=scan)))
    assert (traits.num_layers, traits.embed_dim, traits.tensor_parts) == (3, 16, 16)
    assert (traits.batch_size, traits.seq_len) == (8, 128)


def test_whether_anything_says_what_to_recompute_is_a_trait():
    assert compute_traits(Experiment.Config()).rematerializes
    assert not compute_traits(Experiment.Config(model=Block.Config())).rematerializes
