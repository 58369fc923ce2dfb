"""From an experiment to the config that runs, in the order of precedence.

experiment -> its ``modifiers`` -> ``--modifier`` -> ``--set`` -> the instance's rule -> the
experiment's own ``mesh_rules`` and the user's ``--rules``. (Config files are experiments by path.)
A rule never changes a value whose setter is a file, a modifier flag or ``--set``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from axcore.config import Config, apply_modifier, author
from axcore.errors import CliError, ConfigError
from axcore.plugins import host

if TYPE_CHECKING:
    from axcore.parallel.instance_rules import RuleReport
    from axcore.plugins import Instance
    from axcore.train.trainer import Trainer

__all__ = [
    "Assembled",
    "assemble",
    "check_layout",
    "check_sets",
    "edited",
    "parse_modifier",
    "parse_set",
]

_ARGUMENTS = re.compile(r":\w+=.*", re.DOTALL)  # of NAME:key=value,...


@dataclasses.dataclass(frozen=True)
class Assembled:
    """An experiment ready to run.

    Attributes:
        cfg: The config; not frozen.
        instance: The machine it is for.
        rules: What the rules did.
    """

    cfg: Trainer.Config
    instance: Instance
    rules: RuleReport


def parse_set(text: str) -> tuple[str, str]:
    """Splits ``path=value``.

    Raises:
        CliError: There is no ``=``, or no path before it.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise CliError(
            f"--set got {text!r}, expected path=value",
            code="AX804",
            hint="for example --set batch_size=2",
        )
    return path.strip(), value.strip()


def parse_modifier(text: str) -> Config:
    """Returns the modifier config of ``NAME`` or ``NAME:key=value,...``.

    Values are Python literals; a bare word is a string.

    Raises:
        PluginLookupError: No plugin registers the modifier.
        CliError: An argument is not of the form key=value, or is there twice.
        ConfigError: An argument is unknown or of a wrong type.
    """
    known = host().modifiers.names()
    # A name may itself hold a colon (acme-moe:moe): the longest registered one counts.
    names = [n for n in known if text == n or text.startswith(f"{n}:")]
    name = max(names, key=len) if names else _ARGUMENTS.sub("", text)
    arguments = text[len(name) + 1 :]
    target = host().modifiers.load(name)
    cfg = target() if callable(target) and not isinstance(target, type) else target.Config()
    if not isinstance(cfg, Config):
        raise CliError(
            f"modifier {name!r} is no modifier config",
            code="AX805",
            hint="its plugin registers a Modifier class, or a function that returns its config",
        )
    given: set[str] = set()
    for part in _split_arguments(arguments):
        key, equals, value = part.partition("=")
        if not equals:
            raise CliError(
                f"modifier {name!r} got the argument {part!r}, expected key=value",
                code="AX805",
                hint=f"for example {name}:key=value",
            )
        if key.strip() in given or not key.strip():
            what = "twice" if key.strip() else "without a name"
            raise CliError(
                f"modifier {name!r} got {part!r} {what}",
                code="AX805",
                hint=f"write {name}:key=value,other=value, each key once",
            )
        given.add(key.strip())
        cfg.set_path_text(key.strip(), value.strip(), trusted=tuple(host().trusted_packages()))
    return cfg


def _split_arguments(text: str) -> list[str]:
    """Splits at commas that are outside of brackets and quotes."""
    parts: list[str] = []
    depth, quote, start = 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [p for p in parts if p.strip()]


def edited(
    experiment: Trainer.Config,
    *,
    modifiers: Iterable[str] = (),
    sets: Iterable[str] = (),
    use: Iterable[str] = (),
    trusted: Iterable[str] = (),
    xla: Iterable[str] = (),
) -> Trainer.Config:
    """Returns an experiment with its own modifiers and the user's edits, fitted to no machine yet.

    Args:
        experiment: The experiment's config, as :func:`axcore.experiments.get` gives it.
        modifiers: ``NAME[:key=value,...]`` flags.
        sets: ``path=value`` flags; they win over everything but each other.
        use: Distributions to activate beside the instance's own.
        trusted: Packages that values may name beside core's and the active plugins' own.
        xla: ``key=value`` compiler options; each wins over any other setting of it.

    Raises:
        AxcoreError: Whatever cannot be: see the parts.
    """
    cfg = experiment.copy()
    own, cfg.modifiers = cfg.modifiers, ()  # the text of the result must not apply them again
    for modifier in own:
        cfg = apply_modifier(cfg, modifier)
    for text in modifiers:
        # A rule leaves alone what a flag has set, so the flag is the author, not the modifier.
        with author("flag", f"--modifier {text}"):
            cfg = apply_modifier(cfg, parse_modifier(text), kind="flag", name=f"--modifier {text}")
    sets, packages = tuple(sets), (*host().trusted_packages(), *trusted)
    for text in sets:
        path, value = parse_set(text)
        with author("flag", f"--set {path}"):
            cfg.set_path_text(path, value, trusted=packages)
    check_sets(cfg, sets)
    _set_options(cfg, xla)
    use = tuple(use)
    if use:
        with author("flag", "--use"):
            cfg.use = (*cfg.use, *(u for u in use if u not in cfg.use))
    return cfg


def assemble(
    experiment: Trainer.Config,
    *,
    modifiers: Iterable[str] = (),
    sets: Iterable[str] = (),
    instance: str | None = None,
    rules: Any = (),
    use: Iterable[str] = (),
    trusted: Iterable[str] = (),
    xla: Iterable[str] = (),
) -> Assembled:
    """Returns the config of an experiment as it runs on an instance.

    Args:
        experiment: The experiment's config, as :func:`axcore.experiments.get` gives it.
        modifiers: ``NAME[:key=value,...]`` flags.
        sets: ``path=value`` flags; they win over everything but each other.
        instance: Instance name; None detects this machine.
        rules: The user's own mesh rules.
        use: Distributions to activate beside the instance's own.
        trusted: Packages that values may name beside core's and the active plugins' own.
        xla: ``key=value`` compiler options; each wins over any other setting of it.

    Raises:
        AxcoreError: Whatever cannot be: see the parts.
    """
    from axcore.parallel import check_compiler_options, detect, resolve_instance
    from axcore.parallel.instance_rules import apply_instance_rules

    sets, xla = tuple(sets), tuple(xla)
    cfg = edited(experiment, modifiers=modifiers, sets=sets, use=use, trusted=trusted, xla=xla)
    resolved = resolve_instance(instance or detect())
    cfg, report = apply_instance_rules(cfg, resolved, rules=rules)
    check_sets(cfg, sets)
    flags = _set_options(cfg, xla)
    check_compiler_options(
        cfg.compiler_options, resolved, vouched=report.compiler_options, flags=flags
    )
    return Assembled(cfg, resolved, report)


def check_layout(assembled: Assembled) -> None:
    """Checks that the mesh fits the machine and its axes divide the model's parameters.

    A run does so when it makes its program; here nothing but the specs is made.

    Raises:
        ShardingError: They do not; names what would.
        AxcoreError: The model cannot be built.
    """
    from axcore.layers.placement import build_model
    from axcore.parallel import abstract_mesh, named_shardings

    cfg, instance = assembled.cfg, assembled.instance
    mesh: Any = abstract_mesh(cfg.mesh_shape, instance.num_devices, instance.num_slices)
    named_shardings(build_model(cfg).parameter_specs(), mesh, cfg.sharding_rules)


def _set_options(cfg: Trainer.Config, xla: Iterable[str]) -> tuple[str, ...]:
    """Sets the ``--xla`` flags, each with itself as the author; returns their names.

    Done again after the rules, which state the options anew, as a whole.
    """
    from axcore.parallel import parse_xla

    options = dict(map(parse_xla, xla))
    if not options.keys() <= cfg.compiler_options.keys():
        with author("flag", "--xla"):
            cfg.compiler_options = {**cfg.compiler_options, **options}
    for key, value in options.items():
        with author("flag", f"--xla {key}"):
            cfg.set_path(f"compiler_options.{key}", value)
    return tuple(options)


def check_sets(cfg: Config, sets: Iterable[str]) -> None:
    """Checks that what ``--set`` flags have set is still there.

    Raises:
        CliError: A later step, or a later flag, has removed it.
    """
    for text in sets:
        _check_still_there(cfg, parse_set(text)[0])


def _check_still_there(cfg: Config, path: str) -> None:
    try:
        cfg.get_path(path)
    except ConfigError as error:
        raise CliError(
            f"--set {path} was removed by a later step (a rule or modifier)",
            code="AX806",
            hint="set the field of what took its place; `axcore config explain` shows it",
        ) from error
