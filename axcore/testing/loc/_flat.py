"""The control: the same N modules and M variants in a flat style, which must come out O(NM).

Each module is a file that writes out all variants of attention and feed-forward as functions, and
hands every flag down from ``forward`` through ``layer`` to each of them. A feature is added as it
has to be there: its flags in each of those signatures and calls, its body in each function. This
is a caricature of no framework in particular; it is here to show that the harness counts.

A feature says how by a section ``# %% flat SLOT`` that defines ``flat(...)``: its positional
arguments are the names it may use and change, its keyword-only arguments are the flags (the first
one switches it on), its body is what is written at the slot:

- ``query_key``: ``q, k, v`` (batch, seq, heads, head_dim), ``positions`` (batch, seq);
- ``logits``: ``logits`` (batch, heads, seq, seq);
- ``mask``: ``mask`` bool (batch, seq, seq), ``positions``;
- ``feed_forward``: ``x``, ``y`` (batch, seq, dim), ``w_in``, ``w_out``.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from axcore.errors import CliError
from axcore.testing.loc._features import Feature
from axcore.testing.loc._probe import GateError
from axcore.testing.loc._trees import CodeBase

__all__ = ["check_control", "flat_code_base"]

_ATTENTION = ("query_key", "logits", "mask")
_FEED_FORWARD = ("feed_forward",)
_ACTIVATIONS = ("gelu", "silu")

_HEAD = '''
"""Model {i}: every variant written out."""

import jax
import jax.numpy as jnp


def norm(x):
    """Divides by the root mean square."""
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

'''
_VARIANT = '''
def attention_{j}(params, x, positions, *, num_heads=4, scale={scale}{attention_flags}):
    """Variant {j} of attention."""
    batch, seq, dim = x.shape
    q, k, v = (
        (x @ params[name]).reshape(batch, seq, num_heads, dim // num_heads) for name in "qkv"
    )
{query_key}    logits = jnp.einsum("bthd,bshd->bhts", q, k) / (dim // num_heads) ** 0.5
{logits}    mask = positions[:, :, None] >= positions[:, None, :]
{mask}    weights = jax.nn.softmax(jnp.where(mask[:, None], logits, -1e9))
    y = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, seq, dim)
    return scale * (y @ params["o"])


def feed_forward_{j}(params, x, *, scale={scale}{feed_forward_flags}):
    """Variant {j} of the feed-forward layer."""
    w_in, w_out = params["w_in"], params["w_out"]
    y = jax.nn.{activation}(x @ w_in) @ w_out
{feed_forward}    return scale * y

'''
_LAYER = '''
def layer(params, x, positions, *, variant=0{flags}):
    """Attention and feed-forward of one variant."""
{branches}    return x


def forward(params, ids, positions, *, variant=0{flags}):
    """Returns logits."""
    x = params["embedding"][ids] * {scale}
    x = layer(params, x, positions, variant=variant{passed})
    return norm(x) @ params["embedding"].T
'''
_BRANCH = """
    if variant == {j}:
        x = x + attention_{j}(params, norm(x), positions{attention_passed})
        x = x + feed_forward_{j}(params, norm(x){feed_forward_passed})
"""


@dataclass(frozen=True)
class _Addition:
    """How a feature is written into the flat style."""

    slot: str
    flags: tuple[tuple[str, str], ...]
    body: str


def flat_code_base(
    num_modules: int, num_variants: int, feature: Feature | None = None
) -> dict[str, str]:
    """Returns the files of a flat code base, with a feature if one is given.

    Raises:
        CliError: The feature's flat section is not of the form expected.
    """
    addition = None if feature is None else _addition(feature)
    files = {"modules/__init__.py": ""}
    for i in range(num_modules):
        parts = [_HEAD.lstrip().format(i=i)]
        parts += [_variant(j, addition) for j in range(num_variants)]
        parts.append(_layer(i, num_variants, addition))
        files[f"modules/m{i:02}.py"] = "".join(parts)
    return files


def check_control(before: CodeBase, after: CodeBase, feature: Feature, pair: tuple[int, int]):
    """Checks that the feature works in one module and variant, and is off by default.

    Raises:
        GateError: It does not.
    """
    module, variant = pair
    path = f"modules/m{module:02}.py"
    name, default = _addition(feature).flags[0]
    on = {name: True if default == "False" else 2}
    plain = _run(before.module(path), variant)
    off = _run(after.module(path), variant)
    switched_on = _run(after.module(path), variant, **on)
    if not np.array_equal(plain, off):
        raise GateError(f"flat {feature.name} changes the result although it is off")
    if not np.isfinite(switched_on).all() or np.allclose(switched_on, plain, atol=1e-4):
        raise GateError(f"flat {feature.name} changes nothing although it is on")


def _run(module: Any, variant: int, **flags: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    shapes = {name: (16, 16) for name in "qkvo"}
    shapes |= {"w_in": (16, 32), "w_out": (32, 16), "embedding": (32, 16)}
    params = {n: jnp.asarray(0.3 * rng.standard_normal(s), "float32") for n, s in shapes.items()}
    ids = jnp.asarray(rng.integers(0, 32, (2, 8)))
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    return np.asarray(module.forward(params, ids, positions, variant=variant, **flags))


def _addition(feature: Feature) -> _Addition:
    assert feature.flat is not None
    slot, source = feature.flat
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    if (
        slot not in (*_ATTENTION, *_FEED_FORWARD)
        or not functions
        or not functions[-1].args.kwonlyargs
    ):
        raise CliError(
            f"flat section of feature {feature.name!r}: expected a known slot and a function with "
            f"keyword-only flags, got slot {slot!r}",
            code="AX871",
            where=feature.provider,
            hint=f"slots: {', '.join((*_ATTENTION, *_FEED_FORWARD))}",
        )
    function = functions[-1]
    body = function.body[1:] if ast.get_docstring(function) else function.body
    defaults = [ast.unparse(d) if d is not None else "None" for d in function.args.kw_defaults]
    flags = [arg.arg for arg in function.args.kwonlyargs]
    return _Addition(
        slot,
        tuple(zip(flags, defaults, strict=True)),
        "".join(f"{textwrap.indent(ast.unparse(statement), '    ')}\n" for statement in body),
    )


def _flags(addition: _Addition | None, slots: tuple[str, ...]) -> tuple[str, str]:
    """Returns what signatures and calls of functions with these slots gain."""
    if addition is None or addition.slot not in slots:
        return "", ""
    signature = "".join(f", {name}={default}" for name, default in addition.flags)
    return signature, "".join(f", {name}={name}" for name, _ in addition.flags)


def _variant(j: int, addition: _Addition | None) -> str:
    slots = {slot: "" for slot in (*_ATTENTION, *_FEED_FORWARD)}
    if addition is not None:
        slots[addition.slot] = addition.body
    return _VARIANT.format(
        j=j,
        scale=1 + j / 16,
        activation=_ACTIVATIONS[j % len(_ACTIVATIONS)],
        attention_flags=_flags(addition, _ATTENTION)[0],
        feed_forward_flags=_flags(addition, _FEED_FORWARD)[0],
        **slots,
    )


def _layer(i: int, num_variants: int, addition: _Addition | None) -> str:
    flags, passed = _flags(addition, (*_ATTENTION, *_FEED_FORWARD))
    branches = [
        _BRANCH.lstrip("\n").format(
            j=j,
            attention_passed=_flags(addition, _ATTENTION)[1],
            feed_forward_passed=_flags(addition, _FEED_FORWARD)[1],
        )
        for j in range(num_variants)
    ]
    return _LAYER.format(flags=flags, passed=passed, branches="".join(branches), scale=1 + i / 64)
