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
from axcore.parallel.cost import model_flops
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
    heads_norm: bool = False
    norms: int = 2

    def count(self) -> int:
        """Counts by hand, with no layer of ours."""
        head_dim = self.head_dim or self.dim // self.heads
        wide, narrow = self.heads * head_dim, self.kv_heads * head_dim
        attention = self.dim * (2 * wide + 2 * narrow)
        attention += (wide + 2 * narrow) * self.qkv_bias + 2 * head_dim * self.qk_norm
        attention += (wide + narrow) * self.heads_norm
        layer = attention + 3 * self.dim * self.ffn + self.norms * self.dim
        embeddings = self.vocab * self.dim * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.dim


class GPT2(NamedTuple):
    """As ``Llama``; biases everywhere, learned positions, a network of four times the width."""

    total: int
    dim: int
    layers: int

    def count(self) -> int:
        """Counts by hand, with no layer of ours."""
        norm = 2 * self.dim
        attention = 4 * (self.dim * self.dim + self.dim)
        network = 2 * 4 * self.dim * self.dim + 4 * self.dim + self.dim
        embeddings = (50_257 + 1024) * self.dim
        return embeddings + self.layers * (2 * norm + attention + network) + norm


class Bert(NamedTuple):
    """As ``Llama``; three tables with a norm, biases everywhere, a pooler or a head for tokens."""

    total: int
    dim: int
    layers: int
    ffn: int
    head: bool = True
    vocab: int = 30_522

    def count(self) -> int:
        """Counts by hand, with no layer of ours."""
        dense, norm = self.dim * self.dim + self.dim, 2 * self.dim
        network = 2 * self.dim * self.ffn + self.ffn + self.dim
        tables = (self.vocab + 512 + 2) * self.dim + norm
        top = dense + norm + self.vocab if self.head else dense
        return tables + self.layers * (4 * dense + network + 2 * norm) + top


class T5(NamedTuple):
    """As ``Llama``; of 1.1 the networks have gates and the head is the model's own."""

    total: int
    dim: int
    layers: int
    heads: int
    ffn: int
    head_dim: int = 64
    gated: bool = False

    def count(self) -> int:
        """Counts by hand, with no layer of ours."""
        attention = 4 * self.dim * self.heads * self.head_dim + self.dim
        network = (3 if self.gated else 2) * self.dim * self.ffn + self.dim
        layers = self.layers * (3 * attention + 2 * network)  # one more attention in the decoder
        stacks = 2 * (32 * self.heads + self.dim)
        return 32_128 * self.dim * (2 if self.gated else 1) + layers + stacks


class ViT(NamedTuple):
    """As ``Llama``; patches of 224 x 224 pixels in three colours, and 1,000 classes."""

    total: int
    dim: int
    layers: int
    ffn: int
    patch: int

    def count(self) -> int:
        """Counts by hand, with no layer of ours."""
        dense, norm = self.dim * self.dim + self.dim, 2 * self.dim
        network = 2 * self.dim * self.ffn + self.ffn + self.dim
        tokens = (224 // self.patch) ** 2 + 1
        patches = 3 * self.patch**2 * self.dim + self.dim
        first = patches + (tokens + 1) * self.dim  # positions and the class token
        return first + self.layers * (4 * dense + network + 2 * norm) + norm + 1000 * (self.dim + 1)


class Mixture(NamedTuple):
    """As ``Llama``; ``active`` of the parameters serve one token, embeddings among them."""

    total: int
    active: int
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int
    top_k: int
    head_dim: int = 128
    qk_norm: bool = False
    heads_norm: bool = False
    qkv_bias: bool = False
    shared: int = 0
    biases: bool = False  # of all linear maps; then there are sinks, too

    def count(self, experts: int | None = None) -> int:
        """Counts by hand, with no layer of ours."""
        one = 3 * self.dim * self.ffn + self.biases * (2 * self.ffn + self.dim)
        held = self.experts if experts is None else experts
        mixtures = held * one + self.dim * (self.experts + bool(self.shared))
        mixtures += self.biases * (self.experts + self.dim + self.heads)
        sizes = (self.vocab, self.dim, self.layers, self.heads, self.kv_heads, self.shared)
        same = ("head_dim", "qk_norm", "heads_norm", "qkv_bias")
        rest = Llama(0, *sizes, **{name: getattr(self, name) for name in same})
        return self.layers * mixtures + rest.count()


class DeepSeek(NamedTuple):
    """As ``Mixture``; latent attention, shared experts of the same width, dense layers first."""

    total: int
    active: int
    vocab: int
    dim: int
    layers: int
    dense_layers: int
    dense_ffn: int
    ffn: int
    experts: int
    shared: int
    top_k: int
    choice_bias: bool = False

    def count(self, experts: int | None = None) -> int:
        """Counts by hand, with no layer of ours."""
        heads, plain, rotated, value, rank, query_rank = 128, 128, 64, 128, 512, 1536
        attention = self.dim * query_rank + query_rank * heads * (plain + rotated)
        attention += self.dim * (rank + rotated) + rank * heads * (plain + value)
        attention += heads * value * self.dim + query_rank + rank
        held = (self.experts if experts is None else experts) + self.shared
        mixture = 3 * self.dim * self.ffn * held + self.dim * self.experts
        mixture += self.choice_bias * self.experts if experts is None else 0  # no parameter
        dense = 3 * self.dim * self.dense_ffn
        layers = self.layers * (attention + 2 * self.dim)
        layers += self.dense_layers * dense + (self.layers - self.dense_layers) * mixture
        return 2 * self.vocab * self.dim + layers + self.dim


def gemma(*sizes: int, head_dim: int = 256, qk_norm: bool = False) -> Llama:
    return Llama(*sizes, head_dim=head_dim, tied=True, qk_norm=qk_norm, norms=4)


def olmo2(*sizes: int) -> Llama:
    return Llama(*sizes, heads_norm=True)


def qwen2(*sizes: int, tied: bool = False) -> Llama:
    return Llama(*sizes, tied=tied, qkv_bias=True)


def qwen3(*sizes: int, tied: bool = False) -> Llama:
    return Llama(*sizes, head_dim=128, tied=tied, qk_norm=True)


# Totals as the repositories of the weights state them (huggyllama, meta-llama, HuggingFaceTB, Qwen,
# openai-community, mistralai, google, allenai, microsoft; a tied head counted once, of Gemma 3 the
# text model alone), dims from their config.json. Of AFM the report gives 2.58B + 0.15B; see there.
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
    "gpt2-124M": GPT2(124_439_808, 768, 12),
    "gpt2-355M": GPT2(354_823_168, 1024, 24),
    "gpt2-774M": GPT2(774_030_080, 1280, 36),
    "gpt2-1.5B": GPT2(1_557_611_200, 1600, 48),
    "mistral-7B-v0.1": Llama(7_241_732_096, 32000, 4096, 32, 32, 8, 14336),
    "mistral-7B-v0.3": Llama(7_248_023_552, 32768, 4096, 32, 32, 8, 14336),
    "mistral-nemo-12B": Llama(12_247_782_400, 131072, 5120, 40, 32, 8, 14336, head_dim=128),
    "gemma2-2B": gemma(2_614_341_888, 256000, 2304, 26, 8, 4, 9216),
    "gemma2-9B": gemma(9_241_705_984, 256000, 3584, 42, 16, 8, 14336),
    "gemma2-27B": gemma(27_227_128_320, 256000, 4608, 46, 32, 16, 36864, head_dim=128),
    "gemma3-270M": gemma(268_098_176, 262144, 640, 18, 4, 1, 2048, qk_norm=True),
    "gemma3-1B": gemma(999_885_952, 262144, 1152, 26, 4, 1, 6912, qk_norm=True),
    "gemma3-4B": gemma(3_880_263_168, 262208, 2560, 34, 8, 4, 10240, qk_norm=True),
    "gemma3-12B": gemma(11_766_034_176, 262208, 3840, 48, 16, 8, 15360, qk_norm=True),
    "gemma3-27B": gemma(
        27_009_346_304, 262208, 5376, 62, 32, 16, 21504, head_dim=128, qk_norm=True
    ),
    "olmo2-1B": olmo2(1_484_916_736, 100352, 2048, 16, 16, 16, 8192),
    "olmo2-7B": olmo2(7_298_617_344, 100352, 4096, 32, 32, 32, 11008),
    "olmo2-13B": olmo2(13_716_198_400, 100352, 5120, 40, 40, 40, 13824),
    "olmo2-32B": olmo2(32_234_279_936, 100352, 5120, 64, 40, 8, 27648),
    "phi3-mini-4k": Llama(3_821_079_552, 32064, 3072, 32, 32, 32, 8192),
    "phi3-mini-128k": Llama(3_821_079_552, 32064, 3072, 32, 32, 32, 8192),
    "phi3-medium-4k": Llama(13_960_238_080, 32064, 5120, 40, 40, 10, 17920),
    "bert-base": Bert(109_514_298, 768, 12, 3072),
    "bert-large": Bert(335_174_458, 1024, 24, 4096),
    "minilm-L6-v2": Bert(22_713_216, 384, 6, 1536, head=False),
    "t5-small": T5(60_506_624, 512, 6, 8, 2048),
    "t5-base": T5(222_903_552, 768, 12, 12, 3072),
    "t5-large": T5(737_668_096, 1024, 24, 16, 4096),
    "t5-3B": T5(2_851_598_336, 1024, 24, 32, 16_384, head_dim=128),
    "t5-11B": T5(11_307_321_344, 1024, 24, 128, 65_536, head_dim=128),
    "t5-v1.1-small": T5(76_961_152, 512, 8, 6, 1024, gated=True),
    "t5-v1.1-base": T5(247_577_856, 768, 12, 12, 2048, gated=True),
    "t5-v1.1-large": T5(783_150_080, 1024, 24, 16, 2816, gated=True),
    "t5-v1.1-xl": T5(2_849_757_184, 2048, 24, 32, 5120, gated=True),
    "t5-v1.1-xxl": T5(11_135_332_352, 4096, 24, 64, 10_240, gated=True),
    "vit-B16": ViT(86_567_656, 768, 12, 3072, 16),
    "vit-L16": ViT(304_326_632, 1024, 24, 4096, 16),
    "vit-H14": ViT(632_045_800, 1280, 32, 5120, 14),
    "qwen3-30B-A3B": Mixture(
        *(30_532_122_624, 3_353_032_704, 151936, 2048, 48, 32, 4, 768, 128, 8), qk_norm=True
    ),
    "qwen3-235B-A22B": Mixture(
        *(235_093_634_560, 22_190_763_520, 151936, 4096, 94, 64, 4, 1536, 128, 8), qk_norm=True
    ),
    "mixtral-8x7B": Mixture(*(46_702_792_704, 12_879_925_248, 32000, 4096, 32, 32, 8, 14336, 8, 2)),
    "mixtral-8x22B": Mixture(
        *(140_620_634_112, 39_152_031_744, 32000, 6144, 56, 48, 8, 16384, 8, 2)
    ),
    "olmoe-1B-7B": Mixture(
        *(6_919_161_856, 1_282_017_280, 50304, 2048, 16, 16, 16, 1024, 64, 8), heads_norm=True
    ),
    "qwen1.5-MoE-A2.7B": Mixture(
        *(14_315_784_192, 2_689_173_504, 151936, 2048, 24, 16, 16, 1408, 60, 4),
        qkv_bias=True,
        shared=5632,
    ),
    "qwen2-57B-A14B": Mixture(
        *(57_408_658_944, 14_249_270_784, 151936, 3584, 28, 28, 4, 2560, 64, 8),
        qkv_bias=True,
        shared=20480,
    ),
    "gpt-oss-20B": Mixture(
        *(20_914_757_184, 4_187_440_704, 201088, 2880, 24, 64, 8, 2880, 32, 4),
        head_dim=64,
        qkv_bias=True,
        biases=True,
    ),
    "gpt-oss-120B": Mixture(
        *(116_829_156_672, 5_711_982_912, 201088, 2880, 36, 64, 8, 2880, 128, 4),
        head_dim=64,
        qkv_bias=True,
        biases=True,
    ),
    "deepseek-V2": DeepSeek(
        *(235_741_434_880, 21_375_800_320, 102400, 5120, 60, 1, 12288, 1536, 160, 2, 6)
    ),
    "deepseek-V3": DeepSeek(
        *(671_026_419_200, 37_552_282_624, 129280, 7168, 61, 3, 18432, 2048, 256, 1, 8),
        choice_bias=True,
    ),
    "afm-on-device": Llama(
        2_730_071_552, 49152, 3072, 26, 24, 8, 8032, head_dim=128, tied=True, qk_norm=True
    ),
    "afm-server": Llama(
        69_274_464_256, 100352, 8192, 80, 64, 8, 28672, head_dim=128, tied=True, qk_norm=True
    ),
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
    "mistral-7B-v0.1": (10_000.0, None, 1e-5),
    "mistral-7B-v0.3": (1_000_000.0, None, 1e-5),
    "gemma2-27B": (10_000.0, None, 1e-6),
    "olmo2-32B": (500_000.0, None, 1e-6),
    "phi3-medium-4k": (10_000.0, None, 1e-5),
    "phi3-mini-128k": (10_000.0, 32.0, 1e-5),
    "afm-on-device": (500_000.0, None, 1e-5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_member_has_the_published_number_of_parameters(name):
    model = experiments.get(name).instantiate(name="trainer").model
    specs = flatten_specs(model.parameter_specs())
    assert sum(math.prod(spec.shape) for spec in specs.values()) == PUBLISHED[name].total
    assert PUBLISHED[name].count() == PUBLISHED[name].total


# Billions as the authors state them, in the report or in the name.
ACTIVE = {
    "qwen3-30B-A3B": (30.5, 3.3),
    "qwen3-235B-A22B": (235, 22),
    "mixtral-8x7B": (46.7, 12.9),
    "mixtral-8x22B": (141, 39),
    "olmoe-1B-7B": (6.9, 1.3),
    "qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "qwen2-57B-A14B": (57.4, 14),
    "gpt-oss-20B": (20.9, 3.6),
    "gpt-oss-120B": (116.8, 5.1),
    "deepseek-V2": (236, 21),
    "deepseek-V3": (671, 37),
}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_mixture_has_the_published_number_of_active_parameters(name):
    published = PUBLISHED[name]
    assert isinstance(published, Mixture | DeepSeek)
    counted = model_flops(experiments.get(name)).num_active_parameters
    assert counted == published.active == published.count(published.top_k)
    if name.startswith("gpt-oss"):  # there without the embedding, with the head
        counted -= published.vocab * published.dim
    for billions, exact in zip(ACTIVE[name], (published.total, counted), strict=True):
        # Rounded or cut off there.
        assert exact / 1e9 == pytest.approx(billions, abs=0.1 if billions % 1 else 1)


def test_the_active_parameters_of_every_mixture_are_counted():
    assert {name for name, it in PUBLISHED.items() if isinstance(it, Mixture | DeepSeek)} == set(
        ACTIVE
    )


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


def test_the_readme_names_every_member_and_every_converter():
    page = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    catalog = host().converters
    converters = [n for n in catalog.names() if catalog.owner(n) == "axlearn-models"]
    assert not [name for name in (*names(), *converters) if f"`{name}`" not in page]
