"""RoPE against transformers' rotary implementations, and their settings read and written."""

import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.errors import ConfigError
from axcore.layers import SequenceInfo
from axlearn_rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    MultiAxis,
    NTKScaling,
    RoPE,
    YaRNScaling,
    rope_from_hf,
    rope_to_hf,
)

HEADS, KV_HEADS, DIM, MAX_LEN = 4, 2, 16, 64
ORIGINAL = "original_max_position_embeddings"
SHORT, LONG = [1.0 + 0.05 * i for i in range(8)], [1.0 + i for i in range(8)]
# Every rope_type, as a config.json writes it, and what it means here.
KINDS = {
    "default": (None, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTKScaling(2.0, MAX_LEN)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 32,
        },
        Llama3Scaling(8.0, 1.0, 4.0, 32),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, ORIGINAL: 32},
        YaRNScaling(4.0, 32),
    ),
    "yarn-mscale": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
            ORIGINAL: 32,
        },
        YaRNScaling(4.0, 32, 8.0, 0.5, 1.0, 0.7, truncate=False),
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 2.0,
            ORIGINAL: 32,
        },
        LongRoPEScaling(tuple(SHORT), tuple(LONG), 2.0, 32),
    ),
}


def turned(rope, q, k, positions, **info):
    """Returns turned q and k, as numpy (batch, seq, heads, DIM)."""
    cfg = rope.copy().set(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    info = SequenceInfo(positions=jnp.asarray(positions, jnp.int32), **info)
    call = dict(state={}, inputs=(jnp.asarray(q), jnp.asarray(k), info), is_training=False)
    return functional(cfg.instantiate(name="rope"), **call)[0]


def random_qk(seq, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, seq, HEADS, DIM), dtype=np.float32)
    return q, rng.standard_normal((2, seq, KV_HEADS, DIM), dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_file_reads_and_writes_back(kind):
    scaling, expected = KINDS[kind]
    config = {"rope_theta": 500.0, "max_position_embeddings": MAX_LEN, "rope_scaling": scaling}
    rope = rope_from_hf(config)
    assert rope == RoPE.Config(base=500.0, scaling=expected)
    written = rope_to_hf(rope)
    assert written.get("rope_scaling") == scaling and written["rope_theta"] == 500.0
    assert rope_from_hf({"max_position_embeddings": MAX_LEN, **written}) == rope


def test_other_forms_of_a_config_file():
    phi3 = {
        "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
        "max_position_embeddings": 128,
        ORIGINAL: 32,
        "partial_rotary_factor": 0.75,
    }
    scaling = LongRoPEScaling(tuple(SHORT), tuple(LONG), 4.0, 32)
    assert rope_from_hf(phi3) == RoPE.Config(rotary_fraction=0.75, scaling=scaling)
    gemma3 = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    full = rope_from_hf(gemma3, layer_type="full_attention")
    assert full == RoPE.Config(base=1e6, scaling=LinearScaling(8.0))
    assert rope_from_hf(gemma3, layer_type="sliding_attention") == RoPE.Config()
    qwen2_vl = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert rope_from_hf(qwen2_vl) == RoPE.Config(axes=MultiAxis((2, 3, 3)))
    interleaved = RoPE.Config(axes=MultiAxis((4, 2, 2), "interleaved"), rotary_fraction=0.5)
    assert rope_from_hf(rope_to_hf(interleaved)) == interleaved


def test_what_a_config_file_must_not_hold():
    cases = {
        "rope_type 'yarm' is not known": {"rope_scaling": {"rope_type": "yarm"}},
        "does not read beta_fast": {
            "rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}
        },
        "needs factor, which is missing": {"rope_scaling": {"type": "linear"}},
        "needs max_position_embeddings": {"rope_scaling": {"type": "dynamic", "factor": 2}},
    }
    for message, config in cases.items():
        with pytest.raises(ConfigError, match=message):
            rope_from_hf(config)
    with pytest.raises(ConfigError, match="no 'global'"):
        rope_from_hf({"rope_parameters": {"full_attention": {}}}, layer_type="global")
    with pytest.raises(ConfigError, match="has no name for NTKScaling"):
        rope_to_hf(RoPE.Config(scaling=NTKScaling(2.0)))


@pytest.fixture(scope="module")
def hf():
    """transformers, with what these tests need of it."""
    reason = "compares with transformers on torch"
    torch = pytest.importorskip("torch", reason=reason)
    pytest.importorskip("transformers", reason=reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from transformers import LlamaConfig, Phi3Config
        from transformers.models.llama import modeling_llama as llama
        from transformers.models.phi3 import modeling_phi3 as phi3

        names = dict(torch=torch, llama=llama, phi3=phi3)
        yield type("HF", (), {**names, "LlamaConfig": LlamaConfig, "Phi3Config": Phi3Config})


def hf_config(cls, rope, **fields):
    shape = dict(hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    return cls(**shape, max_position_embeddings=MAX_LEN, **rope_to_hf(rope), **fields)


def hf_turned(hf, apply, embedding, q, k, positions):
    """Applies a transformers rotary embedding to q and k of (batch, seq, heads, DIM)."""
    q, k = hf.torch.tensor(q).transpose(1, 2), hf.torch.tensor(k).transpose(1, 2)
    cos, sin = embedding(q, hf.torch.tensor(positions))
    return [x.transpose(1, 2).numpy() for x in apply(q, k, cos, sin)]


def close(got, expected):
    """1e-4: angles of up to 100 rad differ by a rounding of the frequencies, 1e-5."""
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("kind", KINDS)
def test_every_scaling_equals_transformers(hf, kind):
    """Within the trained length, past it, and within it again."""
    rope = RoPE.Config(base=500.0, scaling=KINDS[kind][1])
    embedding = hf.llama.LlamaRotaryEmbedding(hf_config(hf.LlamaConfig, rope))
    for seq in (20, 100, 20):
        q, k = random_qk(seq)
        positions = np.tile(np.arange(seq), (2, 1))
        expected = hf_turned(hf, hf.llama.apply_rotary_pos_emb, embedding, q, k, positions)
        close(turned(rope, q, k, positions), expected)


@pytest.mark.oracle
@pytest.mark.xdist_group("torch")
def test_partial_longrope_equals_transformers(hf):
    scaling = LongRoPEScaling(tuple(SHORT[:6]), tuple(LONG[:6]), 2.0, 32)
    rope = RoPE.Config(rotary_fraction=0.75, scaling=scaling)
    embedding = hf.phi3.Phi3RotaryEmbedding(
        hf_config(hf.Phi3Config, rope, original_max_position_embeddings=32, pad_token_id=0)
    )
    for seq in (20, 40):
        q, k = random_qk(seq)
        positions = np.tile(np.arange(seq), (2, 1))
        expected = hf_turned(hf, hf.phi3.apply_rotary_pos_emb, embedding, q, k, positions)
        close(turned(rope, q, k, positions), expected)


@pytest.mark.oracle
@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("layout", ["blocks", "interleaved"])
def test_several_axes_equal_transformers(hf, layout):
    sections = (2, 3, 3) if layout == "blocks" else (4, 2, 2)
    rope = RoPE.Config(base=500.0, axes=MultiAxis(sections, layout))
    scaling = rope_to_hf(rope)["rope_scaling"]
    if layout == "blocks":
        from transformers.models.qwen2_vl import modeling_qwen2_vl as module
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig as Config

        make = module.Qwen2VLRotaryEmbedding
    else:
        from transformers.models.qwen3_vl import modeling_qwen3_vl as module
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig as Config

        make = module.Qwen3VLTextRotaryEmbedding
    embedding = make(
        Config(
            hidden_size=HEADS * DIM,
            num_attention_heads=HEADS,
            head_dim=DIM,
            rope_parameters={"rope_theta": 500.0, **scaling},
        )
    )
    q, k = random_qk(12)
    axes = np.random.default_rng(3).integers(0, 40, (3, 2, 12))
    expected = hf_turned(hf, hf.llama.apply_rotary_pos_emb, embedding, q, k, axes)
    values = {"rope_positions": jnp.asarray(axes.transpose(1, 2, 0))}
    close(turned(rope, q, k, np.zeros((2, 12)), token_values=values), expected)
