import pytest

from axcore.config import Config, Configurable, apply_modifier
from axcore.errors import ConfigError, ShardingError
from axcore.parallel import MeshShape, MeshShapeModifier, RematModifier, SetModifier, ShardingRules
from axcore.remat import Remat


class Stack(Configurable):
    class Config(Configurable.Config):
        remat: Remat = Remat()
        width: int = 4


class Model(Configurable):
    class Config(Configurable.Config):
        encoder: Stack.Config = Stack.Config()
        decoder: Stack.Config = Stack.Config()


class Run(Configurable):
    class Config(Configurable.Config):
        model: Model.Config = Model.Config()
        mesh_shape: MeshShape = MeshShape(data=-1)
        sharding_rules: ShardingRules = ShardingRules()
        batch_size: int = 8


SITES = Remat("sites", save=("qkv_proj",))


@pytest.mark.parametrize("shape", [{"fsdp": -1, "model": 2}, MeshShape(fsdp=-1, model=2)])
def test_mesh_shape_from_a_shape_or_a_mapping(shape):
    got = apply_modifier(Run.Config(), MeshShapeModifier.Config(mesh_shape=shape))
    assert got.mesh_shape == MeshShape(fsdp=-1, model=2)


def test_an_unknown_mesh_axis_is_refused_when_applied():
    modifier = MeshShapeModifier.Config(mesh_shape={"fdsp": 2})
    with pytest.raises(ShardingError, match=r"unknown mesh axis 'fdsp'(.|\n)*'fsdp'"):
        apply_modifier(Run.Config(), modifier)


def test_a_config_without_a_mesh_shape_is_refused():
    with pytest.raises(ConfigError, match="mesh_shape"):
        apply_modifier(Model.Config(), MeshShapeModifier.Config(mesh_shape={"data": -1}))


def test_remat_everywhere():
    got = apply_modifier(Run.Config(), RematModifier.Config(remat=SITES))
    assert got.model.encoder.remat == got.model.decoder.remat == SITES


def test_remat_by_pattern_a_later_one_wins():
    modifier = RematModifier.Config(remat={"**": Remat("full"), "**.decoder": SITES})
    got = apply_modifier(Run.Config(), modifier)
    assert got.model.encoder.remat == Remat("full")
    assert got.model.decoder.remat == SITES


def test_a_remat_pattern_that_matches_nothing_is_an_error():
    modifier = RematModifier.Config(remat={"model.decodr": SITES})
    with pytest.raises(ConfigError, match=r"matches no config(.|\n)*model.decoder"):
        apply_modifier(Run.Config(), modifier)


def test_values_by_path_and_pattern():
    modifier = SetModifier.Config(
        values={"batch_size": 2, "model.*.width": 8, "mesh_shape.fsdp": 2, "model.encoder.width": 9}
    )
    got = apply_modifier(Run.Config(), modifier)
    assert (got.batch_size, got.mesh_shape.fsdp) == (2, 2)
    assert (got.model.encoder.width, got.model.decoder.width) == (9, 8)


def test_a_pattern_reaches_the_root():
    got = apply_modifier(Run.Config(), SetModifier.Config(values={"**.batch_size": 2}))
    assert got.batch_size == 2


@pytest.mark.parametrize("path", ["batch_sise", "model.*.widht"])
def test_a_path_or_pattern_that_matches_nothing_is_an_error(path):
    with pytest.raises(ConfigError):
        apply_modifier(Run.Config(), SetModifier.Config(values={path: 2}))


def test_values_are_checked():
    with pytest.raises(ConfigError, match="batch_size: got 'two'"):
        apply_modifier(Run.Config(), SetModifier.Config(values={"batch_size": "two"}))


@pytest.mark.parametrize(
    "modifier",
    [
        MeshShapeModifier.Config(mesh_shape=MeshShape(fsdp=-1, across_slices={"data": 2})),
        MeshShapeModifier.Config(mesh_shape={"data": -1}),
        RematModifier.Config(remat={"**": SITES}),
        SetModifier.Config(values={"model.encoder.width": 2}),
    ],
    ids=lambda m: type(m).__qualname__,
)
def test_modifiers_have_a_text_form(modifier):
    assert Config.from_text(modifier.to_text()) == modifier


def test_rules_and_shapes_have_a_text_form():
    rules = ShardingRules(
        param_rules={"embed": (), "mlp": (("fsdp", "model"), ("model",), ())},
        optimizer_rules={"embed": ("fsdp",)},
    )
    modifier = SetModifier.Config(values={"sharding_rules": rules, "mesh_shape": MeshShape(seq=2)})
    again = Config.from_text(modifier.to_text())
    assert again == modifier
    got = apply_modifier(Run.Config(), again)
    assert got.sharding_rules == rules and got.mesh_shape == MeshShape(seq=2)
    assert got.sharding_rules.table("param").rules == rules.table("param").rules
