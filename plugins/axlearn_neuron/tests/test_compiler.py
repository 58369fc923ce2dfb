"""What stands for Trainium's compiler: none, and it says so."""

import pytest

from axcore.errors import AotError
from axcore.parallel import resolve_instance
from axcore.parallel.aot import compiler_for


def test_there_is_none_and_every_report_says_what_is_needed():
    instance = resolve_instance("neuron-trn2.48xlarge-64")
    compiler = compiler_for(instance)
    assert not compiler.compiles
    assert "neuronx-cc" in " ".join(compiler.blind_spots)
    with pytest.raises(AotError, match="no compiler for Trainium") as caught:
        compiler.devices(instance)
    assert caught.value.code == "AX480" and "README.md" in (caught.value.hint or "")


def test_the_runtime_keeps_a_part_of_the_memory():
    instance = resolve_instance("neuron-trn1.32xlarge-1")
    assert compiler_for(instance).memory_limit_bytes(instance) == 15 * 2**30
