"""The arguments that name and edit an experiment, and the config they stand for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from axcore.cli._parser import named

if TYPE_CHECKING:
    from axcore.train import Assembled, Trainer

__all__ = [
    "add_edits",
    "add_experiment",
    "add_instance",
    "assembled",
    "edited_config",
    "peaks",
    "rows",
]

_RULES_HELP = """\
a rules file is the config text of an axcore.parallel.MeshRules, such as:
  config("axcore.parallel.MeshRules")
  rules: tuple
  rules.0: tuple
  rules.0.0: "cpu-*"
  rules.0.1: tuple
  rules.0.1.0: config("axcore.parallel.MeshShapeModifier")
  rules.0.1.0.mesh_shape: {"data": 2, "fsdp": -1}"""


def add_experiment(parser: argparse.ArgumentParser, name: str = "experiment") -> None:
    """Adds the argument EXP."""
    parser.add_argument(
        name,
        metavar="EXP",
        help="a catalog name, package.module:function, or a config text file",
    )


def add_edits(parser: argparse.ArgumentParser) -> None:
    """Adds ``--set``, ``--modifier`` and ``--use``."""
    parser.add_argument(
        "--set",
        dest="sets",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="set a value, such as batch_size=2 or model.decoder.num_layers=1; repeatable",
    )
    parser.add_argument(
        "--modifier",
        dest="modifiers",
        metavar="NAME[:KEY=VALUE,...]",
        action="append",
        default=[],
        help="apply a plugin's modifier, before --set; repeatable",
    )
    parser.add_argument(
        "--use",
        metavar="DISTRIBUTION",
        action="append",
        default=[],
        help="make another plugin's rules, options and kernels active too; repeatable",
    )


def add_instance(parser: argparse.ArgumentParser, *, default: str = "this machine") -> None:
    """Adds ``--instance``, ``--rules`` and ``--xla``."""
    parser.add_argument(
        "--instance",
        metavar="T",
        type=named,
        help=f"the machine, such as cpu, cpu-8 or a plugin's (default: {default})",
    )
    parser.add_argument(
        "--rules", metavar="FILE", help="your own mesh rules, after all others (see below)"
    )
    parser.add_argument(
        "--xla",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a compiler option, over those of the machine's plugin; repeatable",
    )
    parser.epilog = f"{parser.epilog}\n\n{_RULES_HELP}"


def edited_config(
    args: argparse.Namespace, name: str | None = None, *, flags: bool = True
) -> Trainer.Config:
    """Returns the config of EXP with its own modifiers and the user's edits, for no machine.

    Args:
        args: The command line.
        name: The experiment; None takes ``args.experiment``.
        flags: Whether to make the edits of the flags.
    """
    from axcore.train.assemble import edited

    experiment = _experiment(name or args.experiment, args)
    if not flags:
        return edited(experiment)
    return edited(
        experiment,
        modifiers=args.modifiers,
        sets=args.sets,
        use=args.use,
        trusted=args.trust,
        xla=getattr(args, "xla", ()),
    )


def assembled(
    args: argparse.Namespace,
    *,
    sets: tuple[str, ...] = (),
    instance: str | None = None,
    rules: Any = None,
) -> Assembled:
    """Returns the config of EXP as it runs on the instance.

    Args:
        args: The command line.
        sets: Further ``path=value`` settings, of flags of their own.
        instance: The instance; None takes that of the command line.
        rules: The user's own rules; None takes those of the command line.
    """
    from axcore.train.assemble import assemble

    return assemble(
        _experiment(args.experiment, args),
        modifiers=args.modifiers,
        sets=(*args.sets, *sets),
        instance=instance or args.instance,
        rules=_rules(args) if rules is None else rules,
        use=args.use,
        trusted=args.trust,
        xla=args.xla,
    )


def peaks(peak_flops: Mapping[str, float]) -> str:
    """Returns what an MFU divides by, such as ``of the peak of bfloat16 (197 TFLOP/s)``."""
    named = [f"{dtype} ({rate / 1e12:.3g} TFLOP/s)" for dtype, rate in peak_flops.items()]
    return f"of the peak{'s' if len(named) > 1 else ''} of {', '.join(named)}" if named else ""


def rows(pairs: list[tuple[str, str]], indent: str = "  ") -> str:
    """Returns two columns as text."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}  {value}".rstrip() for name, value in pairs)


def _experiment(name: str, args: argparse.Namespace) -> Trainer.Config:
    from axcore import experiments

    if ":" in name and os.getcwd() not in sys.path and "" not in sys.path:
        # Last, so that a folder's files hide no installed package.
        sys.path.append(os.getcwd())
    return experiments.get(name, trusted=args.trust)


def _rules(args: argparse.Namespace) -> Any:
    if args.rules is None:
        return ()
    from axcore.parallel import read_mesh_rules
    from axcore.plugins import host

    return read_mesh_rules(args.rules, trusted=(*host().trusted_packages(), *args.trust))
