"""The memory model of a stack that runs as a pipeline, against its schedule."""

import pytest
from models_for_tests import language_model, trainer

from axcore.layers import PipelinedTransformer, RepeatedTransformer
from axcore.parallel import ShardingRules
from axcore.parallel.cost import memory_estimate
from axcore.remat import Remat

SMALL = dict(layers=8, dim=32, heads=8, kv_heads=2, hidden=48, vocab=128)
OVER_STAGES = ShardingRules(activation_rules={"batch": ("pipeline", "data", "fsdp")})


def estimate(stack, mesh, **fields):
    model = language_model(**SMALL)
    model.decoder.stack = stack
    cfg = trainer(model, batch_size=32, seq_len=16).set(**fields)
    return memory_estimate(cfg, mesh, num_devices=4)


@pytest.mark.parametrize(
    ("fields", "busy_share"),
    [
        (dict(num_microbatches=8), 8 / 11),
        (dict(num_microbatches=16), 16 / 19),
        (dict(num_microbatches=8, num_repeats=2), 16 / 19),
    ],
)
@pytest.mark.parametrize("rules", [ShardingRules(), OVER_STAGES], ids=["whole", "over-stages"])
def test_a_stage_keeps_its_layers_of_all_rows_and_those_of_idle_ticks(fields, busy_share, rules):
    alone = estimate(RepeatedTransformer.Config(remat=Remat("full")), {"data": 4})
    stack = PipelinedTransformer.Config(remat=Remat("full"), **fields)
    staged = estimate(stack, {"pipeline": 4}, sharding_rules=rules)
    # A quarter of the layers of all rows instead of all layers of a quarter of the rows.
    assert staged.activations == pytest.approx(alone.activations / busy_share, rel=0.01)


def test_more_microbatches_need_less_room_to_work_in():
    def workspace(num):
        stack = PipelinedTransformer.Config(num_microbatches=num, remat=Remat("full"))
        return estimate(stack, {"pipeline": 4}).workspace

    assert workspace(8) <= workspace(4)
