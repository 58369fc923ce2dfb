"""OrbaxCheckpointer: what is saved comes back, what is damaged does not, what is due is kept."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axcore.checkpoint import OrbaxCheckpointer
from axcore.errors import CheckpointError


def make(directory: Path, **kw) -> OrbaxCheckpointer:
    ckpt = OrbaxCheckpointer.Config(
        **{"save_every_n_steps": 1, "keep_last_n": 9, **kw}
    ).instantiate()
    ckpt.open(directory)
    return ckpt


@pytest.fixture
def ckpt(tmp_path):
    ckpt = make(tmp_path / "checkpoints")
    yield ckpt
    ckpt.close()


def state(seed: int = 0) -> dict:
    return {
        "w": jax.random.normal(jax.random.key(seed), (8, 16)),
        "layer": {"0": {"b": jnp.arange(4) + seed}, "1": {"b": jnp.arange(4) * 2}},
    }


def abstract(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        tree,
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_steps(ckpt, steps) -> None:
    for step in steps:
        ckpt.save(step, state(step), {"position": step})
    ckpt.wait()


def data_file(directory: Path, step: int) -> Path:
    """The file with the chunk of array ``w``."""
    return next(
        p for p in (directory / str(step) / "arrays" / "w").iterdir() if p.name != ".zarray"
    )


# -- round trip -------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_arrays_and_extra_come_back(tmp_path, background):
    ckpt = make(tmp_path, async_=background)
    extra = {"position": {"row": [1, 2]}, "best": 0.5, "config": "a: 1\n"}
    ckpt.save(3, state(), extra)
    ckpt.wait()
    arrays, got = ckpt.restore(3, abstract(state()))
    assert_same(arrays, state())
    assert got == extra
    assert ckpt.latest_good() == 3
    ckpt.close()


def test_a_new_object_reads_what_another_wrote(tmp_path):
    with_first = make(tmp_path)
    save_steps(with_first, [1, 2])
    with_first.close()
    second = make(tmp_path)
    assert second.steps() == [1, 2]
    assert second.latest_good() == 2
    assert_same(second.restore(2, abstract(state()))[0], state(2))
    second.close()


class Optimizer(NamedTuple):
    count: jax.Array
    inner: tuple


def test_every_dtype_and_structure_comes_back(ckpt):
    dtypes = ["bool", "int8", "uint32", "int32", "float16", "float32", "bfloat16", "float8_e4m3fn"]
    tree = {
        "dtypes": {d: jnp.asarray(np.arange(6).reshape(2, 3) % 2, d) for d in dtypes},
        "int4": jnp.arange(4, dtype=jnp.int4),
        "scalar": jnp.float32(2.5),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "raw_key": jax.random.PRNGKey(3),
        "host": np.arange(3, dtype=np.int64),
        "opt": Optimizer(jnp.int32(4), (None, optax.EmptyState(), [jnp.ones(2)])),
        "a.b": {"c/d": jnp.ones(1)},
        "a": {"b.c": jnp.zeros(1)},
        "x" * 250: {"y": jnp.ones(2)},
    }
    ckpt.save(1, tree)
    target = jax.tree.map(lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else x, tree)
    got, _ = ckpt.restore(1, target)
    assert_same(got, tree)
    assert isinstance(got["host"], np.ndarray)


def test_donated_arrays_are_saved_as_they_were(ckpt):
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    tree = {str(i): jax.random.normal(jax.random.key(i), (256, 1024)) for i in range(4)}
    expected = jax.tree.map(lambda x: np.array(x, copy=True), tree)
    ckpt.save(1, tree)
    tree = jax.block_until_ready(step(tree))
    assert_same(ckpt.restore(1, abstract(tree))[0], expected)


def test_host_arrays_may_change_after_the_save_began(ckpt):
    host = np.zeros(1 << 20, np.int8)
    ckpt.save(1, {"host": host})
    host[:] = 1
    assert not ckpt.restore(1, {"host": host})[0]["host"].any()


def test_part_of_a_checkpoint_is_restored_on_request(ckpt):
    ckpt.save(1, state())
    target = abstract({"w": state()["w"]})
    got, _ = ckpt.restore(1, target, allow_unexpected=True)
    assert_same(got, {"w": state()["w"]})
    with pytest.raises(CheckpointError, match="unexpected"):
        ckpt.restore(1, target)


def test_description_needs_no_arrays(ckpt):
    ckpt.save(1, state(), {"a": 1})
    ckpt.wait()
    assert ckpt.describe(1)["layer/0/b"].shape == (4,)
    assert ckpt.extra(1) == {"a": 1}


def test_extra_without_a_json_form_is_refused(ckpt):
    with pytest.raises(CheckpointError, match="no JSON form") as caught:
        ckpt.save(1, state(), {"loss": np.float32(1)})
    assert caught.value.code == "AX604"
    assert ckpt.steps() == []


# -- other shardings and stack forms ------------------------------------------------------------


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (simulated) devices")
@pytest.mark.parametrize("saved", [P("a", "b"), P(("a", "b")), P()])
@pytest.mark.parametrize("wanted", [P("b", "a"), P(None, ("a", "b")), P()])
def test_another_sharding(tmp_path, saved, wanted):
    ckpt = make(tmp_path)
    value = jax.random.normal(jax.random.key(0), (8, 16))
    first = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ckpt.save(1, {"w": jax.device_put(value, NamedSharding(first, saved))})
    second = jax.make_mesh((1, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(second, wanted)
    got, _ = ckpt.restore(1, {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)})
    assert got["w"].sharding == sharding
    assert_same(got, {"w": value})
    ckpt.close()


@pytest.mark.parametrize("saved,wanted", [("0:4:1", None), (None, "0:4:1"), ("0:4:1", "0:2:1")])
def test_a_checkpoint_of_one_stack_form_loads_into_another(ckpt, saved, wanted):
    layers = [jax.random.normal(jax.random.key(i), (4, 8)) for i in range(4)]

    def form(key):
        if key is None:
            params = {str(i): {"w": w} for i, w in enumerate(layers)}
        else:
            n = int(key.split(":")[1])
            loose = {str(i): {"w": layers[i]} for i in range(n, 4)}
            params = {key: {"w": jnp.stack(layers[:n])}, **loose}
        return {"params": {"layer": params}, "opt": optax.adam(1e-3).init({"layer": params})}

    ckpt.save(1, form(saved))
    assert_same(ckpt.restore(1, abstract(form(wanted)))[0], form(wanted))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (simulated) devices")
def test_stack_form_and_sharding_change_together(ckpt):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    layers = [jax.random.normal(jax.random.key(i), (4, 8)) for i in range(4)]
    ckpt.save(1, {"0:4:1": jnp.stack(layers)})
    sharding = NamedSharding(mesh, P(None, "a"))
    leaf = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharding)
    got, _ = ckpt.restore(1, {str(i): leaf for i in range(4)})
    assert all(x.sharding == sharding for x in got.values())
    assert_same(got, {str(i): layers[i] for i in range(4)})


# -- damage -------------------------------------------------------------------------------------


def flip(path: Path, offset: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "flipped bit in an array": (lambda d: flip(data_file(d, 2)), "w.*differs from its checksum"),
    "truncated array": (lambda d: truncate(data_file(d, 2)), "511 bytes, 512 were written"),
    "missing array": (lambda d: data_file(d, 2).unlink(), "w.*is missing"),
    "flipped bit in extra": (lambda d: flip(d / "2/extra.json"), "extra.json differs"),
    "missing extra": (lambda d: (d / "2/extra.json").unlink(), "extra.json is missing"),
    "no manifest": (lambda d: (d / "2/manifest.json").unlink(), "the save did not finish"),
    "truncated manifest": (
        lambda d: truncate_half(d / "2/manifest.json"),
        "manifest.json is damaged",
    ),
    "flipped digit in the manifest": (
        lambda d: sub(d / "2/manifest.json", '"step": 2', '"step": 3'),
        "manifest.json differs from its checksum",
    ),
    "binary manifest": (
        lambda d: (d / "2/manifest.json").write_bytes(b"\xff\x00"),
        "cannot be read",
    ),
    "half-written step": (lambda d: (d / "2").rename(d / "2.partial"), "the save did not finish"),
}


def truncate_half(path: Path) -> None:
    path.write_text(path.read_text()[:40])


def sub(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_skipped(tmp_path, caplog, name):
    damage, reason = DAMAGES[name]
    writer = make(tmp_path)
    save_steps(writer, [1, 2])
    writer.close()
    damage(tmp_path)
    ckpt = make(tmp_path)
    with caplog.at_level(logging.WARNING, "axcore.checkpoint"):
        assert ckpt.latest_good() == 1
    assert re.search(reason, ckpt.skipped[2])
    assert re.search(f"step 2 .*skipped.*{reason}", caplog.text)
    assert_same(ckpt.restore(1, abstract(state()))[0], state(1))
    with pytest.raises(CheckpointError) as caught:
        ckpt.restore(2, abstract(state()))
    assert caught.value.code == "AX605"
    ckpt.close()


def test_every_byte_of_every_file_is_covered(tmp_path):
    writer = make(tmp_path)
    save_steps(writer, [1])
    writer.close()
    for path in sorted(p for p in (tmp_path / "1").rglob("*") if p.is_file() and p.stat().st_size):
        if path.name == "manifest.json":
            continue  # white space there may change without harm
        for offset in (0, path.stat().st_size // 2, -1):
            flip(path, offset)
            reader = make(tmp_path)
            assert reader.latest_good() is None, (path, offset)
            flip(path, offset)
    assert make(tmp_path).latest_good() == 1


def test_a_damaged_step_is_replaced_when_training_reaches_it_again(tmp_path):
    writer = make(tmp_path)
    save_steps(writer, [1, 2])
    writer.close()
    flip(data_file(tmp_path, 2))
    ckpt = make(tmp_path)
    assert ckpt.latest_good() == 1
    save_steps(ckpt, [2])
    assert ckpt.latest_good() == 2
    assert_same(ckpt.restore(2, abstract(state()))[0], state(2))
    ckpt.close()


def test_no_checkpoint_is_none_and_leaves_no_directory(tmp_path):
    ckpt = make(tmp_path / "checkpoints")
    assert ckpt.latest_good() is None
    assert not (tmp_path / "checkpoints").exists()


def test_foreign_entries_are_neither_steps_nor_removed(tmp_path):
    (tmp_path / "007").mkdir()
    (tmp_path / "notes.partial").mkdir()
    (tmp_path / "readme").write_text("mine")
    ckpt = make(tmp_path, keep_last_n=1)
    save_steps(ckpt, [1, 2])
    assert ckpt.steps() == [2]
    assert (tmp_path / "007").is_dir() and (tmp_path / "notes.partial").is_dir()
    assert (tmp_path / "readme").read_text() == "mine"
    ckpt.close()


# -- another model --------------------------------------------------------------------------------


def test_differences_to_another_model_are_listed(ckpt):
    ckpt.save(1, state())
    other = {
        "w": jax.ShapeDtypeStruct((8, 32), jnp.float32),
        "layer": {"0": {"b": jax.ShapeDtypeStruct((4,), jnp.float32)}},
        "head": jax.ShapeDtypeStruct((2,), ml_dtypes.bfloat16),
    }
    with pytest.raises(CheckpointError) as caught:
        ckpt.restore(1, other)
    text = caught.value.message
    assert caught.value.code == "AX603"
    assert "4 tensors differ" in text
    assert "head bfloat16[2] is missing" in text
    assert "w has shape [8, 16], expected [8, 32]" in text
    assert "layer/0/b has dtype int32, expected float32" in text
    assert "layer/1/b int32[4] is unexpected" in text
    assert "\n" not in text


def test_many_differences_are_counted(ckpt):
    ckpt.save(1, {f"a{i}": jnp.zeros(1) for i in range(30)})
    with pytest.raises(CheckpointError, match=r"60 tensors differ.*and 50 more"):
        ckpt.restore(1, {f"b{i}": jax.ShapeDtypeStruct((1,), jnp.float32) for i in range(30)})


def test_a_key_of_another_implementation_is_a_difference(ckpt):
    ckpt.save(1, {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(CheckpointError, match=r"key<rbg>, expected key<fry>|key .* expected"):
        ckpt.restore(1, {"key": jax.random.key(0)})


def test_an_absent_step_names_those_present(ckpt):
    save_steps(ckpt, [1, 2])
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are: 1, 2"):
        ckpt.restore(5, abstract(state()))


# -- when, and what is kept -----------------------------------------------------------------------


def test_first_due_and_last_steps_are_saved(tmp_path):
    ckpt = make(tmp_path, save_every_n_steps=4)
    assert [s for s in range(11) if ckpt.should_save(s, 10)] == [0, 4, 8, 10]


@pytest.mark.parametrize(
    "last,every,kept",
    [(1, None, [9]), (3, None, [7, 8, 9]), (2, 4, [0, 4, 8, 9]), (1, 3, [0, 3, 6, 9])],
)
def test_exactly_the_due_steps_are_kept(tmp_path, last, every, kept):
    ckpt = make(tmp_path, keep_last_n=last, keep_every_n_steps=every)
    save_steps(ckpt, range(10))
    assert ckpt.steps() == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(map(str, kept))
    ckpt.close()


def test_the_newest_good_step_stays_until_the_next_is_committed(tmp_path, monkeypatch):
    ckpt = make(tmp_path, keep_last_n=1)
    save_steps(ckpt, [1])

    def fail(*args, **kw):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("axcore.checkpoint._manifest.write", fail)
        ckpt.save(2, state(2))
        with pytest.raises(
            CheckpointError, match=r"saving step 2 failed.*step 1 is the newest good"
        ):
            ckpt.wait()
    assert ckpt.steps() == [1]
    save_steps(ckpt, [3])
    assert ckpt.steps() == [3]
    ckpt.close()


def test_steps_known_to_be_damaged_do_not_count_as_kept(tmp_path):
    writer = make(tmp_path)
    save_steps(writer, [1, 2, 3])
    writer.close()
    flip(data_file(tmp_path, 3))
    ckpt = make(tmp_path, keep_last_n=2)
    assert ckpt.latest_good() == 2
    save_steps(ckpt, [4])
    assert ckpt.steps() == [2, 4]
    ckpt.close()


def test_a_step_is_saved_once(ckpt):
    save_steps(ckpt, [1, 2])
    ckpt.save(2, state(99))
    assert_same(ckpt.restore(2, abstract(state()))[0], state(2))
    ckpt.save(2, state(99))
    assert_same(ckpt.restore(2, abstract(state()))[0], state(2))


def test_a_run_that_went_back_leaves_later_steps_behind(tmp_path):
    ckpt = make(tmp_path, keep_last_n=2)
    save_steps(ckpt, [1, 2, 3])
    ckpt.restore(2, abstract(state()))
    ckpt.save(3, state(99), {"position": 99})
    arrays, extra = ckpt.restore(3, abstract(state()))
    assert extra == {"position": 99}
    assert_same(arrays, state(99))
    ckpt.close()
    later = make(tmp_path, keep_last_n=2)
    later.restore(2, abstract(state()))
    assert later.latest_good() == 3  # until another step is whole
    save_steps(later, [2])  # it is there already
    assert later.steps() == [2, 3]
    save_steps(later, [4])
    assert later.steps() == [2, 4]
    later.close()


def test_a_run_that_restored_nothing_removes_no_later_step(tmp_path):
    writer = make(tmp_path, keep_last_n=2)
    save_steps(writer, [5, 6])
    writer.close()
    other = make(tmp_path, keep_last_n=2)
    save_steps(other, [0])
    assert other.steps() == [0, 5, 6]
    other.close()


@pytest.mark.parametrize("field", ["save_every_n_steps", "keep_last_n", "keep_every_n_steps"])
def test_counts_below_one_are_refused(tmp_path, field):
    with pytest.raises(CheckpointError, match=f"{field} is 0, expected at least 1"):
        make(tmp_path, **{field: 0})


# -- errors in the background ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["should_save", "check", "wait", "save", "close"])
def test_an_error_in_the_background_surfaces_at_the_next_call(tmp_path, monkeypatch, call):
    ckpt = make(tmp_path)

    def fail(*args, **kw):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("axcore.checkpoint._manifest.write", fail)
        ckpt.save(1, state())
        ckpt._thread.join()
    calls = {
        "should_save": lambda: ckpt.should_save(2, 10),
        "check": ckpt.check,
        "wait": ckpt.wait,
        "save": lambda: ckpt.save(2, state()),
        "close": ckpt.close,
    }
    with pytest.raises(
        CheckpointError, match=r"saving step 1 failed.*Input/output error"
    ) as caught:
        calls[call]()
    assert caught.value.code == "AX601"
    assert isinstance(caught.value.__cause__, OSError)
    assert not (tmp_path / "1.partial").exists()
    ckpt.close()


def test_a_save_does_not_start_before_open():
    ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
    with pytest.raises(CheckpointError, match="call open"):
        ckpt.save(1, state())
