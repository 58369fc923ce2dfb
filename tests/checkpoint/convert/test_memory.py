"""A conversion holds one tensor at a time, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from axcore.checkpoint.convert._safetensors import header_bytes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("convert_memory")]

ALLOWED_BYTES = 200_000_000

# Converts a small model first, so that imports and first uses are not counted.
CHILD = """
import json, sys
from axcore._memory import peak_rss_bytes
from axcore.checkpoint.convert import convert, export
from axcore.data import ByteTokenizer
from axcore.plugins import PluginHost, find_candidates, reset_host

site, small, large, out = sys.argv[1:]
sys.path.insert(0, site)
reset_host(PluginHost(find_candidates([site])))
tokenizer = ByteTokenizer.Config().instantiate()
said = {}
for name, source in (("small", small), ("large", large)):
    convert(source, f"{out}/{name}", tokenizer=tokenizer, verify="never")
    said[f"import-{name}"] = peak_rss_bytes()
    export(f"{out}/{name}", f"{out}/{name}-back", verify="never")
    said[f"export-{name}"] = peak_rss_bytes()
print(json.dumps(said))
"""


def write_large(directory: Path, settings: dict, **sizes: int) -> tuple[int, int]:
    """Writes a member of the family without holding it; returns its size and its largest tensor."""
    directory.mkdir()
    settings = {**settings, **sizes}
    (directory / "config.json").write_text(json.dumps(settings))
    dim, length = settings["hidden_size"], settings["max_length"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (settings["vocab_size"], dim),
        "wpe": (length, dim),
        "lnf.weight": (dim,),
        "lnf.bias": (dim,),
    }
    for i in range(settings["num_layers"]):
        for name, out, into in (
            ("qkv", 3 * dim, dim),
            ("out", dim, dim),
            ("up", 4 * dim, dim),
            ("down", dim, 4 * dim),
        ):
            shapes |= {f"h.{i}.{name}.weight": (out, into), f"h.{i}.{name}.bias": (out,)}
        for name in ("ln1", "ln2"):
            shapes |= {f"h.{i}.{name}.weight": (dim,), f"h.{i}.{name}.bias": (dim,)}
    head, _ = header_bytes([(name, "float32", shape) for name, shape in shapes.items()])
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32).tobytes()
    largest = total = 0
    with open(directory / "model.safetensors", "wb") as file:
        file.write(head)
        for shape in shapes.values():
            size = 4 * int(np.prod(shape))
            largest, total = max(largest, size), total + size
            for start in range(0, size, len(block)):
                file.write(block[: size - start])
    return total, largest


@pytest.mark.parametrize(
    ("sizes", "total_bytes"),
    [
        ({"num_layers": 21, "hidden_size": 1024, "num_heads": 8}, 1_000_000_000),
        ({"num_layers": 1, "hidden_size": 512, "num_heads": 8, "vocab_size": 200_000}, 4e8),
    ],
    ids=["many-small-tensors", "one-large-tensor"],
)
def test_peak_memory_is_the_largest_tensor_and_a_constant(tmp_path, settings, sizes, total_bytes):
    write_large(tmp_path / "small", settings)
    total, largest = write_large(tmp_path / "large", settings, **sizes)
    assert total >= total_bytes
    site = next(path for path in sys.path if (Path(path) / "toy_family.py").exists())
    argv = [site, tmp_path / "small", tmp_path / "large", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak = json.loads(done.stdout)
    assert peak["import-large"] - peak["export-small"] <= largest + ALLOWED_BYTES
    assert peak["export-large"] - peak["export-small"] <= largest + ALLOWED_BYTES
