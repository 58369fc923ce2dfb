"""The held-out pass: complete, fixed, countable."""

from __future__ import annotations

import numpy as np
import pytest

from axcore.data import bits_per_byte, reference_bits_per_byte
from axcore.errors import DataError


def test_every_held_out_token_is_a_target_once(make_input, corpus):
    held = make_input(corpus, heldout_fraction=0.4).heldout()
    targets = np.concatenate([b["target_ids"][b["target_mask"]] for b in held])
    texts = [d.text for d in held.documents()]
    assert bytes(t for t in targets.tolist() if t < 256).decode() == "".join(texts)
    assert held.num_targets == len(targets) == sum(len(t) + 1 for t in texts)


def test_number_of_bytes_is_that_of_the_utf8_text(make_input):
    texts = ["naïve", "日本語", "plain", "😀"]
    held = make_input(texts, heldout_fraction=0.5).heldout()
    assert held.num_bytes == sum(len(d.text.encode()) for d in held.documents())


def test_a_uniform_model_over_bytes_and_end_comes_out_as_expected(make_input, corpus):
    held = make_input(corpus, heldout_fraction=0.4).heldout()
    nats = held.num_targets * np.log(257)
    expected = np.log2(257) * held.num_targets / held.num_bytes
    assert bits_per_byte(nats, held.num_bytes) == pytest.approx(expected)


def test_two_passes_are_equal_and_their_number_is_known(make_input, corpus):
    held = make_input(corpus, heldout_fraction=0.4).heldout()
    first, second = list(held), list(held)
    assert len(first) == len(second) == len(held)
    for a, b in zip(first, second, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_only_the_last_batch_is_padded_and_padding_is_masked(make_input, corpus):
    *full, last = list(make_input(corpus, heldout_fraction=0.4).heldout())
    assert all(b["target_mask"].all() for b in full)
    assert not last["target_mask"].all()
    assert ((last["segment_ids"] > 0) == last["target_mask"]).all()
    assert last["input_ids"].shape == (4, 16)


def test_processes_see_their_rows_of_the_same_batches(make_input, corpus):
    whole = list(make_input(corpus).heldout())
    parts = [list(make_input(corpus).heldout(rows)) for rows in ([0, 1], [2, 3])]
    for i, batch in enumerate(whole):
        for name in batch:
            joined = np.concatenate([p[i][name] for p in parts])
            np.testing.assert_array_equal(joined, batch[name])


def test_the_pass_can_be_limited_to_some_documents(make_input, corpus):
    held = make_input(corpus, heldout_fraction=0.4).heldout(max_documents=2)
    assert held.num_documents == 2
    assert held.num_targets == sum(b["target_mask"].sum() for b in held)


def test_evaluating_without_held_out_documents_is_an_error(make_input, corpus):
    with pytest.raises(DataError, match="nothing to evaluate"):
        make_input(corpus, heldout_fraction=0.0).heldout()


def test_one_document_cannot_be_split(make_input):
    with pytest.raises(DataError, match="too few") as caught:
        make_input(["only one"]).prepare()
    assert "paragraph" in (caught.value.hint or "")


def test_xz_reference_is_that_of_the_library_at_its_strongest(corpus):
    import lzma

    text = "\n\n".join(corpus * 30).encode()
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    assert reference_bits_per_byte(corpus * 30) == pytest.approx(
        len(packed) * 8 / len(text), rel=0.02
    )


def test_xz_reference_of_nothing_is_nan():
    assert np.isnan(reference_bits_per_byte([]))


def test_xz_reference_of_random_bytes_is_about_eight_bits():
    noise = np.random.default_rng(0).bytes(50_000)
    assert reference_bits_per_byte([noise]) == pytest.approx(8, abs=0.05)
