"""A config text, however it was made, runs nothing that its reader did not trust."""

import pytest

from axcore.config import Config, parse_value
from axcore.errors import ConfigError


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "builtins.open",
        "numpy.load",
        "numpy.memmap",
        "numpy.savetxt",
        "numpy.testing.runstring",
        "numpy.ctypeslib.load_library",
        "jax.numpy.load",
        "jax.numpy.frompyfunc",
        "jax.export.deserialize",
        "jax.pure_callback",
        "operator.methodcaller",
        "axcore.cli.main",
        "axcore.train.train",
        "axcore.train.run.train",
        "axcore.experiments.get",
        "axcore.plugins.host",
        "axcore.inference.load_model",
        "axcore.layers.linear.jax.export.deserialize",
        "axcore.data.json.loads",
        "pickle.loads",
    ],
)
def test_code_that_does_more_than_compute_is_refused(path):
    for text in (f'config_for("{path}")', f'partial_for("{path}")'):
        with pytest.raises(ConfigError) as caught:
            Config.from_text(text)
        assert caught.value.code in ("AX111", "AX115")
    with pytest.raises(ConfigError):
        parse_value(f'ref("{path}")')


@pytest.mark.parametrize(
    "path",
    ["optax.adamw", "jax.nn.gelu", "jax.numpy.tanh", "jax.lax.rsqrt", "numpy.float32", "math.sqrt"],
)
def test_what_computes_needs_no_trust(path):
    assert callable(parse_value(f'ref("{path}")'))


def test_trusting_a_package_gives_all_of_it():
    assert parse_value('ref("numpy.load")', trusted=("numpy",)).__name__ == "load"


def test_a_path_too_deep_to_be_a_config_is_refused():
    text = 'config("axcore.layers.Linear")\n' + ".".join("a" * 5000) + ": 1\n"
    with pytest.raises(ConfigError, match="4999 levels"):
        Config.from_text(text)
