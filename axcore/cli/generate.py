"""``axcore generate``: continue texts with the model in a run's directory."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError, DataError

__all__ = ["add_parser", "generate"]

_MAX_PROMPT_FILE_BYTES = 64 * 2**20
_JSON_LINE = 'a line is "TEXT" or {"prompt": "TEXT"}'


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``generate``."""
    command = add_command(
        subparsers,
        "generate",
        generate,
        help="continue a text with a model directory",
        example='axcore generate --from runs/tiny-lm --prompt "The " --max-tokens 50\n'
        'axcore generate --from runs/chat --chat "Hello" --max-tokens 50 --stream\n'
        "axcore generate --from runs/tiny-lm --prompts prompts.txt --max-tokens 50 --json",
    )
    command.add_argument(
        "--from", dest="directory", metavar="DIR", required=True, help="a run's --out directory"
    )
    text = command.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--prompt", metavar="P", action="append", help="the text to continue; repeatable"
    )
    text.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt a line; in a .jsonl file each line is a JSON text or {"prompt": TEXT}',
    )
    text.add_argument(
        "--chat",
        metavar="P",
        action="append",
        help="a message to answer, for models that chat; repeatable",
    )
    command.add_argument("--system", metavar="P", help="with --chat: how the model should answer")
    command.add_argument(
        "--max-tokens", metavar="N", type=int, required=True, help="most tokens to generate"
    )
    command.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        default=0.0,
        help="divides the logits; 0 (default) always takes the likeliest token",
    )
    command.add_argument(
        "--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest; 0: from all"
    )
    command.add_argument(
        "--top-p", metavar="X", type=float, default=1.0, help="draw from the likeliest X of all"
    )
    command.add_argument(
        "--min-p",
        metavar="X",
        type=float,
        default=0.0,
        help="draw from what is at least X times as likely as the likeliest",
    )
    command.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=float,
        default=1.0,
        help="above 1: tokens that are there already get less likely",
    )
    command.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of the draws; prompt i has N + i"
    )
    command.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end the answer before this text; repeatable",
    )
    command.add_argument(
        "--stream", action="store_true", help="show the text as it comes (one prompt)"
    )
    command.add_argument(
        "--batch-size", metavar="N", type=int, default=8, help="most prompts at a time (default: 8)"
    )
    command.add_argument(
        "--no-slide",
        action="store_true",
        help="refuse more tokens than the model has positions for, instead of going on from the "
        "last half of the text",
    )
    command.add_argument(
        "--ema", action="store_true", help="use the moving average that the run kept"
    )
    command.add_argument(
        "--step", metavar="N", type=int, help="a saved step (default: the newest good one)"
    )


def generate(args: argparse.Namespace) -> CommandResult:
    """Generates.

    Raises:
        CliError: The flags ask for what cannot be, or the tokenizer has no chat template.
        AxcoreError: The directory is no model directory, or its model cannot be read.
    """
    from axcore.cli._jax import jax_started
    from axcore.inference import Generator, Sampling, complete, load_model

    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed
    )
    texts = _texts(args)
    with jax_started():
        loaded = load_model(
            args.directory, step=args.step, trusted=args.trust, use_ema=args.ema, unrolled=True
        )
        tokenizer = loaded.tokenizer
        prompts = [_prompt_ids(tokenizer, args, text) for text in texts]
        generator = Generator(
            loaded.model,
            loaded.state,
            max_seq_len=getattr(loaded.trainer.cfg.model, "max_seq_len", None),
            eos_id=tokenizer.stop_ids,
            chunk=8 if args.stream else 32,
        )
        if args.stream and args.chat is None:
            _show(texts[0])
        made, total = complete(
            generator,
            tokenizer,
            prompts,
            args.max_tokens,
            sampling,
            stop=args.stop,
            slide=not args.no_slide and len(prompts) == 1,
            batch_size=args.batch_size,
            on_text=(lambda _, text: _show(text)) if args.stream else None,
        )
    completions = [
        {
            "prompt": text,
            "text": completion.text,
            "tokens": len(completion.token_ids),
            "token_ids": completion.token_ids,
            "prompt_tokens": len(prompt),
            "finish_reason": completion.finish_reason,
        }
        for text, prompt, completion in zip(texts, prompts, made, strict=True)
    ]
    first = {key: value for key, value in completions[0].items() if key != "prompt"}
    data = {
        **first,
        "ttft_seconds": total.ttft_seconds,
        "tokens_per_second": total.tokens_per_second,
        "compile_seconds": total.compile_seconds,
        "step": loaded.step,
        "completions": completions,
    }
    # What was streamed is there already, all but the end of its line.
    return CommandResult(data, "" if args.stream else _text(args, completions))


def _text(args: argparse.Namespace, completions: list[dict[str, Any]]) -> str:
    whole = [c["text"] if args.chat else f"{c['prompt']}{c['text']}" for c in completions]
    if len(whole) == 1:
        return whole[0]
    return "\n\n".join(f"[{i}] {text}" for i, text in enumerate(whole))


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _texts(args: argparse.Namespace) -> list[str]:
    """Returns the prompts or messages that were given, checked against the other flags."""
    texts = args.prompt or args.chat or _read_prompts(Path(args.prompts))
    if args.stream and len(texts) > 1:
        raise CliError(
            f"got {len(texts)} prompts, expected one with --stream",
            code="AX824",
            hint="leave out --stream: all texts are printed at the end",
        )
    if args.system is not None and args.chat is None:
        raise CliError(
            "--system needs --chat",
            code="AX824",
            hint="a --prompt is continued as it stands: put the instructions into it",
        )
    if args.batch_size < 1:
        raise CliError(
            f"--batch-size is {args.batch_size}, expected at least 1",
            code="AX824",
            hint="it is how many prompts are continued at once",
        )
    return texts


def _read_prompts(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MAX_PROMPT_FILE_BYTES:
            raise CliError(
                f"the file is too large for prompts: more than {_MAX_PROMPT_FILE_BYTES:,} bytes",
                code="AX827",
                where=str(path),
                hint="split it into several files",
            )
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CliError(
            f"the prompts cannot be read: {getattr(e, 'strerror', None) or e}",
            code="AX827",
            where=str(path),
            hint="name a UTF-8 text file with a prompt a line, or a .jsonl file",
        ) from e
    texts: list[str] = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        text: Any = line.removesuffix("\r")
        if path.suffix == ".jsonl":
            try:
                text = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise CliError(
                    f"no JSON: {e}", code="AX827", where=f"{path}:{number}", hint=_JSON_LINE
                ) from e
            text = text.get("prompt") if isinstance(text, dict) else text
            if not isinstance(text, str):
                raise CliError(
                    'expected a JSON text or {"prompt": TEXT}',
                    code="AX827",
                    where=f"{path}:{number}",
                    hint=_JSON_LINE,
                )
        texts.append(text)
    if not texts:
        raise CliError(
            "the file has no prompts",
            code="AX827",
            where=str(path),
            hint="one a line; empty lines do not count",
        )
    return texts


def _prompt_ids(tokenizer: Any, args: argparse.Namespace, text: str) -> list[int]:
    """Returns the prompt's tokens, opened as the tokenizer opens prompts."""
    if args.chat is None:
        return tokenizer.encode_prompt(text).tolist()
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    try:
        return tokenizer.encode_chat(messages).tolist()
    except DataError as e:
        if e.code != "AX540":
            raise
        raise CliError(
            f"the model's tokenizer ({type(tokenizer).__name__}) has no chat template",
            code="AX823",
            where=args.directory,
            hint="use --prompt: this model continues text",
        ) from e
