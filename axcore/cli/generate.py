"""``axcore generate``: continue a text with the model in a run's directory."""

from __future__ import annotations

import argparse
from typing import Any

from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

__all__ = ["add_parser", "generate"]


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``generate``."""
    command = add_command(
        subparsers,
        "generate",
        generate,
        help="continue a text with a model directory",
        example='axcore generate --from runs/tiny-lm --prompt "The " --max-tokens 50',
    )
    command.add_argument(
        "--from", dest="directory", metavar="DIR", required=True, help="a run's --out directory"
    )
    text = command.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="P", help="the text to continue")
    text.add_argument("--chat", metavar="P", help="a message to answer, for models that chat")
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
    command.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the draws")
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
    from axcore.inference import Generator, Sampling, load_model

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    with jax_started():
        loaded = load_model(args.directory, step=args.step, trusted=args.trust, use_ema=args.ema)
        tokenizer = loaded.tokenizer
        prompt = _prompt_ids(tokenizer, args)
        generator = Generator(
            loaded.model,
            loaded.state,
            max_seq_len=getattr(loaded.trainer.cfg.model, "max_seq_len", None),
            eos_id=tokenizer.eos_id,
        )
        made = generator.generate([prompt], args.max_tokens, sampling, slide=not args.no_slide)
    ids = made.tokens[0]
    text = tokenizer.decode(ids)
    data = {
        "text": text,
        "tokens": len(ids),
        "token_ids": ids,
        "prompt_tokens": len(prompt),
        "ttft_seconds": made.ttft_seconds,
        "tokens_per_second": made.tokens_per_second,
        "compile_seconds": made.compile_seconds,
        "step": loaded.step,
    }
    return CommandResult(data, f"{args.prompt}{text}" if args.prompt is not None else text)


def _prompt_ids(tokenizer: Any, args: argparse.Namespace) -> list[int]:
    """Returns the prompt's tokens.

    A tokenizer with a chat template has ``encode_chat(messages)``, which returns the ids of
    ``[{"role": ..., "content": ...}]`` up to where the answer starts.
    """
    if args.prompt is not None:
        return tokenizer.encode(args.prompt).tolist()
    encode_chat = getattr(tokenizer, "encode_chat", None)
    if encode_chat is None:
        raise CliError(
            f"the model's tokenizer ({type(tokenizer).__name__}) has no chat template",
            code="AX823",
            where=args.directory,
            hint="use --prompt: this model continues text",
        )
    return [int(i) for i in encode_chat([{"role": "user", "content": args.chat}])]
