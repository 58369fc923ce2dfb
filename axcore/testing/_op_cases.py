"""Small calls of each op, for the kernel suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.ops import masks

__all__ = ["NOT_DIFFERENTIABLE", "KernelCase", "default_cases", "known_ops"]

#: Ops without a gradient, whoever serves them.
NOT_DIFFERENTIABLE = ("paged_attention",)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KernelCase:
    """One call of an op.

    Attributes:
        name: Shown by pytest.
        shapes: Argument name -> shape of a standard normal float32 array.
        static: Further keyword arguments.
        given: Makes the other arrays, such as integer ones.
        seed: Of the random arrays.
    """

    name: str
    shapes: Shapes
    static: Mapping[str, Any] = field(default_factory=dict[str, Any])
    given: Callable[[], dict[str, Any]] = dict
    seed: int = 0

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the array arguments."""
        generator = np.random.default_rng(self.seed)  # JAX's would be compiled for each shape
        random = {
            name: jnp.asarray(generator.standard_normal(shape, np.float32))
            for name, shape in self.shapes.items()
        }
        return random | {name: jnp.asarray(value) for name, value in self.given().items()}


def _attention() -> list[KernelCase]:
    def qkv(t: int, heads: int, kv_heads: int) -> Shapes:
        kv = (2, t, kv_heads, 16)
        return {"q": (2, t, heads, 16), "k": kv, "v": kv}

    def segments() -> dict[str, Any]:
        ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 2, 2]], jnp.int32)
        return {"q_segment_ids": ids, "kv_segment_ids": ids}

    def prefix() -> dict[str, Any]:
        return {"prefix_lengths": jnp.array([3, 5], jnp.int32)}

    scale = {"logit_scale": 0.25}
    causal = masks.Causal()
    return [
        KernelCase("full", qkv(8, 4, 4), {"mask": masks.Full(), **scale}),
        KernelCase("causal", qkv(8, 4, 4), {"mask": causal, **scale}),
        KernelCase("grouped-query", qkv(8, 4, 2), {"mask": causal, **scale}),
        KernelCase("multi-query", qkv(8, 4, 1), {"mask": causal, **scale}),
        KernelCase("odd-length", qkv(7, 4, 2), {"mask": causal, **scale}),
        KernelCase("logit-cap", qkv(8, 4, 4), {"mask": causal, "logit_cap": 2.0, **scale}),
        KernelCase("window", qkv(8, 4, 4), {"mask": causal & masks.SlidingWindow(left=2), **scale}),
        KernelCase(
            "window-both-sides",
            qkv(8, 4, 2),
            {"mask": masks.SlidingWindow(left=2, right=1), **scale},
        ),
        KernelCase("fixed-prefix", qkv(8, 4, 2), {"mask": masks.PrefixLM(3), **scale}),
        KernelCase("sinks", {**qkv(8, 4, 2), "sinks": (4,)}, {"mask": causal, **scale}),
        KernelCase("prefix", qkv(8, 4, 2), {"mask": masks.PrefixLM(), **scale}, prefix),
        KernelCase(
            "segments", qkv(8, 4, 2), {"mask": causal & masks.SegmentIds(), **scale}, segments
        ),
        KernelCase(
            "packed-window",
            qkv(8, 4, 2),
            {"mask": causal & masks.SlidingWindow(left=1) & masks.SegmentIds(), **scale},
            segments,
        ),
    ]


def _grouped_matmul() -> list[KernelCase]:
    shapes = {"rows": (12, 16), "weights": (3, 16, 8)}

    def sizes(*values: int) -> Callable[[], dict[str, Any]]:
        return lambda: {"group_sizes": jnp.array(values, jnp.int32)}

    return [
        KernelCase("even", shapes, given=sizes(4, 4, 4)),
        KernelCase("an-empty-group", shapes, given=sizes(5, 0, 7)),
        KernelCase("rows-left-over", shapes, given=sizes(3, 1, 2)),
    ]


def _linear_cross_entropy() -> list[KernelCase]:
    def targets() -> dict[str, Any]:
        return {"targets": jnp.arange(10, dtype=jnp.int32).reshape(2, 5) * 7 % 32}

    def masked() -> dict[str, Any]:
        mask = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
        return {**targets(), "mask": mask}

    vd = {"hidden": (2, 5, 16), "weight": (32, 16)}
    dv = {"hidden": (2, 5, 16), "weight": (16, 32)}
    return [
        KernelCase("vd", vd, {"layout": "vd"}, targets),
        KernelCase("dv", dv, {"layout": "dv"}, targets),
        KernelCase("masked", vd, {"layout": "vd"}, masked),
        KernelCase("logit-cap", vd, {"layout": "vd", "logit_cap": 5.0}, targets),
    ]


def _rotary() -> list[KernelCase]:
    def angles(batch: int, num: int) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            positions = jnp.arange(5, dtype=jnp.float32) + 3 * jnp.arange(batch)[:, None]
            turns = positions[:, :, None] * 0.7 ** jnp.arange(num)
            return {"cos": jnp.cos(turns), "sin": jnp.sin(turns)}

        return make

    qk = {"q": (2, 5, 4, 16), "k": (2, 5, 2, 16)}
    return [
        KernelCase("half", qk, {"pairing": "half"}, angles(2, 8)),
        KernelCase("interleaved", qk, {"pairing": "interleaved"}, angles(2, 8)),
        KernelCase("partial", qk, {"pairing": "half"}, angles(2, 4)),
        KernelCase("partial-interleaved", qk, {"pairing": "interleaved"}, angles(2, 2)),
        KernelCase("one-row-of-angles", qk, {"pairing": "half"}, angles(1, 8)),
    ]


def _paged_attention() -> list[KernelCase]:
    def shapes(heads: int, kv_heads: int) -> Shapes:
        pages = (kv_heads, 16, 4, 16)
        return {"q": (3, heads, 16), "k_pages": pages, "v_pages": pages}

    def rows(*lengths: int) -> Callable[[], dict[str, Any]]:
        table = jnp.arange(15, dtype=jnp.int32).reshape(3, 5) * 7 % 16  # no page twice
        return lambda: {"lengths": jnp.array(lengths, jnp.int32), "page_table": table}

    def sinks() -> dict[str, Any]:
        return {**rows(4, 7, 20)(), "sinks": jnp.linspace(-1.0, 1.0, 4)}

    plain: dict[str, Any] = {"logit_scale": 0.25, "logit_cap": None, "window": None}
    return [
        KernelCase("multi-head", shapes(4, 4), plain, rows(1, 7, 20)),
        KernelCase("grouped-query", shapes(4, 2), plain, rows(4, 8, 13)),
        KernelCase("multi-query", shapes(4, 1), plain, rows(4, 8, 13)),
        KernelCase("an-empty-row", shapes(4, 2), plain, rows(0, 7, 20)),
        KernelCase("logit-cap", shapes(4, 2), {**plain, "logit_cap": 2.0}, rows(1, 7, 20)),
        KernelCase("window", shapes(4, 2), {**plain, "window": 5}, rows(1, 7, 20)),
        KernelCase("sinks", shapes(4, 2), plain, sinks),
    ]


def _cases() -> dict[str, Callable[[], list[KernelCase]]]:
    x, vector, gates = (2, 5, 32), (32,), {"gate": (2, 5, 32), "up": (2, 5, 32)}
    return {
        "attention": _attention,
        "rms_norm": lambda: [
            KernelCase("scaled", {"x": x, "scale": vector}, {"eps": 1e-6}),
            KernelCase("large-eps", {"x": x, "scale": vector}, {"eps": 1e-1}),
            KernelCase("unscaled", {"x": x}, {"eps": 1e-6}),
            KernelCase("two-dims", {"x": (7, 32), "scale": vector}, {"eps": 1e-6}),
            KernelCase("heads", {"x": (2, 5, 4, 32), "scale": vector}, {"eps": 1e-6}),
        ],
        "add_rms_norm": lambda: [
            KernelCase("scaled", {"x": x, "residual": x, "scale": vector}, {"eps": 1e-6}),
            KernelCase("unscaled", {"x": x, "residual": x}, {"eps": 1e-6}),
            KernelCase(
                "two-dims", {"x": (7, 32), "residual": (7, 32), "scale": vector}, {"eps": 1e-6}
            ),
        ],
        "layer_norm": lambda: [
            KernelCase("affine", {"x": x, "scale": vector, "bias": vector}, {"eps": 1e-5}),
            KernelCase("scaled", {"x": x, "scale": vector}, {"eps": 1e-5}),
            KernelCase("plain", {"x": x}, {"eps": 1e-5}),
        ],
        "gated_activation": lambda: [
            KernelCase(name, gates, {"activation": name}) for name in ("silu", "gelu_tanh", "relu")
        ],
        "linear_cross_entropy": _linear_cross_entropy,
        "grouped_matmul": _grouped_matmul,
        "rotary": _rotary,
        "all_gather_matmul": lambda: [
            KernelCase("plain", {"x": (2, 6, 16), "weight": (16, 8)}, {"over": ()})
        ],
        "matmul_reduce_scatter": lambda: [
            KernelCase("plain", {"x": (2, 6, 16), "weight": (16, 8)}, {"over": ()})
        ],
        "paged_attention": _paged_attention,
    }


def default_cases(op: str) -> list[KernelCase]:
    """Returns small calls of ``op``; fails for an op that has none.

    Args:
        op: The op's name.
    """
    cases = _cases()
    if op not in cases:
        pytest.fail(f"no cases for op {op!r}; override cases(). Known: {', '.join(cases)}")
    return cases[op]()


def known_ops() -> tuple[str, ...]:
    """Returns the ops that have cases."""
    return tuple(_cases())
