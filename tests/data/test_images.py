"""Images as batches of a classifier: exact resumption, held-out pass, sources."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from axcore.data import DrawnNumbers, ImageInput, NpzImages, merge_states
from axcore.errors import DataError


def make_input(**fields) -> ImageInput:
    source = DrawnNumbers.Config(num_images=50)
    settings = dict(source=source, batch_size=4, seq_len=1, seed=0, prefetch=0) | fields
    return ImageInput.Config(**settings).instantiate()


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(iterator, count))


def same(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_resumed_run_sees_the_images_of_an_uninterrupted_one():
    with make_input(prefetch=2).iterator() as iterator:
        whole = take(iterator, 30)  # past the end of an epoch
    with make_input(prefetch=2).iterator() as iterator:
        take(iterator, 13)
        saved = iterator.state()
    with make_input().iterator() as again:
        again.restore(saved)
        same(take(again, 17), whole[13:])


def test_rows_are_the_same_on_any_number_of_processes():
    inputs = make_input()
    whole = take(inputs.iterator(), 3)
    parts = [inputs.iterator(rows) for rows in ((2, 0), (1, 3))]
    for rows, iterator in zip(([2, 0], [1, 3]), parts, strict=True):
        same(take(iterator, 3), [{n: a[rows] for n, a in batch.items()} for batch in whole])
    again = inputs.iterator()
    again.restore(merge_states([part.state() for part in parts]))
    same(take(again, 1), take(inputs.iterator(), 4)[3:])


def test_an_epoch_shows_every_image_once_and_none_that_is_held_out():
    inputs = make_input(batch_size=1)
    described = inputs.describe()
    num_train, num_heldout = described["train_images"], described["heldout_images"]
    assert num_train + num_heldout == 50
    epoch = take(inputs.iterator(), num_train)
    shown = {batch["images"].tobytes() for batch in epoch}
    held = {batch["images"].tobytes() for batch in inputs.heldout()}
    assert (len(shown), len(held)) == (num_train, num_heldout)
    assert not shown & held


def test_the_heldout_pass_is_filled_up_with_rows_that_do_not_count():
    inputs = make_input(heldout_fraction=0.2)
    heldout = inputs.heldout()
    batches = list(heldout)
    assert len(batches) == len(heldout)
    counted = sum(int(batch["label_mask"].sum()) for batch in batches)
    assert counted == inputs.describe()["heldout_images"]
    assert all(batch["images"].shape == (4, 16, 16, 1) for batch in batches)
    same(list(inputs.heldout([1])), [{n: a[[1]] for n, a in b.items()} for b in batches])
    assert heldout.num_bytes is None


def test_pixels_are_shifted_and_scaled_by_channel():
    source = DrawnNumbers.Config(num_channels=3, num_images=20)
    plain = make_input(source=source, mean=(0.0,), stddev=(1.0,))
    scaled = make_input(source=source, mean=(0.5, 0.4, 0.3), stddev=(0.5, 0.25, 1.0))
    (x,), (y,) = take(plain.iterator(), 1), take(scaled.iterator(), 1)
    assert x["images"].dtype == np.float32
    assert 0 <= x["images"].min() < x["images"].max() <= 1
    expected = (x["images"] - [0.5, 0.4, 0.3]) / [0.5, 0.25, 1.0]
    np.testing.assert_allclose(y["images"], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(DataError, match="channel"):
        next(make_input(source=source, mean=(0.5, 0.5)).iterator())


def test_a_position_of_other_images_is_refused():
    saved = make_input().iterator().state()
    with pytest.raises(DataError, match="source") as caught:
        make_input(source=DrawnNumbers.Config(num_images=51)).iterator().restore(saved)
    assert caught.value.code == "AX510"


# -- sources ---------------------------------------------------------------------------------------


def test_drawn_numbers_can_be_told_apart():
    """By the nearest mean of their class alone, on images that the means have not seen."""
    source = DrawnNumbers.Config(num_images=600).instantiate()
    images = np.stack([source[i][0] for i in range(600)]).reshape(600, -1).astype(np.float64)
    labels = np.array([source[i][1] for i in range(600)])
    assert set(labels.tolist()) == set(range(10))
    means = np.stack([images[:400][labels[:400] == c].mean(0) for c in range(10)])
    distance = ((images[400:, None] - means) ** 2).sum(-1)
    assert (distance.argmin(1) == labels[400:]).mean() > 0.3  # a tenth by chance


@pytest.mark.parametrize(("size", "classes"), [(8, 10), (16, 100), (32, 1000), (224, 1000)])
def test_numbers_of_every_size_are_drawn(size, classes):
    cfg = DrawnNumbers.Config(image_size=size, num_classes=classes, num_channels=3, num_images=40)
    source = cfg.instantiate()
    image, label = source[39]
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8
    assert 0 <= label < classes
    assert (image > 150).any()
    assert (image < 100).any()


def test_an_image_too_small_for_its_number_is_refused():
    with pytest.raises(DataError, match="too small"):
        DrawnNumbers.Config(image_size=12, num_classes=1000).instantiate()


@pytest.mark.parametrize("shape", [(6, 8, 8), (6, 8, 8, 3)])
def test_a_file_gives_its_images_and_labels(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    np.savez_compressed(tmp_path / "x.npz", x=pixels, y=np.arange(6) % 3)
    cfg = NpzImages.Config(path=str(tmp_path / "x.npz"), images="x", labels="y")
    source = cfg.instantiate()
    source.prepare()
    assert (len(source), source.num_classes) == (6, 3)
    image, label = source[4]
    np.testing.assert_array_equal(image, pixels.reshape(6, 8, 8, -1)[4])
    assert label == 1
    before = source.fingerprint()
    np.savez(tmp_path / "x.npz", x=255 - pixels, y=np.arange(6) % 3)
    assert cfg.instantiate().fingerprint() != before


def test_what_is_no_file_of_images_is_refused(tmp_path):
    path = tmp_path / "x.npz"

    def refused(match: str) -> None:
        with pytest.raises(DataError, match=match) as caught:
            NpzImages.Config(path=str(path)).instantiate().prepare()
        assert caught.value.code == "AX553"
        assert str(path) in str(caught.value)

    refused("no such file")
    images = np.zeros((3, 8, 8), np.uint8)
    np.savez(path, pictures=images, labels=np.arange(3))
    refused("images")
    np.savez(path, images=images.astype(np.float32), labels=np.arange(3))
    refused("float32")
    np.savez(path, images=images, labels=np.arange(4))
    refused("labels")
    np.savez(path, images=images, labels=np.array([0, 1, -1]))
    refused("negative")
    np.savez(path, images=images, labels=np.array([0, object(), 1], dtype=object))
    refused("cannot be read")  # a pickle, which could run any code
    path.write_bytes(path.read_bytes()[:100])
    refused("cannot be read")
