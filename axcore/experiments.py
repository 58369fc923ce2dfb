"""Experiments by name: the catalog of core and plugins, functions of any package, config files.

``get`` returns a fresh ``Trainer.Config`` that is the caller's to edit. An experiment that derives
from another gets it by name and states only its differences::

    def wider() -> Trainer.Config:
        cfg = experiments.get("tiny-lm")
        cfg.model.model_dim = 128
        return cfg
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axcore.config import Config, author
from axcore.errors import CliError, did_you_mean
from axcore.plugins import host

if TYPE_CHECKING:
    from axcore.train import Trainer

__all__ = ["get", "names", "tiny_lm"]


def names() -> tuple[str, ...]:
    """Returns the catalog names of core and all active plugins, sorted."""
    return tuple(sorted(host().experiments.names()))


def get(name: str, *, trusted: Iterable[str] = ()) -> Trainer.Config:
    """Returns a fresh config of an experiment.

    Args:
        name: A catalog name, ``package.module:function``, or the path of a config text file.
        trusted: Further packages whose names a config file may use.

    Raises:
        CliError: There is no such experiment (with near misses), or it is no ``Trainer.Config``.
        ConfigError: A config file that cannot be read back.
        Exception: What the experiment's own code raises comes through as it is.
    """
    if name in host().experiments:
        make, plugin = host().experiments.load(name), host().experiments.owner(name)
    elif ":" in name and not Path(name).exists():
        make, plugin = _load_function(name), None
    elif "/" in name or name.endswith(".txt") or Path(name).is_file():
        return _from_file(Path(name), trusted)
    else:
        raise CliError(
            f"no experiment {name!r}; known: {', '.join(names())}",
            code="AX801",
            hint=did_you_mean(name, names())
            or "give a catalog name, package.module:function, or a config text file; plugins "
            "provide most names (`axcore plugins list` shows which are installed)",
        )
    with author("experiment", name, plugin):
        return _checked(make(), name)


def _load_function(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only a module that is itself absent is "no such experiment"; what it imports is its own.
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise CliError(
                f"no experiment {name!r}: there is no module {error.name!r}",
                code="AX801",
                hint="is its package installed, or its folder on PYTHONPATH?",
            ) from error
        raise CliError(
            f"the module of experiment {name!r} needs {error.name!r}, which is not installed",
            code="AX802",
            where=module_name,
            hint=f"install {error.name}",
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise CliError(
            f"no experiment {name!r}: module {module_name!r} has no function {attribute!r}",
            code="AX801",
            hint=did_you_mean(attribute, public) or None,
        )
    return function


def _from_file(path: Path, trusted: Iterable[str]) -> Trainer.Config:
    if path.is_dir():
        inside = path / "config.txt"
        raise CliError(
            f"{str(path)!r} is a folder, expected a config text file",
            code="AX801",
            hint=f"the experiment of this model directory is {str(inside)!r}"
            if inside.is_file()
            else "give a catalog name, package.module:function, or a config text file",
        )
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(
            f"cannot read the config file {str(path)!r}: {error}",
            code="AX801",
            hint="give a catalog name, package.module:function, or a config text file",
        ) from error
    with author("file", str(path)):
        packages = (*host().trusted_packages(), *trusted)
        return _checked(Config.from_text(text, trusted=packages), str(path))


def _checked(cfg: Any, name: str) -> Trainer.Config:
    from axcore.train import Trainer

    if not isinstance(cfg, Trainer.Config):
        raise CliError(
            f"experiment {name!r} is a {type(cfg).__qualname__}, expected a Trainer.Config",
            code="AX803",
            hint="return axcore.train.Trainer.Config(...) from the function",
        )
    return cfg.copy()


def tiny_lm() -> Trainer.Config:
    """A byte-level GPT-2-style language model of 0.12M parameters: a minute on a laptop."""
    from axcore.config import config_for, scaled
    from axcore.layers import Attention, CausalLM, Decoder, TransformerLayer
    from axcore.train import Learner, Trainer, optimizers, schedules

    return Trainer.Config(
        model=CausalLM.Config(
            vocab_size=264,
            model_dim=64,
            decoder=Decoder.Config(
                num_layers=2,
                layer=TransformerLayer.Config(attention=Attention.Config(num_heads=4)),
            ),
        ),
        learner=Learner.Config(
            optimizer=config_for(
                optimizers.adamw,
                learning_rate=config_for(
                    schedules.linear_warmup_cosine,
                    peak=5e-3,
                    warmup_steps=scaled(0.05, of="max_step", minimum=0),
                    total_steps=scaled(1, of="max_step"),
                    end_ratio=0.05,
                ),
                b2=0.98,
                weight_decay=0.05,
            ),
            clip_global_norm=1.0,
        ),
        max_step=1200,
        batch_size=16,
        seq_len=64,
        log_every_n_steps=1,
        sample_prompt="The ",
    )
