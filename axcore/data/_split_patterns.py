"""Regular expressions that cut a text into the words inside which BPE merges.

Each is what published tokenizers of that name use, in the syntax that ``tokenizers`` (Oniguruma)
and ``tiktoken`` (fancy-regex) share. Text is cut at every match; what lies between is a word too.
"""

from __future__ import annotations

__all__ = ["PATTERNS", "SEQUENCES"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# %s: the endings, where they belong to the word.
_CASED = f"{_BEFORE}[{_UPPER}]*[{_LOWER}]+%s|{_BEFORE}[{_UPPER}]+[{_LOWER}]*%s"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# One expression each.
PATTERNS: dict[str, str] = {
    "gpt2": _GPT2,
    # Up to three digits together; cl100k, llama 3.
    "cl100k": f"{_ENDINGS}|{_BEFORE}\\p{{L}}+|\\p{{N}}{{1,3}}{_TAIL}",
    # Each digit alone.
    "qwen2": f"{_ENDINGS}|{_BEFORE}\\p{{L}}+|\\p{{N}}{_TAIL}",
    # Words end where lower case meets upper case.
    "tekken": f"{_CASED % ('', '')}|\\p{{N}}{_SLASHED}",
    "o200k": f"{_CASED % (f'{_ENDINGS}?', f'{_ENDINGS}?')}|\\p{{N}}{{1,3}}{_SLASHED}",
}

# Names in GGUF files (`tokenizer.ggml.pre`) -> expressions that cut one after another.
SEQUENCES: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "llama-bpe": (PATTERNS["cl100k"],),
    "qwen2": (PATTERNS["qwen2"],),
    "tekken": (PATTERNS["tekken"],),
    "gpt-4o": (PATTERNS["o200k"],),
}
for _name, _aliases in {
    "gpt-2": ("olmo", "mpt", "phi-2", "gigachat", "roberta-bpe"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell"),
    "llama-bpe": ("llama3", "llama-v3", "dbrx", "smaug-bpe"),
    "qwen2": ("stablelm2", "deepseek-r1-qwen"),
}.items():
    SEQUENCES |= dict.fromkeys(_aliases, SEQUENCES[_name])
