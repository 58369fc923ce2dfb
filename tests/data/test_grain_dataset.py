"""grain datasets as sources, and our sources as grain data sources."""

from __future__ import annotations

import grain
import pytest

from axcore.config import config_for
from axcore.data import GrainDataset, PythonReference, TextInput
from axcore.errors import DataError


def make_dataset(count: int, form: str = "text") -> grain.MapDataset:
    """A grain dataset of ``count`` texts in one of several forms."""
    forms = {
        "text": lambda i: f"document {i} ü",
        "bytes": lambda i: f"document {i} ü".encode(),
        "mapping": lambda i: {"body": f"document {i} ü", "n": i},
        "number": lambda i: i,
        "latin1": lambda i: "ü".encode("latin1"),
    }
    return grain.MapDataset.range(count).map(forms[form])


def make_iter_dataset() -> grain.IterDataset:
    """A dataset without random access."""
    return make_dataset(3).to_iter_dataset()


def make_filtered() -> grain.MapDataset:
    """A dataset from which every second element was filtered."""
    return grain.MapDataset.range(20).filter(lambda i: i % 2 == 0).map(str)


def _source(form: str, **fields) -> GrainDataset:
    dataset = config_for(make_dataset, count=12, form=form)
    return GrainDataset.Config(dataset=dataset, **fields).instantiate()


@pytest.mark.parametrize(
    ("form", "fields"), [("text", {}), ("bytes", {}), ("mapping", {"field": "body"})]
)
def test_elements_are_documents(form, fields):
    source = _source(form, **fields)
    assert [d.text for d in source] == [f"document {i} ü" for i in range(12)]
    assert source[3].id == "grain#3"


def test_a_grain_dataset_can_be_trained_on():
    source = GrainDataset.Config(dataset=config_for(make_dataset, count=12))
    cfg = TextInput.Config(source=source, batch_size=2, seq_len=8, seed=0, prefetch=0)
    assert next(cfg.instantiate().iterator())["target_mask"].all()


def test_filtered_elements_are_passed_over():
    source = GrainDataset.Config(dataset=config_for(make_filtered)).instantiate()
    assert [d.text for d in source if d.text] == [str(i) for i in range(0, 20, 2)]


@pytest.mark.parametrize(
    ("form", "code"), [("mapping", "AX507"), ("number", "AX503"), ("latin1", "AX503")]
)
def test_elements_without_text_are_an_error(form, code):
    with pytest.raises(DataError) as caught:
        _source(form).prepare()
    assert caught.value.code == code and caught.value.hint


def test_a_dataset_without_random_access_is_an_error():
    with pytest.raises(DataError, match="expected a grain MapDataset"):
        GrainDataset.Config(dataset=config_for(make_iter_dataset)).instantiate().prepare()


def test_a_dataset_without_elements_is_an_error():
    cfg = GrainDataset.Config(dataset=config_for(make_dataset, count=0))
    with pytest.raises(DataError, match="no elements"):
        cfg.instantiate().prepare()


def test_sources_are_grain_data_sources():
    source = PythonReference.Config().instantiate()
    dataset = grain.MapDataset.source(source).map(lambda d: d.id)
    assert list(dataset) == [d.id for d in source]
