"""``axcore eval``: the held-out split of a run, or bits per byte over text files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from axcore.cli._experiment import rows
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

__all__ = ["add_parser", "evaluate"]


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``eval``."""
    command = add_command(
        subparsers,
        "eval",
        evaluate,
        help="evaluate a model directory",
        example="axcore eval --from runs/tiny-lm\n"
        "axcore eval --from runs/tiny-lm --text notes.txt 'corpus/*.txt' --json",
    )
    command.add_argument(
        "--from", dest="directory", metavar="DIR", required=True, help="a run's --out directory"
    )
    command.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        help="text files or patterns to evaluate on (default: what the run itself held out)",
    )
    command.add_argument(
        "--step", metavar="N", type=int, help="a saved step (default: the newest good one)"
    )


def evaluate(args: argparse.Namespace) -> CommandResult:
    """Evaluates.

    Raises:
        CliError: The run has no evaler.
        AxcoreError: The directory is no model directory, or the text cannot be read.
    """
    from axcore.cli._jax import jax_started
    from axcore.inference import load_model

    with jax_started():
        loaded = load_model(args.directory, step=args.step, trusted=args.trust)
        cfg = loaded.trainer.cfg
        if args.text:
            data: Any = _Texts(args.text, loaded)
        else:
            data = cfg.input.instantiate()
            data.prepare()
        evalers = {name: evaler.instantiate() for name, evaler in cfg.evalers.items()}
        if not evalers:
            raise CliError(
                "the run has no evaler",
                code="AX832",
                where=args.directory,
                hint="give text files with --text" if not args.text else None,
            )
        program = _Program(loaded)
        evals = {}
        for name, evaler in evalers.items():
            if evaler.cfg.use_ema:
                averaged = load_model(
                    args.directory, step=loaded.step, use_ema=True, trusted=args.trust
                )
                evals[name] = evaler.evaluate(_Program(averaged), data)
            else:
                evals[name] = evaler.evaluate(program, data)
    metrics = next(iter(evals.values()))
    reference = _reference(data, metrics)
    out = {
        "metrics": metrics,
        "evals": evals,
        "reference": reference,
        "step": loaded.step,
        "from": str(args.directory),
        "text": args.text,
    }
    return CommandResult(out, _text(evals, reference, loaded.step))


class _Program:
    """The model's evaluation of a batch, on the first device."""

    def __init__(self, loaded: Any):
        import jax

        trainer = loaded.trainer
        self.rows = tuple(range(trainer.cfg.batch_size))
        self._params = loaded.state
        self._step = jax.jit(lambda params, batch: trainer.eval_step(params, batch))

    def __call__(self, batch: Any) -> Any:
        return self._step(self._params, batch)


class _Texts:
    """The part of an input that evalers use, over whole text files."""

    def __init__(self, paths: Sequence[str], loaded: Any):
        from axcore.data import TextFiles

        self._source = TextFiles.Config(paths=tuple(paths)).instantiate()
        self._source.prepare()
        self._tokenizer = loaded.tokenizer
        self._shape = (loaded.trainer.cfg.batch_size, loaded.trainer.cfg.seq_len)

    def heldout(
        self, rows: Sequence[int] | None = None, *, max_documents: int | None = None
    ) -> Any:
        """Returns one pass over all files; ``max_documents`` is for the run's own split."""
        import numpy as np

        from axcore.data import HeldoutBatches

        del max_documents
        batch_size, seq_len = self._shape
        return HeldoutBatches(
            self._source,
            np.arange(len(self._source)),
            self._tokenizer,
            batch_size=batch_size,
            seq_len=seq_len,
            rows=rows,
        )


def _reference(data: Any, metrics: Mapping[str, float]) -> dict[str, float] | None:
    """What a general compressor makes of the same text, bits per byte."""
    if "bits_per_byte" not in metrics:
        return None
    from axcore.data import reference_bits_per_byte

    documents = (document.text for document in data.heldout().documents())
    xz = reference_bits_per_byte(documents, max_bytes=8 << 20)
    return {"xz_bits_per_byte": xz, "uniform_bits_per_byte": 8.0}


def _text(
    evals: Mapping[str, Mapping[str, float]], reference: Mapping[str, float] | None, step: int
) -> str:
    lines = [f"step {step}"]
    for name, metrics in evals.items():
        lines += [f"{name}:", rows([(key, f"{value:.6g}") for key, value in metrics.items()])]
    if reference is not None:
        lines += ["for comparison, bits per byte:"]
        lines.append(rows([(k.partition("_")[0], f"{v:.4f}") for k, v in reference.items()]))
    return "\n".join(lines)
