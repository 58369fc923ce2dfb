"""What only a GPU can tell: kernels against references, their speed, and 20 training steps.

One unattended run of less than five minutes, compilations included, from a checkout; nothing is
installed and no network is used. Needs Python 3.11, JAX with CUDA, numpy, optax and pluggy. What is
absent (jax-triton, tokamax, grain, pytest, jaxtyping, packaging) is done without, and named in the
report; wheels that travel along are used with ``--wheels FOLDER``.

    python plugins/axlearn_gpu/device_check.py --out report.json
    python plugins/axlearn_gpu/device_check.py --dry-run --out report.json   # on a CPU, tiny

Exit codes: 0 all that could run passed; 4 something failed; 5 time ran out before all was run;
77 there is no GPU and nothing was run. The report is written after every kernel and every part;
what hangs is ended, with the report, before five minutes are over.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _checkout import use_checkout, use_wheels
from _device_report import NO_GPU, Check

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("conformance", "speed", "training")
# Seconds that the last step may take over the budget, before the run is ended: 295 in all.
_GRACE = 15.0
OPTIONAL = ("jax_triton", "triton", "tokamax", "grain", "pytest", "jaxtyping", "packaging")
# The Pallas kernel is interpreted in a dry run.
KERNELS = (
    ("attention", "cudnn"),
    ("attention", "pallas_triton"),
    ("grouped_matmul", "pallas_triton"),
    ("rms_norm", "triton"),
    ("add_rms_norm", "triton"),
    ("gated_activation", "triton"),
    ("rotary", "triton"),
    ("linear_cross_entropy", "triton"),
)


# -- kernels -------------------------------------------------------------------------------------


def kernel(check: Check, op: str, implementation: str) -> Callable[..., Any] | str:
    """A kernel's function, or the reason why it cannot run here."""
    from axcore.plugins import host, load_target

    if implementation == "triton":
        from axlearn_gpu.supports import _missing_triton

        if check.dry_run:
            return "compiled Triton code needs a GPU (see test_triton.py)"
        missing = _missing_triton()
        if missing is not None:
            return missing
    if implementation == "cudnn" and check.dry_run:
        return "cuDNN needs a GPU"
    spec = host().kernels.get(f"{op}.{implementation}")
    function = load_target(spec.target, where=spec.name)
    if check.dry_run and implementation == "pallas_triton":
        return functools.partial(function, interpret=True)
    return function


def conformance(check: Check, seconds: float) -> None:
    """Runs core's suite for every kernel, without a test runner."""
    import jax

    # Float32 as float32: the references' products would otherwise be TF32.
    with jax.default_matmul_precision("highest"):
        _conformance(check, time.perf_counter() + min(seconds, check.left()))


def _conformance(check: Check, end: float) -> None:
    from axcore.testing import KernelConformance

    results = check.report["conformance"] = {}
    for op, implementation in KERNELS:
        name = f"{op}.{implementation}"
        function = kernel(check, op, implementation)
        if isinstance(function, str):
            check.not_run(f"conformance of {name}", function)
            continue
        suite = type("Suite", (KernelConformance,), {"function": lambda self, f=function: f})()
        suite.op, suite.implementation = op, implementation
        counts = results[name] = {"passed": 0, "skipped": 0, "failed": 0}
        for what, test in _tests(check, suite):
            if time.perf_counter() > end:
                check.not_run(f"conformance of {name} from {what} on", "the part's time was over")
                break
            _one(check, f"{name} {what}", test, counts)
        if op == "attention":
            _one(check, f"{name} half precision", lambda f=function: _half(check, f), counts)
        check.say(f"{name}: {counts}")
        check.write()


def _half(check: Check, function: Callable[..., Any]) -> None:
    """Results and gradients in bfloat16, at a size with many blocks: cuDNN has no float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from axcore import ops
    from axcore.ops import Causal

    t, n, k, h = (32, 2, 1, 16) if check.dry_run else (1024, 8, 2, 128)
    shapes = {"q": (2, t, n, h), "k": (2, t, k, h), "v": (2, t, k, h), "weights": (2, t, n, h)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = {
        name: jax.random.normal(key, shape, jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def results(f: Callable[..., Any], dtype: Any) -> Any:
        cast = {name: x.astype(dtype) for name, x in arrays.items()}
        weights = cast.pop("weights").astype(jnp.float32)

        def weighted(qkv: dict[str, Any]) -> tuple[Any, Any]:
            out = f(**qkv, mask=Causal(), logit_scale=h**-0.5)
            return jnp.sum(out.astype(jnp.float32) * weights), out

        return jax.jit(jax.value_and_grad(weighted, has_aux=True))(cast)

    (_, got), got_grads = results(function, jnp.bfloat16)
    (_, want), want_grads = results(ops.reference("attention"), jnp.float32)
    for name, a, b in [("result", got, want), *((x, got_grads[x], want_grads[x]) for x in "qkv")]:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = float(np.abs(a - b).max() / np.abs(b).max())
        # bfloat16 keeps 8 bits; probabilities are rounded to it before they meet the values.
        assert error <= 2e-2, f"{name}: relative error {error:.2e} > 2e-2"


def _tests(check: Check, suite: Any) -> list[tuple[str, Callable[[], None]]]:
    """The suite's tests with their arguments, as its own parametrization has them."""
    low = suite.low_precision
    dtypes = (low,) if isinstance(low, str) else tuple(low or ())
    cases = suite.cases()
    if check.dry_run:
        cases, dtypes = cases[1:2], dtypes[:1]
    found: list[tuple[str, Callable[[], None]]] = []
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        if not name.startswith("test_"):
            continue
        wanted = set(inspect.signature(test).parameters)
        for case in cases if "case" in wanted else (None,):
            for dtype in dtypes if "dtype" in wanted else (None,):
                arguments = {"case": case, "dtype": dtype}
                arguments = {n: v for n, v in arguments.items() if n in wanted}
                label = "-".join([name, *(getattr(v, "name", v) for v in arguments.values())])
                found.append((label, functools.partial(test, **arguments)))
    return found


def _one(check: Check, what: str, test: Callable[[], None], counts: dict[str, int]) -> None:
    import pytest

    skipped = pytest.skip.Exception
    try:
        test()
    except skipped:
        counts["skipped"] += 1
    except Exception as error:  # whatever a kernel or a compiler raises is a finding
        counts["failed"] += 1
        check.failed(what, error)
    else:
        counts["passed"] += 1


# -- speed ---------------------------------------------------------------------------------------


def timed(
    call: Callable[..., Any], arguments: tuple[Any, ...], repeats: int
) -> tuple[float, float]:
    """Seconds of the first call, compilation included, and the median of ``repeats`` more."""
    import jax

    samples = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        samples.append(time.perf_counter() - start)
    return samples[0], sorted(samples[1:])[repeats // 2]


def _programs(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function of (floating-point arrays, others) by name, and its gradient by the former."""
    import jax
    import jax.numpy as jnp

    def forward(floats: dict[str, Any], others: dict[str, Any]) -> Any:
        return function(**floats, **others)

    def loss(floats: dict[str, Any], others: dict[str, Any]) -> Any:
        leaves = jax.tree.leaves(forward(floats, others))
        return sum(
            jnp.sum(y.astype(jnp.float32)) for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)
        )

    return jax.jit(forward), jax.jit(jax.grad(loss))


def _calls(check: Check) -> list[tuple[str, str, dict[str, Any], dict[str, Any], tuple[str, ...]]]:
    """(name, op, arrays, static arguments, implementations) of each comparison."""
    import jax
    import jax.numpy as jnp

    from axcore.ops import Causal, SegmentIds, SlidingWindow

    b, t, n, k, h, d, f, v = (4, 4096, 32, 8, 128, 4096, 14336, 128256)
    if check.dry_run:
        b, t, n, k, h, d, f, v = (1, 32, 2, 1, 16, 32, 64, 128)

    def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    qkv = {"q": normal(0, b, t, n, h), "k": normal(1, b, t, k, h), "v": normal(2, b, t, k, h)}
    ids = jnp.broadcast_to(1 + jnp.arange(t, dtype=jnp.int32) // (t // 4), (b, t))
    packed = {**qkv, "q_segment_ids": ids, "kv_segment_ids": ids}
    scale = {"logit_scale": h**-0.5}
    turns = jnp.arange(t, dtype=jnp.float32)[None, :, None] * 0.9 ** jnp.arange(h // 2)
    x, up = normal(3, b, t, d), normal(4, b, t, f)
    hidden = {
        "hidden": x,
        "weight": normal(5, v, d, dtype=jnp.float32),
        "targets": jnp.arange(b * t, dtype=jnp.int32).reshape(b, t) % v,
    }
    # Mixtures: eight experts a token, and loads that differ as those of a trained router do.
    experts, inner = (4, 16) if check.dry_run else (128, 768)
    loads = jnp.bincount(jnp.arange(8 * b * t) ** 2 % 1009 % experts, length=experts)
    sorted_rows = {
        "rows": normal(7, 8 * b * t, d // 2),
        "weights": normal(8, experts, d // 2, inner),
        "group_sizes": loads.astype(jnp.int32),
    }
    all_attention = ("cudnn", "pallas_triton", "xla_gpu")
    own = ("triton", "xla_gpu")
    window = Causal() & SlidingWindow(left=t // 4 - 1)
    return [
        ("causal", "attention", qkv, {"mask": Causal(), **scale}, all_attention),
        ("window", "attention", qkv, {"mask": window, **scale}, all_attention),
        (
            "packed",
            "attention",
            packed,
            {"mask": Causal() & SegmentIds(), **scale},
            all_attention[1:],
        ),
        ("norm", "rms_norm", {"x": x, "scale": normal(6, d)}, {"eps": 1e-6}, own),
        (
            "residual norm",
            "add_rms_norm",
            {"x": x, "residual": x, "scale": normal(6, d)},
            {"eps": 1e-6},
            own,
        ),
        ("swiglu", "gated_activation", {"gate": up, "up": up}, {"activation": "silu"}, own),
        (
            "rotary",
            "rotary",
            {"q": qkv["q"], "k": qkv["k"], "cos": jnp.cos(turns), "sin": jnp.sin(turns)},
            {"pairing": "half"},
            own,
        ),
        ("experts", "grouped_matmul", sorted_rows, {}, ("pallas_triton", "xla_gpu")),
        ("loss", "linear_cross_entropy", hidden, {"layout": "vd"}, own),
    ]


def speed(check: Check, seconds: float) -> None:
    """Times each kernel forward, and forward with backward, against XLA's code and cuDNN."""
    import jax.numpy as jnp

    end = time.perf_counter() + min(seconds, check.left())
    rows = check.report["speed"] = []
    for name, op, arrays, static, implementations in _calls(check):
        floats = {n: a for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        others = {n: a for n, a in arrays.items() if n not in floats}
        for implementation in implementations:
            what = f"speed of {name} by {op}.{implementation}"
            if time.perf_counter() > end:
                check.not_run(what, "the part's time was over")
                continue
            function = kernel(check, op, implementation)
            if isinstance(function, str):
                check.not_run(what, function)
                continue

            forward, both = _programs(functools.partial(function, **static))
            repeats = 2 if check.dry_run else 10
            try:
                first, forward_seconds = timed(forward, (floats, others), repeats)
                second, both_seconds = timed(both, (floats, others), repeats)
            except Exception as error:  # whatever a kernel or a compiler raises is a finding
                check.failed(what, error)
                continue
            row = {
                "call": name,
                "op": op,
                "implementation": implementation,
                "forward_ms": round(1e3 * forward_seconds, 3),
                "forward_and_backward_ms": round(1e3 * both_seconds, 3),
                "compile_seconds": round(first + second, 1),
            }
            rows.append(row)
            check.say(f"{what}: {row['forward_ms']} ms, {row['forward_and_backward_ms']} ms")


# -- training ------------------------------------------------------------------------------------


def training(check: Check, seconds: float) -> None:
    """Trains a model of 1.2 billion parameters for 20 steps on made-up documents."""
    import jax
    import numpy as np

    from axcore import experiments, ops
    from axcore.train import assemble
    from axcore.train._program import Program

    if seconds < (1 if check.dry_run else 45):
        check.not_run("training", "too little time was left")
        return
    steps = 3 if check.dry_run else 20
    cfg = experiments.get("fuji-test-v3" if check.dry_run else "fuji-1B-v3")
    batch, length = (2, 32) if check.dry_run else (4, 4096)
    cfg.set(batch_size=batch, seq_len=length, max_step=steps, mesh_rules=())
    name = "cpu" if check.dry_run else _instance()
    assembled = assemble(cfg, instance=name)
    trainer = assembled.cfg.instantiate(name="trainer")
    program = Program(trainer, assembled.instance, jax.devices()[:1])
    rows = _documents(batch, length, trainer.model.cfg.vocab_size)
    put = program.put(rows)
    state = program.initial_state()
    start = time.perf_counter()
    with ops.record_choices() as choices:
        step = program.compile_train(state, put)
    compile_seconds = time.perf_counter() - start
    check.say(f"compiled the training step in {compile_seconds:.1f} s")
    losses, samples = [], []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = step.call(state, put)
        losses.append(round(float(metrics["loss"]), 4))  # waits for the step
        samples.append(time.perf_counter() - start)
    num = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(state.model))
    seconds_per_step = float(np.median(samples[len(samples) // 2 :]))
    tokens = batch * length
    check.report["training"] = {
        "experiment": "fuji-test-v3" if check.dry_run else "fuji-1B-v3",
        "instance": name,
        "parameters": num,
        "steps": steps,
        "batch_size": batch,
        "seq_len": length,
        "compile_seconds": round(compile_seconds, 1),
        "step_seconds": round(seconds_per_step, 4),
        "tokens_per_second": round(tokens / seconds_per_step),
        "losses": losses,
        "memory_stats": jax.devices()[0].memory_stats(),
        "kernels": sorted({(c.op, c.chosen) for c in choices}),
        "refused": sorted({(r.implementation, r.reason) for c in choices for r in c.refused}),
    }
    check.say(
        f"trained {steps} steps of {seconds_per_step:.3f} s; losses {losses[0]}, {losses[-1]}"
    )
    if not all(np.isfinite(losses)) or losses[-1] > losses[0]:
        check.failed("training", AssertionError(f"the loss of a fixed batch rises: {losses}"))


def _documents(batch: int, length: int, vocab_size: int) -> dict[str, Any]:
    """Rows of four packed documents of random tokens, as the input pipeline makes them."""
    import numpy as np

    random = np.random.default_rng(0)
    tokens = random.integers(0, vocab_size, (batch, length + 1), dtype=np.int32)
    place = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
    document = length // 4
    return {
        "input_ids": tokens[:, :-1].copy(),
        "target_ids": tokens[:, 1:].copy(),
        "segment_ids": 1 + place // document,
        "positions": place % document,
        "target_mask": np.ones((batch, length), bool),
    }


def _instance() -> str:
    """One GPU of the kind that is here; of an unknown kind, one with the same capability."""
    import jax

    from axlearn_gpu._gpus import GPUS
    from axlearn_gpu._target import SILICON

    device = jax.devices()[0]
    for gpu in GPUS.values():
        if device.device_kind.startswith(gpu.device_kind):
            return f"gpu-{gpu.name}-1"
    have = tuple(int(n) for n in str(device.compute_capability).split("."))
    near = [name for name, silicon in SILICON.items() if silicon.capability <= have]
    return f"gpu-{near[-1] if near else 'a100-40'}-1"


# -- the run -------------------------------------------------------------------------------------


def environment(check: Check) -> None:
    """Records what the figures hold for."""
    import jax

    device = jax.devices()[0]
    check.report["environment"] = {
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "devices": jax.device_count(),
        "present": [name for name in OPTIONAL if _present(name)],
        "absent": [name for name in OPTIONAL if not _present(name)],
    }
    for name in check.report["environment"]["absent"]:
        check.not_run(f"what needs {name}", "it is not installed")


def _present(name: str) -> bool:
    module = sys.modules.get(name)
    if module is not None and (module.__spec__ is None or module.__spec__.name != name):
        return False  # our own replacement, or an installer's copy
    return importlib.util.find_spec(name) is not None


def main(argv: list[str] | None = None) -> int:
    """Runs the check; see the module's docstring for exit codes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    parser.add_argument("--seconds", type=float, default=280.0, help="budget of the whole run")
    parser.add_argument("--part", choices=PARTS, action="append", help="only these parts")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument(
        "--wheels", type=Path, help="folder of pure Python wheels, for what is not installed"
    )
    arguments = parser.parse_args(argv)
    check = Check(arguments.out, arguments.seconds, arguments.dry_run)
    if arguments.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if arguments.wheels is not None:
        check.report["wheels"] = use_wheels(arguments.wheels)
    use_checkout(ROOT)
    import jax

    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        platform = f"none ({error})"
    if platform != "gpu" and not arguments.dry_run:
        for part in PARTS:
            check.not_run(part, f"there is no GPU here: JAX's platform is {platform}")
        check.write()
        check.say("no GPU, nothing was run; --dry-run tries the script itself on a CPU")
        return NO_GPU
    check.watch(arguments.seconds + _GRACE)
    environment(check)
    check.write()
    # Speed and training keep their share even where the suites compile for long.
    shares = {"conformance": 0.4, "speed": 0.55, "training": 1.0}
    parts = {"conformance": conformance, "speed": speed, "training": training}
    for name in arguments.part or PARTS:
        check.say(f"--- {name}")
        try:
            parts[name](check, shares[name] * check.left())
        except Exception as error:  # the other parts have something to tell all the same
            check.failed(name, error)
        check.write()
    code = check.code()
    check.report["exit_code"] = code
    check.write()
    check.say(f"{len(check.report['failures'])} failures; report: {check.out}; exit code {code}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
