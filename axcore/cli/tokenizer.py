"""``axcore tokenizer``: train one, and see what tokens it makes."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from axcore.cli._experiment import rows
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

__all__ = ["add_parser", "decode", "encode", "show", "train"]

_CORPUS_NOTE = "text files or patterns (default: the Python reference that comes with Python)"


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``tokenizer train|show|encode|decode``."""
    parser = subparsers.add_parser("tokenizer", help="train a tokenizer, and see what it makes")
    inner = parser.add_subparsers(dest="tokenizer_command", required=True, metavar="COMMAND")
    command = add_command(
        inner,
        "train",
        train,
        help="train a byte-level BPE tokenizer on text",
        example="axcore tokenizer train --vocab-size 1024 --out runs/tokenizer\n"
        "axcore tokenizer train --text 'corpus/*.txt' --vocab-size 4096 --out runs/tokenizer",
    )
    command.add_argument("--text", metavar="FILE", nargs="+", help=_CORPUS_NOTE)
    command.add_argument("--vocab-size", metavar="N", type=int, required=True, help="number of ids")
    command.add_argument("--out", metavar="DIR", required=True, help="where to write it")
    command.add_argument(
        "--pattern",
        default="qwen2",
        help="what cuts text into words: gpt2, cl100k, qwen2 (default), o200k or tekken",
    )
    command = add_command(
        inner,
        "show",
        show,
        help="show a tokenizer's kind, size and special tokens",
        example="axcore tokenizer show --from runs/tokenizer",
    )
    _add_from(command)
    command = add_command(
        inner,
        "encode",
        encode,
        help="show the ids of a text",
        example='axcore tokenizer encode --from runs/tokenizer "A text"',
    )
    _add_from(command)
    command.add_argument("words", metavar="TEXT", nargs="?", help="the text (default: stdin)")
    command.add_argument(
        "--markup", action="store_true", help="let names of special tokens stand for them"
    )
    command = add_command(
        inner,
        "decode",
        decode,
        help="show the text of ids",
        example="axcore tokenizer decode --from runs/tokenizer 72 105",
    )
    _add_from(command)
    command.add_argument("ids", metavar="ID", nargs="+", type=int, help="token ids")


def _add_from(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--from",
        dest="directory",
        metavar="PATH",
        required=True,
        help="a model directory, a tokenizer's directory, or its file",
    )


def train(args: argparse.Namespace) -> CommandResult:
    """Trains a tokenizer.

    Raises:
        DataError: The text cannot be read, or the vocabulary is too small.
    """
    from axcore.data import PythonReference, TextFiles, train_tokenizer

    config: Any = TextFiles.Config(paths=tuple(args.text)) if args.text else None
    source = (PythonReference.Config() if config is None else config).instantiate()
    source.prepare()
    num_bytes = num_tokens = 0
    tokenizer = train_tokenizer(
        (source[i].text for i in range(len(source))),
        args.vocab_size,
        args.out,
        pattern=args.pattern,
    )
    # What it makes of its own corpus; the start of a large one tells as much.
    for i in range(len(source)):
        document = source[i]
        num_bytes += document.num_bytes
        num_tokens += len(tokenizer.encode(document.text))
        if num_bytes > 2**22:
            break
    data = {
        "out": args.out,
        "vocab_size": tokenizer.vocab_size,
        "documents": len(source),
        "bytes_per_token": num_bytes / max(num_tokens, 1),
    }
    notes = []
    if tokenizer.vocab_size < args.vocab_size:
        notes = [f"the text has no more pairs to merge: fewer ids than {args.vocab_size}"]
    use = (
        "to train with it:\n"
        "  --set 'input.tokenizer=config(\"axcore.data.HFTokenizer\")' "
        f"--set input.tokenizer.path={args.out} --set model.vocab_size={tokenizer.vocab_size}"
    )
    table = rows([(key.replace("_", " "), _short(value)) for key, value in data.items()])
    return CommandResult(data, "\n".join([table, *notes, use]))


def show(args: argparse.Namespace) -> CommandResult:
    """Shows a tokenizer.

    Raises:
        DataError: There is none.
    """
    tokenizer = _open(args)
    data = {
        "kind": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "stop_ids": list(tokenizer.stop_ids),
        "prompt_opens_with_bos": len(tokenizer.encode_prompt("")) > 0,
        "special_tokens": dict(getattr(tokenizer, "special_tokens", {})),
        "chat_template": tokenizer.chat_template,
        "fingerprint": tokenizer.fingerprint(),
    }
    special = data["special_tokens"]
    lines = [(key, value) for key, value in data.items() if not isinstance(value, dict)]
    lines.append(("special_tokens", ", ".join(f"{name} {i}" for name, i in special.items())))
    return CommandResult(data, rows([(k.replace("_", " "), _short(v)) for k, v in lines]))


def encode(args: argparse.Namespace) -> CommandResult:
    """Encodes a text.

    Raises:
        DataError: There is no tokenizer, or the text has no UTF-8 bytes.
    """
    tokenizer = _open(args)
    text = sys.stdin.read() if args.words is None else args.words
    made = tokenizer.encode_markup if args.markup else tokenizer.encode
    ids = made(text).tolist()
    data = {"ids": ids, "tokens": len(ids), "bytes": len(text.encode("utf-8", "surrogateescape"))}
    return CommandResult(data, " ".join(map(str, ids)))


def decode(args: argparse.Namespace) -> CommandResult:
    """Decodes ids.

    Raises:
        CliError: An id is outside the vocabulary.
        DataError: There is no tokenizer.
    """
    tokenizer = _open(args)
    outside = [i for i in args.ids if not 0 <= i < tokenizer.vocab_size]
    if outside:
        raise CliError(
            f"got the id {outside[0]}, expected ids from 0 to {tokenizer.vocab_size - 1}",
            code="AX850",
            hint="the ids may be those of another tokenizer",
        )
    text = tokenizer.decode(args.ids)
    return CommandResult({"text": text}, text)


def _open(args: argparse.Namespace) -> Any:
    from axcore.data import find_tokenizer
    from axcore.plugins import host

    return find_tokenizer(args.directory, (*host().trusted_packages(), *args.trust))


def _short(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 300 else f"{text[:300]} ... ({len(text)} characters)"
