"""Programs are kept between starts: a second start of the same job compiles nothing."""

import json
import os
import subprocess
import sys

import pytest

from axcore.cli._jax import can_keep
from axcore.parallel import resolve_instance

PROGRAM = """
import json, jax
from axcore.cli._jax import jax_started
from axcore.train._compile_cache import CompileCacheUse
with jax_started(), CompileCacheUse() as use:
    jax.jit(lambda x: x * 2 + 1)(1.0)
    print(json.dumps(use.to_json()))
"""
TRAIN = """
import json, sys
from axcore.cli._main import main
sys.exit(main(sys.argv[1:]))
"""
SMALL = {
    "model.model_dim": 8,
    "model.decoder.num_layers": 1,
    "model.decoder.layer.attention.num_heads": 2,
    "batch_size": 8,
    "seq_len": 8,
    "max_step": 2,
    "sample_prompt": None,
    "evalers.heldout.max_documents": 1,
}


def start(cache, *args):
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env["AXCORE_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return json.loads(out[out.index("{") :]), errors


@pytest.mark.slow
def test_processes_share_a_cache_and_a_damaged_entry_is_replaced(tmp_path):
    both = [start(tmp_path, "-c", PROGRAM) for _ in range(2)]
    for process in both:
        use, _ = result(process)
        assert use["directory"] == str(tmp_path / "xla") and use["requests"] > 0
    kept = sorted((tmp_path / "xla").iterdir())
    use, errors = result(start(tmp_path, "-c", PROGRAM))
    assert (use["compiled"], use["hit_rate"]) == (0, 1.0) and "could not be read" not in errors
    for entry in kept:
        entry.write_bytes(entry.read_bytes()[:100])
    use, errors = result(start(tmp_path, "-c", PROGRAM))
    assert use["compiled"] == len(kept) and "could not be read" in errors
    assert sorted((tmp_path / "xla").iterdir()) == kept
    assert result(start(tmp_path, "-c", PROGRAM))[0]["compiled"] == 0


def test_an_empty_variable_turns_it_off(tmp_path):
    use, _ = result(start("", "-c", PROGRAM))
    assert (use["directory"], use["hits"], use["hit_rate"]) == (None, 0, None)


@pytest.mark.parametrize(("name", "kept"), [("cpu", True), ("cpu-1", True), ("cpu-8", False)])
def test_programs_of_several_cpu_devices_are_not_kept(name, kept):
    """Read back, their collectives wait for each other (jaxlib 0.10.2)."""
    assert can_keep(resolve_instance(name)) == kept


@pytest.mark.slow
def test_a_second_start_of_a_job_compiles_nothing(tmp_path):
    sets = [f"--set={path}={value}" for path, value in SMALL.items()]

    def report(out):
        args = ("train", "tiny-lm", "--instance", "cpu", "--out", str(tmp_path / out), "--json")
        return result(start(tmp_path / "cache", "-c", TRAIN, *args, *sets))[0]

    first = report("first")["compile_cache"]
    assert first["compiled"] > 0
    second = report("second")
    assert second["compile_cache"] == {
        **first,
        "hits": first["requests"],
        "compiled": 0,
        "hit_rate": 1.0,
    }
    # Losses are those of the programs, wherever they come from.
    assert second["loss"] == json.loads((tmp_path / "first" / "report.json").read_text())["loss"]
