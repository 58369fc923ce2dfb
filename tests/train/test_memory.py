"""The compiler's own account of a step's memory falls with what is meant to save it."""

import jax
import pytest

from axcore import experiments
from axcore.parallel import RematModifier, resolve_instance, select_devices
from axcore.remat import Remat
from axcore.train._program import Program

BATCH, SEQ, DIM, LAYERS = 32, 64, 32, 6


def memory(remat="none", accumulation_steps=1, **sets):
    """Returns what a step needs by the compiler, compiled from shapes alone."""
    cfg = experiments.get("tiny-lm").set(max_step=1, batch_size=BATCH, seq_len=SEQ)
    cfg.model.set(model_dim=DIM, max_seq_len=SEQ)
    cfg.model.decoder.num_layers = LAYERS
    cfg.accumulation_steps = accumulation_steps
    for path, value in sets.items():
        cfg.set_path(path.replace("__", "."), value)
    cfg = RematModifier.Config(remat=Remat(remat)).instantiate()(cfg)
    instance = resolve_instance("cpu")
    program = Program(cfg.instantiate(name="trainer"), instance, select_devices(instance))
    ints, floats = (jax.ShapeDtypeStruct((BATCH, SEQ), d) for d in ("int32", "float32"))
    batch = dict.fromkeys(("input_ids", "target_ids", "segment_ids", "positions"), ints)
    batch["target_mask"] = floats
    found = program.compile_train(program.wanted_state(), batch).memory
    assert found is not None
    return found


@pytest.fixture(scope="module")
def plain():
    return memory()


@pytest.mark.slow
@pytest.mark.xdist_group("memory")
def test_recomputing_layers_and_microbatches_lower_the_peak(plain):
    # By hand: the forward pass keeps of each layer at least its six (batch, seq, embed) results of
    # projections and four times as much of the feed-forward layer, in float32.
    kept = LAYERS * 4 * BATCH * SEQ * DIM * (6 + 4)
    full = memory("full")
    assert plain.temporaries - full.temporaries >= 0.8 * kept
    assert full.arguments == plain.arguments
    # A quarter of the rows at a time.
    parts = memory(accumulation_steps=4)
    assert parts.temporaries <= plain.temporaries / 2


@pytest.mark.slow
@pytest.mark.xdist_group("memory")
def test_dtypes_of_parameters_and_state_halve_what_they_take(plain):
    half = memory(model__param_dtype="bfloat16", learner__state_dtype="bfloat16")
    # Parameters and two moments; the batch and counters stay.
    assert half.arguments < 0.55 * plain.arguments
