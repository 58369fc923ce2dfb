"""The catalog: exact published sizes, golden texts, nothing about hardware."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import axlearn_models
from axcore import experiments
from axcore.cli import main
from axcore.config import Config
from axcore.module import flatten_specs
from axcore.plugins import host

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCE = Path(axlearn_models.__file__).parent


def names() -> list[str]:
    catalog = host().experiments
    return [name for name in catalog.names() if catalog.owner(name) == "axlearn-models"]


class Llama(NamedTuple):
    """The numbers of a published ``config.json`` and the parameters of the published weights."""

    total: int
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def count(self) -> int:
        """Counts by hand, with no layer of ours."""
        head_dim = self.head_dim or self.dim // self.heads
        wide, narrow = self.heads * head_dim, self.kv_heads * head_dim
        attention = self.dim * (2 * wide + 2 * narrow)
        attention += (wide + 2 * narrow) * self.qkv_bias + 2 * head_dim * self.qk_norm
        layer = attention + 3 * self.dim * self.ffn + 2 * self.dim
        embeddings = self.vocab * self.dim * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.dim


def qwen2(*sizes: int, tied: bool = False) -> Llama:
    return Llama(*sizes, tied=tied, qkv_bias=True)


def qwen3(*sizes: int, tied: bool = False) -> Llama:
    return Llama(*sizes, head_dim=128, tied=tied, qk_norm=True)


# Totals as the repositories of the weights state them (huggyllama, meta-llama, HuggingFaceTB, Qwen;
# a tied head counted once), dims from their config.json.
PUBLISHED = {
    "glassllm": Llama(852_608, 1024, 128, 4, 4, 2, 341, tied=True),
    "fuji-7B-v1": Llama(6_738_415_616, 32000, 4096, 32, 32, 32, 11008),
    "fuji-13B-v1": Llama(13_015_864_320, 32000, 5120, 40, 40, 40, 13824),
    "fuji-33B-v1": Llama(32_528_943_616, 32000, 6656, 60, 52, 52, 17920),
    "fuji-65B-v1": Llama(65_285_660_672, 32000, 8192, 80, 64, 64, 22016),
    "fuji-7B-v2": Llama(6_738_415_616, 32000, 4096, 32, 32, 32, 11008),
    "fuji-13B-v2": Llama(13_015_864_320, 32000, 5120, 40, 40, 40, 13824),
    "fuji-70B-v2": Llama(68_976_648_192, 32000, 8192, 80, 64, 8, 28672),
    "fuji-8B-v3": Llama(8_030_261_248, 128256, 4096, 32, 32, 8, 14336),
    "fuji-70B-v3": Llama(70_553_706_496, 128256, 8192, 80, 64, 8, 28672),
    "fuji-8B-v3.1": Llama(8_030_261_248, 128256, 4096, 32, 32, 8, 14336),
    "fuji-70B-v3.1": Llama(70_553_706_496, 128256, 8192, 80, 64, 8, 28672),
    "fuji-405B-v3": Llama(405_853_388_800, 128256, 16384, 126, 128, 8, 53248),
    "fuji-1B-v3": Llama(1_235_814_400, 128256, 2048, 16, 32, 8, 8192, tied=True),
    "fuji-3B-v3": Llama(3_212_749_824, 128256, 3072, 28, 24, 8, 8192, tied=True),
    "smollm2-135M": Llama(134_515_008, 49152, 576, 30, 9, 3, 1536, tied=True),
    "smollm2-360M": Llama(361_821_120, 49152, 960, 32, 15, 5, 2560, tied=True),
    "smollm2-1.7B": Llama(1_711_376_384, 49152, 2048, 24, 32, 32, 8192, tied=True),
    "qwen2.5-0.5B": qwen2(494_032_768, 151936, 896, 24, 14, 2, 4864, tied=True),
    "qwen2.5-1.5B": qwen2(1_543_714_304, 151936, 1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3B": qwen2(3_085_938_688, 151936, 2048, 36, 16, 2, 11008, tied=True),
    "qwen2.5-7B": qwen2(7_615_616_512, 152064, 3584, 28, 28, 4, 18944),
    "qwen2.5-14B": qwen2(14_770_033_664, 152064, 5120, 48, 40, 8, 13824),
    "qwen2.5-32B": qwen2(32_763_876_352, 152064, 5120, 64, 40, 8, 27648),
    "qwen2.5-72B": qwen2(72_706_203_648, 152064, 8192, 80, 64, 8, 29568),
    "qwen3-0.6B": qwen3(596_049_920, 151936, 1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7B": qwen3(1_720_574_976, 151936, 2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4B": qwen3(4_022_468_096, 151936, 2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8B": qwen3(8_190_735_360, 151936, 4096, 36, 32, 8, 12288),
    "qwen3-14B": qwen3(14_768_307_200, 151936, 5120, 40, 40, 8, 17408),
    "qwen3-32B": qwen3(32_762_123_264, 151936, 5120, 64, 64, 8, 25600),
}

# Rotary base and scaling factor, epsilon of the norms: what a count cannot see.
RELEASES = {
    "fuji-7B-v1": (10_000.0, None, 1e-6),
    "fuji-65B-v1": (10_000.0, None, 1e-5),
    "fuji-70B-v2": (10_000.0, None, 1e-5),
    "fuji-8B-v3": (500_000.0, None, 1e-5),
    "fuji-405B-v3": (500_000.0, 8.0, 1e-5),
    "fuji-1B-v3": (500_000.0, 32.0, 1e-5),
    "smollm2-135M": (100_000.0, None, 1e-5),
    "smollm2-1.7B": (130_000.0, None, 1e-5),
    "qwen2.5-7B": (1_000_000.0, None, 1e-6),
    "qwen2.5-72B": (1_000_000.0, None, 1e-5),
    "qwen3-32B": (1_000_000.0, None, 1e-6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_member_has_the_published_number_of_parameters(name):
    model = experiments.get(name).instantiate(name="trainer").model
    specs = flatten_specs(model.parameter_specs())
    assert sum(math.prod(spec.shape) for spec in specs.values()) == PUBLISHED[name].total
    assert PUBLISHED[name].count() == PUBLISHED[name].total


def test_every_member_but_the_test_members_is_counted():
    assert {name for name in names() if "test" not in name} == set(PUBLISHED)


@pytest.mark.parametrize("name", RELEASES)
def test_a_member_has_the_rotary_base_and_the_epsilon_of_its_release(name):
    base, factor, eps = RELEASES[name]
    lines = experiments.get(name).lines()

    def values(field: str) -> set[str]:
        return {value for path, value in lines.items() if re.search(rf"model\..*{field}$", path)}

    assert values(r"query_key_transform\.(.*\.)?base") == {repr(base)}
    assert values("norm.eps") == {repr(eps)}
    scaling = " ".join(values("scaling"))
    assert scaling == "None" if factor is None else f" factor={factor!r}," in scaling


def test_the_horizon_is_the_published_number_of_tokens():
    tokens = {"fuji-7B-v1": 1.0e12, "fuji-7B-v2": 2.0e12, "fuji-405B-v3": 15.6e12}
    tokens |= {"smollm2-135M": 2e12, "qwen2.5-7B": 18e12, "qwen3-8B": 36e12}
    for name, published in tokens.items():
        cfg = experiments.get(name)
        assert cfg.max_step * cfg.batch_size * cfg.seq_len == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize("name", ["fuji-7B-v2", "smollm2-135M"])
def test_a_run_cut_short_keeps_its_shape(name):
    cfg = experiments.get(name).set(max_step=3)
    schedule = cfg.learner.optimizer.learning_rate.copy()
    whole = experiments.get(name)
    assert (
        whole.instantiate(name="trainer").cfg.learner.optimizer.learning_rate.warmup_steps == 2000
    )
    assert cfg.instantiate(name="trainer").cfg.learner.optimizer.learning_rate.warmup_steps == 0
    assert schedule == whole.learner.optimizer.learning_rate


def test_every_member_has_a_golden_text_and_every_text_a_member():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(names())


@pytest.mark.parametrize("name", names())
def test_the_config_is_the_golden_text(name):
    file = GOLDEN / f"{name}.txt"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["config", "golden", name, "--check", str(file)])
    assert code == 0, f"{printed.getvalue()}(all anew: see plugins/axlearn_models/README.md)"


def test_golden_texts_give_back_their_configs():
    for name in ("fuji-405B-v3", "smollm2-135M", "qwen2.5-7B", "qwen3-8B"):
        text = (GOLDEN / f"{name}.txt").read_text("utf-8")
        assert Config.from_text(text, trusted=host().trusted_packages()) == experiments.get(name)


def test_the_package_knows_no_hardware():
    words = (
        r"tpu|gpu|cuda|rocm|neuron|trainium|trn\d?|h100|h200|a100|b200|v4|v5[ep]?|v6e|nvidia|mesh"
    )
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted((*SOURCE.rglob("*.py"),))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if re.search(rf"(?<![a-z0-9])({words})(?![a-z0-9])", line, re.IGNORECASE)
    ]
    assert not [line for line in found if "mesh_rules: " not in line and "mesh_shape" not in line]
