"""Clauses of the contract that belong to no single file: contexts, scopes, names, agreement."""

from __future__ import annotations

import asyncio
import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import Module, current_context, functional, transforms
from axcore.errors import ModuleError
from axcore.layers import Attention, CausalLM, Decoder, LearnedPositions, TransformerLayer
from axcore.layers.roles import SequenceInfo
from axcore.testing import run_processes

PUBLIC = {
    "axcore": "Config Required REQUIRED Dim scaled config_for partial_for Modifier Module Layer "
    "ParameterSpec InvocationContext current_context functional experiments",
    "axcore.layers": "Linear Embedding RMSNorm LayerNorm Dropout Attention FeedForward "
    "TransformerLayer StackedTransformer RepeatedTransformer Decoder CausalLM",
    "axcore.train": "Trainer Learner Evaler",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_those_of_the_contract(package):
    module = importlib.import_module(package)
    missing = [name for name in PUBLIC[package].split() if not hasattr(module, name)]
    assert not missing


# -- contexts -----------------------------------------------------------------------------------


def module_of(fn):
    """Returns a module whose forward is ``fn(ctx, *args)``."""

    class Probe(Module):
        def forward(self, *args):
            return fn(current_context(), *args)

    return Probe.Config().instantiate(name="m")


USES = {
    "summary": lambda ctx, x: ctx.add_summary("seen", x),
    "loss": lambda ctx, x: ctx.add_loss("seen", x),
    "output": lambda ctx, x: ctx.add_output("seen", x),
    "state": lambda ctx, x: ctx.set_state("seen", x),
    "key": lambda ctx, x: ctx.key(),
}


@pytest.mark.parametrize("use", USES)
def test_contexts_outside_of_a_transform_are_read_only_inside(use):
    def forward(outer):
        def body(carry, x):
            USES[use](outer, x)
            return carry, x

        transforms.scan(body, 0.0, jnp.arange(3.0))

    with pytest.raises(ModuleError, match="outer contexts are read-only inside a transform"):
        functional(
            module_of(forward),
            state={"seen": jnp.zeros(())},
            inputs=(),
            is_training=True,
            key=jax.random.key(0),
        )


def test_contexts_outside_of_a_transform_can_be_read_inside():
    def forward(outer):
        def body(carry, x):
            return carry + outer.state["step"] * x, None

        return transforms.scan(body, jnp.zeros(()), jnp.arange(3.0))[0]

    state = {"step": jnp.asarray(2.0)}
    total, _ = functional(module_of(forward), state=state, inputs=(), is_training=False)
    assert total == 6.0  # 2 * (0 + 1 + 2)


def test_async_tasks_do_not_share_a_context():
    seen = []

    def forward(ctx, number):
        seen.append((number, current_context() is ctx))
        return number

    async def task(number):
        for _ in range(3):
            assert current_context() is None
            functional(module_of(forward), state={}, inputs=(number,), is_training=False)
            await asyncio.sleep(0)  # lets the others run

    async def main():
        await asyncio.gather(*(task(i) for i in range(3)))

    asyncio.run(main())
    assert [number for number, _ in seen] == [0, 1, 2] * 3
    assert all(own for _, own in seen)


def test_every_module_call_is_a_named_scope_of_its_path():
    model = CausalLM.Config(
        vocab_size=32,
        model_dim=8,
        max_seq_len=4,
        decoder=Decoder.Config(
            num_layers=2,
            layer=TransformerLayer.Config(attention=Attention.Config(num_heads=2)),
        ),
    ).instantiate(name="m")
    ids = np.zeros((1, 4), np.int32)
    state = jax.eval_shape(model.initialize, jax.random.key(0))
    program = jax.jit(
        lambda p: functional(model, state=p, inputs=(ids, ids), is_training=True)[1]
    ).lower(state)
    names = re.findall(r'op_name="([^"]+)"', program.compile().as_text())
    # A scan stands between a stack and its layers in the compiler's names.
    for parts in (
        ("/embedding/",),
        ("/position/",),
        ("/decoder/layer/", "/0:2:1/attention/qkv/query/"),
        ("/decoder/layer/", "/0:2:1/feed_forward/up/"),
        ("/decoder/final_norm/",),
    ):
        assert any(all(part in name for part in parts) for name in names), parts


def test_learned_positions_are_looked_up_by_position():
    positions = LearnedPositions.Config(input_dim=3, max_seq_len=5).instantiate(name="m")
    state = positions.initialize(jax.random.key(0))
    where = jnp.asarray([[0, 1, 0, 1], [4, 3, 2, 1]], jnp.int32)  # two packed documents, and down
    x = jnp.arange(24.0).reshape(2, 4, 3)
    got, _ = functional(
        positions, state=state, inputs=(x, SequenceInfo(positions=where)), is_training=False
    )
    table = np.asarray(state["weight"])
    np.testing.assert_allclose(got, np.asarray(x) + table[np.asarray(where)], rtol=1e-6)


# -- processes ----------------------------------------------------------------------------------

AGREE = """
import json, os, signal
from axcore.train._signals import GracefulStop

answers = []
with GracefulStop() as stop:
    for step in range(4):
        if process == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        answers.append(stop.agreed())
print(json.dumps(answers))
"""


@pytest.mark.timeout(240)
def test_processes_agree_on_the_step_at_which_a_signal_to_one_stops_all():
    other, signalled = run_processes(AGREE, num_processes=2, instance="cpu-2")
    assert signalled == [None, None, "SIGTERM", "SIGTERM"]
    assert [answer is not None for answer in other] == [False, False, True, True]


# -- workflows ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
WORKFLOWS = [
    *(ROOT / ".github" / "workflows").glob("*.yml"),
    ROOT / "axcore/cli/_plugin_template/github/workflows/test.yml.in",
]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_job_asks_for_its_matrix_in_its_condition(path):
    """GitHub evaluates a job's ``if`` before its matrix and refuses the whole file."""
    jobs = path.read_text().partition("\njobs:\n")[2]
    conditions = re.findall(r"^ {4}if: (.*)$", jobs, flags=re.MULTILINE)
    assert jobs and not [text for text in conditions if "matrix" in text]
