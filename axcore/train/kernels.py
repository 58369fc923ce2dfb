"""Which kernels a program would run on a machine that need not be here, and why not others.

The program is traced from shapes: no compiler, no device, no data. What a kernel computes is not
traced either; the reference stands in for it, so that explaining needs nothing but what
selection needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.context import functional
from axcore.errors import AotError, OpError, PluginError
from axcore.layers import init_cache, merge_state
from axcore.parallel.aot import compiler_for
from axcore.plugins import Instance, host
from axcore.train._program import Program

if TYPE_CHECKING:
    from axcore.train.assemble import Assembled
    from axcore.train.trainer import Trainer

__all__ = ["PURPOSES", "explain_kernels"]

Purpose = Literal["train", "prefill", "decode"]
PURPOSES: tuple[Purpose, ...] = ("train", "prefill", "decode")


def explain_kernels(assembled: Assembled, *, purpose: Purpose = "train") -> list[ops.KernelChoice]:
    """Traces a program of an experiment and returns each site's choice, in order.

    Args:
        assembled: The experiment on its machine; see :func:`axcore.train.assemble`.
        purpose: The training step; or the model's ``prefill`` or ``decode``, of a batch of the
            config's size and sequence length.

    Returns:
        The choices; a site that is traced several times, or in several scanned layers, once.

    Raises:
        OpError: No acceptable kernel serves a site, or there is none of a given name.
        AxcoreError: The config does not fit the machine.
    """
    cfg, instance = assembled.cfg, assembled.instance
    host().check_required(cfg.required_plugins)
    trainer = cfg.instantiate(name="trainer")
    program = Program(trainer, instance, None, stand_ins=_stand_ins(cfg, instance))
    rows = trainer.cfg.input.instantiate().example()
    batch = program.wanted_batch(rows)
    with ops.record_choices() as choices:
        if purpose == "train":
            program.trace_train(batch)
        else:
            _trace_serving(program, purpose, cfg.batch_size, _length(batch))
    return _distinct(choices)


def _stand_ins(cfg: Trainer.Config, instance: Instance) -> dict[str, str]:
    """The reference for each kernel that the config names and that can be had here.

    What cannot be imported is left to selection, which says so; unless the machine's compiler
    declares a stand-in, because its vendor's packages are not expected to be here.
    """
    stand_ins: dict[str, str] = {}
    with contextlib.suppress(AotError):
        declared = compiler_for(instance).stand_ins
        stand_ins.update({f"{op}.{name}": to for (op, name), (to, _) in declared.items()})
    forced = {getattr(node, "kernel", None) for _, node in cfg.walk() if "kernel" in node.fields()}
    kernels = host().kernels
    for spec in kernels.specs():
        rule = cfg.ops.get(spec.op)
        named = spec.implementation in forced or (
            rule is not None and spec.implementation in rule.implementations
        )
        # One that communicates may choose others for what is left of its work.
        if not named or spec.communicates or spec.implementation == ops.REFERENCE:
            continue
        with contextlib.suppress(PluginError):
            kernels.load(spec.name)
            stand_ins[spec.name] = ops.REFERENCE
    return stand_ins


def _length(batch: Any) -> int:
    """Positions of a row."""
    return next(x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1)


def _trace_serving(program: Program, purpose: Purpose, rows: int, length: int) -> None:
    """Traces the model's ``prefill`` of whole rows, or the ``decode`` of one token each."""
    model = program.trainer.model
    if not hasattr(model, purpose):
        raise OpError(
            f"the model ({type(model).__name__}) has no {purpose}",
            code="AX416",
            hint="encoders and classifiers make no text: explain their training step",
        )
    shape = (rows, length if purpose == "prefill" else 1)

    def serve(state: Any, ids: jax.Array, positions: jax.Array) -> Any:
        return functional(
            model,
            state=merge_state(state, init_cache(model, rows, length)),
            inputs=(ids, positions),
            is_training=False,
            method=purpose,
            target=program.target,
        )[0]

    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    jax.eval_shape(serve, program.abstract.model, ids, ids)


def _distinct(choices: Sequence[ops.KernelChoice]) -> list[ops.KernelChoice]:
    """The choices without repetitions of a site's call: of other passes and microbatches."""
    found: dict[Any, ops.KernelChoice] = {}
    for choice in choices:
        found.setdefault((choice.site, choice.op, choice.chosen, choice.refused), choice)
    return list(found.values())
