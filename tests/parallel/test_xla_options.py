"""Compiler options: what flags mean, what is refused before JAX starts, and what goes where."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from axcore import experiments
from axcore.errors import ConfigError
from axcore.parallel import (
    check_compiler_options,
    compile_step,
    parse_xla,
    platform_options,
    resolve_instance,
)
from axcore.train import assemble


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xla_a=true", True),
        ("xla_a=False", False),
        ("xla_a=3", 3),
        ("xla_a=1e-3", 1e-3),
        ("xla_a=", ""),
        ("xla_a = nan", "nan"),
        ("xla_a=a=b,c", "a=b,c"),
    ],
)
def test_values_of_flags_have_types(text, expected):
    key, value = parse_xla(text)
    assert key == "xla_a"
    assert (type(value), value) == (type(expected), expected)


@pytest.mark.parametrize("text", ["xla_a", "=3", "xla a=3", "--xla_a=3"])
def test_a_flag_that_is_no_pair_is_refused(text):
    with pytest.raises(ConfigError, match="AX497") as error:
        parse_xla(text)
    assert ("dashes" in str(error.value)) == text.startswith("-")


def test_unknown_names_and_bad_values_are_refused_with_the_way_out():
    cpu = resolve_instance("cpu")
    options = {"xla_cpu_enable_fast_mat": True, "xla_cpu_enable_fast_math": "maybe"}
    with pytest.raises(ConfigError, match="AX494") as unknown:
        check_compiler_options(options, cpu, flags=["xla_cpu_enable_fast_mat"])
    assert unknown.value.where == "--xla"
    assert "'xla_cpu_enable_fast_math'" in (unknown.value.hint or "")
    del options["xla_cpu_enable_fast_mat"]
    with pytest.raises(ConfigError, match=r"AX495") as bad:
        check_compiler_options(options, cpu)
    assert bad.value.where == "compiler_options.xla_cpu_enable_fast_math"
    assert "not a valid bool" in bad.value.message


def test_nothing_of_jax_has_started_when_an_option_is_refused():
    program = """
import jax
from axcore import experiments
from axcore.errors import ConfigError
from axcore.train import assemble
cfg = experiments.get("tiny-lm").set(compiler_options={"xla_no_such_option": 1})
try:
    assemble(cfg, instance="cpu")
except ConfigError as error:
    print(error.code)
jax.config.update("jax_num_cpu_devices", 3)  # raises once a backend has started
print(jax.device_count())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["AX494", "3"], done.stderr


def test_a_flag_of_another_platform_is_refused():
    with pytest.raises(ConfigError, match="AX496"):
        assemble(
            experiments.get("tiny-lm"), instance="cpu", xla=["xla_gpu_enable_triton_gemm=true"]
        )


def test_a_config_may_hold_options_of_several_platforms_and_each_gets_its_own():
    options = {"xla_gpu_a": 1, "xla_tpu_b": 2, "xla_cpu_c": 3, "xla_d": 4}
    assert platform_options(options, "cpu") == {"xla_cpu_c": 3, "xla_d": 4}
    assert platform_options(options, "cuda") == {"xla_gpu_a": 1, "xla_d": 4}
    assert platform_options(options, "tpu") == {"xla_tpu_b": 2, "xla_d": 4}
    # Nothing is left to be asked about, so an option that nobody knows is none of this machine's.
    check_compiler_options({"xla_tpu_no_such_option": 1}, resolve_instance("cpu"))


def test_a_flag_is_stored_and_says_that_it_was_one():
    cfg = experiments.get("tiny-lm").set(compiler_options={"xla_cpu_enable_fast_math": False})
    a = assemble(
        cfg,
        instance="cpu",
        xla=["xla_cpu_enable_fast_math=true", "xla_cpu_prefer_vector_width=128"],
    )
    assert dict(a.cfg.compiler_options) == {
        "xla_cpu_enable_fast_math": True,
        "xla_cpu_prefer_vector_width": 128,
    }
    event = a.cfg.set_by("compiler_options.xla_cpu_enable_fast_math")
    assert (event.kind, event.name) == ("flag", "--xla xla_cpu_enable_fast_math")


def test_what_only_compiling_finds_out_is_the_same_error():
    x = jnp.ones(())
    with pytest.raises(ConfigError, match="AX494") as error:
        compile_step(jnp.sin, x, compiler_options={"xla_no_such_option": 1})
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)
    with pytest.raises(ConfigError, match="AX495"):
        compile_step(jnp.sin, x, compiler_options={"xla_cpu_enable_fast_math": "maybe"})
