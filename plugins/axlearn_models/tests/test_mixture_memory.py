"""Converting a mixture holds the experts of one layer, measured in a process of its own.

The files hold a tensor for each expert; here the experts of a layer are one array, which has to be
there as a whole, and nothing else of its size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from axcore.checkpoint.convert._safetensors import header_bytes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("convert_memory")]

# What is there besides the stacked array: the parts in which it is written (64 MB) and read
# (32 MB), and their copies in the dtype that they are stored in. The dense models' constant.
ALLOWED_BYTES = 200_000_000
EXPERTS, DIM = 100, 1024

# Works on a small model first, so that imports and first uses are not counted.
CHILD = """
import json, sys
from axcore._memory import peak_rss_bytes
from axcore.checkpoint.convert import convert, export
from axcore.data import ByteTokenizer

tokenizer = ByteTokenizer.Config().instantiate()
said = []
for name in ("small", "large"):
    if sys.argv[1] == "import":
        convert(name, f"{name}-ours", tokenizer=tokenizer, verify="never")
    else:
        export(f"{name}-ours", f"{name}-back", verify="never")
    said.append(peak_rss_bytes())
print(json.dumps(said[1] - said[0]))
"""


def write_qwen3_moe(directory: Path, *, num_experts: int, dim: int) -> None:
    """Writes a member of one layer without holding it."""
    heads, head_dim, vocab = 8, 64, 512
    settings = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": dim,
        "moe_intermediate_size": dim,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings))
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, dim),
        "lm_head.weight": (vocab, dim),
        "model.norm.weight": (dim,),
        f"{layer}.mlp.gate.weight": (num_experts, dim),
        f"{layer}.self_attn.o_proj.weight": (dim, heads * head_dim),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}.{name}.weight"] = (dim,)
    for name in "qkv":
        shapes[f"{layer}.self_attn.{name}_proj.weight"] = (heads * head_dim, dim)
    for name in "qk":
        shapes[f"{layer}.self_attn.{name}_norm.weight"] = (head_dim,)
    for expert in range(num_experts):
        for name in ("up", "gate", "down"):
            shapes[f"{layer}.mlp.experts.{expert}.{name}_proj.weight"] = (dim, dim)
    head, _ = header_bytes([(name, "float32", shape) for name, shape in shapes.items()])
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32).tobytes()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(head)
        for shape in shapes.values():
            size = 4 * int(np.prod(shape))
            for start in range(0, size, len(block)):
                file.write(block[: size - start])


def test_peak_memory_is_the_experts_of_a_layer_and_a_constant(tmp_path):
    write_qwen3_moe(tmp_path / "small", num_experts=4, dim=64)
    write_qwen3_moe(tmp_path / "large", num_experts=EXPERTS, dim=DIM)
    stacked = 4 * EXPERTS * DIM * DIM  # 419 MB, and a file of three times that
    for direction in ("import", "export"):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, direction],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        growth = json.loads(done.stdout)
        assert growth <= stacked + ALLOWED_BYTES, direction
        assert growth > stacked / 2, direction  # else something else was measured
    # What came back is all of it.
    given, back = (tmp_path / name / "model.safetensors" for name in ("large", "large-back"))
    assert given.stat().st_size == pytest.approx(back.stat().st_size, rel=1e-3)
