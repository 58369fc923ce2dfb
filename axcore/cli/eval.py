"""``axcore eval``: the held-out split of a run, or bits per byte over text files."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from axcore.cli._experiment import rows
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

__all__ = ["add_parser", "evaluate"]

# In a batch of texts, unless --batch-size says more.
_MOST_TOKENS = 8192


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
        help="text files or patterns to evaluate on (default: what the run itself held out). "
        "Bits per byte are over the text's UTF-8 bytes; each document's end is predicted and "
        "counted too, and every token is scored once: documents longer than --context are read "
        "through windows that overlap",
    )
    command.add_argument(
        "--context",
        metavar="N",
        type=int,
        help="with --text: tokens of a window (default: what the run trained with)",
    )
    command.add_argument(
        "--stride",
        metavar="N",
        type=int,
        help="with --text: how far windows advance (default: half of --context)",
    )
    command.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        help="with --text: windows at a time (default: what the run trained with, and no more than "
        f"{_MOST_TOKENS:,} tokens)",
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
    from axcore.train import Evaler

    _check(args)
    with jax_started():
        loaded = load_model(args.directory, step=args.step, trusted=args.trust)
        cfg = loaded.trainer.cfg
        num_rows = cfg.batch_size
        if args.text:
            data: Any = _Texts(args, loaded)
            num_rows = data.batch_size
        else:
            data = cfg.input.instantiate()
            data.prepare()
        evalers = {name: evaler.instantiate() for name, evaler in cfg.evalers.items()}
        if not evalers and args.text:
            evalers = {"text": Evaler.Config().instantiate()}
        if not evalers:
            raise CliError(
                "the run has no evaler",
                code="AX832",
                where=args.directory,
                hint="give text files with --text",
            )
        program = _Program(loaded, num_rows)
        evals = {}
        for name, evaler in evalers.items():
            if evaler.cfg.use_ema:
                averaged = load_model(
                    args.directory, step=loaded.step, use_ema=True, trusted=args.trust
                )
                evals[name] = evaler.evaluate(_Program(averaged, num_rows), data)
            else:
                evals[name] = evaler.evaluate(program, data)
    if args.text:
        for metrics in evals.values():
            data.charge_first_tokens(metrics)
    metrics = next(iter(evals.values()))
    reference = _reference(data, metrics)
    out = {
        "metrics": metrics,
        "evals": evals,
        "reference": reference,
        "step": loaded.step,
        "from": str(args.directory),
        "text": args.text,
        "context": data.seq_len if args.text else None,
        "stride": data.stride if args.text else None,
        "batch_size": num_rows,
    }
    return CommandResult(out, _text(evals, reference, loaded.step))


class _Program:
    """The model's evaluation of a batch, on the first device."""

    def __init__(self, loaded: Any, num_rows: int):
        import jax

        trainer = loaded.trainer
        self.rows = tuple(range(num_rows))
        self._params, self._model = loaded.state, loaded.model
        self._step = jax.jit(lambda params, batch: trainer.eval_step(params, batch))

    def __call__(self, batch: Any) -> Any:
        import numpy as np

        from axcore.inference import check_ids

        if {"input_ids", "segment_ids"} <= set(batch):
            ids, segments = np.asarray(batch["input_ids"]), np.asarray(batch["segment_ids"])
            check_ids(self._model, ids[segments != 0], "the text")
        return self._step(self._params, batch)


class _Texts:
    """The part of an input that evalers use, over whole text files."""

    def __init__(self, args: argparse.Namespace, loaded: Any):
        from axcore.data import DocumentInput, TextFiles

        self._source = TextFiles.Config(paths=tuple(args.text)).instantiate()
        self._source.prepare()
        cfg = loaded.trainer.cfg
        self.seq_len: int = args.context or cfg.seq_len
        # What a pod trains with does not fit a laptop.
        fitting = min(cfg.batch_size, max(1, _MOST_TOKENS // self.seq_len))
        self.batch_size: int = args.batch_size or fitting
        limit = getattr(cfg.model, "max_seq_len", None)
        if isinstance(limit, int) and self.seq_len > limit:
            raise CliError(
                f"a context of {self.seq_len} tokens exceeds the model's {limit} positions",
                code="AX833",
                hint=f"set --context to at most {limit}",
            )
        shape = {"batch_size": self.batch_size, "seq_len": self.seq_len}
        data = cfg.input.copy().set(**shape).instantiate()
        if not isinstance(data, DocumentInput):
            raise CliError(
                f"the run's input, {type(data).__name__}, reads no text",
                code="AX833",
                hint="leave out --text to evaluate on what the run held out",
            )
        self._tokenizer = loaded.tokenizer
        # Another task than the next token is made of rows, as in training.
        self._task = None if data.transform is None else data
        self.stride: int | None = args.stride or max(1, self.seq_len // 2)
        if self._task is not None:
            if args.stride:
                raise CliError(
                    "--stride is for models that predict the next token",
                    code="AX833",
                    hint="leave it out: rows of other tasks do not overlap",
                )
            self.stride = None
        elif not args.batch_size:
            # A short text does not fill it.
            fitting, self.batch_size = self.batch_size, 1
            windows = sum(1 for _ in itertools.islice(self.heldout(), fitting))
            self.batch_size = max(1, windows)

    def heldout(
        self, rows: Sequence[int] | None = None, *, max_documents: int | None = None
    ) -> Any:
        """Returns one pass over all files; ``max_documents`` is for the run's own split."""
        from axcore.data import StridedBatches

        del max_documents
        if self._task is not None:
            return self._task.batches_of(self._source, self._tokenizer, rows)
        return StridedBatches(
            self._source,
            self._tokenizer,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            stride=self.stride,
            rows=rows,
        )

    def charge_first_tokens(self, metrics: dict[str, float]) -> None:
        """Counts what cannot be predicted: with neither bos nor eos, each document's first token.

        It costs what it takes to name any token, so that no byte of text is free.
        """
        tokenizer = self._tokenizer
        if "bits_per_byte" not in metrics or (tokenizer.bos_id, tokenizer.eos_id) != (None, None):
            return
        batches = self.heldout()
        extra = math.log2(tokenizer.vocab_size) * batches.num_documents
        metrics["bits_per_byte"] += extra / batches.num_bytes


def _check(args: argparse.Namespace) -> None:
    for name in ("context", "stride", "batch_size"):
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and not args.text:
            raise CliError(
                f"{flag} needs --text",
                code="AX833",
                hint="without a text the run's own evaluations are made, as its config says",
            )
        if value is not None and value < 1:
            raise CliError(
                f"{flag} is {value}, expected at least 1",
                code="AX833",
                hint=f"leave {flag} out for what suits the model",
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
        shown = {key: f"{value:.6g}" for key, value in metrics.items() if "/" not in key}
        lines += [f"{name}:", rows(list(shown.items()))]
        if len(shown) < len(metrics):
            lines.append(f"  and {len(metrics) - len(shown)} of single layers: --json has them")
    if reference is not None:
        lines += ["for comparison, bits per byte:"]
        lines.append(rows([(k.partition("_")[0], f"{v:.4f}") for k, v in reference.items()]))
    return "\n".join(lines)
