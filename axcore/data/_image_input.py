"""The training input of classifiers of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from axcore.config import Dim, scaled
from axcore.data._images import BaseImageSource, DrawnNumbers
from axcore.data._input import BaseInput
from axcore.data._iterator import BatchIterator
from axcore.data._order import DocumentOrder, heldout_mask, indexed_hashes
from axcore.data._packing import Batch
from axcore.data._source import digest_of
from axcore.errors import DataError

__all__ = ["HeldoutImages", "ImageInput"]

_PROBED_PLACES = 16


class _ImageStream:
    """One row of the batch: how many images it has given."""

    def __init__(self) -> None:
        self.document = 0
        self.offset = 0

    def seek(self, document: int, offset: int) -> None:
        """Goes to image ``document`` of the row."""
        self.document, self.offset = document, offset


class ImageInput(BaseInput):
    """Labelled images as batches of a classifier.

    As of ``TextInput``, each row is a stream of its own: image i of the training order goes to row
    i mod ``batch_size``, so a position restores on any number of processes. The batch has
    ``images`` float32 (B, height, width, channels), ``labels`` int32 (B,) and ``label_mask`` bool
    (B,), as ``axcore.layers.VisionTransformer`` takes them.
    """

    class Config(BaseInput.Config):
        """Which images, and how their pixels become numbers."""

        source: BaseImageSource.Config = DrawnNumbers.Config()
        # Pixels are divided by 255, less the mean, divided by the deviation; one for each channel,
        # or one for all.
        mean: tuple[float, ...] = (0.5,)
        stddev: tuple[float, ...] = (0.5,)
        # Share of images held out for evaluation.
        heldout_fraction: float = 0.1
        shuffle: bool = True
        seed: Dim = scaled(1, of="seed")
        # Batches read ahead by a thread; 0 for none.
        prefetch: int = 2

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> ImageInput: ...

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg: Any = cfg
        if not 0 <= cfg.heldout_fraction < 1 or min(cfg.stddev, default=0) <= 0 or not cfg.mean:
            raise DataError(
                f"got heldout_fraction={cfg.heldout_fraction}, mean={cfg.mean}, stddev="
                f"{cfg.stddev}, expected a fraction from 0 to below 1, and deviations above 0",
                code="AX531",
            )
        self._source = cfg.source.instantiate()

    @property
    def source(self) -> BaseImageSource:
        """Where the images come from."""
        return self._source

    @property
    def tokenizer(self) -> None:
        """None: there is no text."""

    def prepare(self) -> None:
        """Finds and checks the images.

        Raises:
            DataError: Something is wrong with them.
        """
        self._source.prepare()
        self._split()

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the images to train on, and of those held out."""
        self._source.prepare()
        count = len(self._source)
        held = heldout_mask(indexed_hashes("image", count), self._cfg.heldout_fraction)
        numbers = np.arange(count, dtype=np.int64)
        if held.all():
            raise DataError(f"got {count} image(s), too few to train on", code="AX502")
        return numbers[~held], numbers[held]

    def iterator(self, rows: Sequence[int] | None = None) -> BatchIterator:
        """Returns endless batches of the global batch's ``rows`` (None: all)."""
        cfg = self._cfg
        chosen = self._rows(rows)
        order = DocumentOrder(
            [self._split()[0]], names=[""], weights=[1.0], seed=cfg.seed, shuffle=cfg.shuffle
        )
        streams = [_ImageStream() for _ in chosen]

        def make(number: int) -> Batch:
            del number
            places = [s.document * cfg.batch_size + r for s, r in zip(streams, chosen, strict=True)]
            batch = self._batch([order[place] for place in places])
            for stream in streams:
                stream.document += 1
            return batch

        origin = {
            "source": self._source.fingerprint(),
            "batch_size": cfg.batch_size,
            "seed": cfg.seed,
            "shuffle": cfg.shuffle,
            "heldout_fraction": cfg.heldout_fraction,
            "pixels": [list(cfg.mean), list(cfg.stddev)],
            "order": digest_of(*(order[i] for i in range(_PROBED_PLACES))),
        }
        return BatchIterator(streams, make, rows=chosen, origin=origin, prefetch=cfg.prefetch)

    def _rows(self, rows: Sequence[int] | None) -> tuple[int, ...]:
        size = self._cfg.batch_size
        chosen = tuple(range(size)) if rows is None else tuple(int(r) for r in rows)
        if any(not 0 <= r < size for r in chosen) or len(set(chosen)) != len(chosen):
            raise DataError(
                f"got rows {list(chosen)}, expected distinct ones from 0 to {size - 1}",
                code="AX514",
                hint="rows are numbered within the global batch, not within the process",
            )
        return chosen

    def _batch(self, numbers: Sequence[int]) -> Batch:
        pairs = [self._source[int(number)] for number in numbers]
        pixels = np.stack([image for image, _ in pairs]).astype(np.float32) / 255
        channels = pixels.shape[-1]
        if {len(self._cfg.mean), len(self._cfg.stddev)} - {1, channels}:
            raise DataError(
                f"the images have {channels} channel(s), mean and stddev are {self._cfg.mean} and "
                f"{self._cfg.stddev}",
                code="AX531",
                hint="give one number for each channel, or one for all",
            )
        mean = np.array(self._cfg.mean, np.float32)
        return {
            "images": (pixels - mean) / np.array(self._cfg.stddev, np.float32),
            "labels": np.array([label for _, label in pairs], np.int32),
            "label_mask": np.ones(len(pairs), bool),
        }

    def heldout(
        self, rows: Sequence[int] | None = None, *, max_documents: int | None = None
    ) -> HeldoutImages:
        """Returns one pass over the images held out, the first ``max_documents`` of them."""
        numbers = self._split()[1][:max_documents]
        if len(numbers) == 0:
            raise DataError(
                "no images are held out, so there is nothing to evaluate on",
                code="AX513",
                hint="set input.heldout_fraction, for example to 0.1, or leave out the evaler",
            )
        return HeldoutImages(self, numbers, self._cfg.batch_size, self._rows(rows))

    def texts(self) -> Iterator[str]:
        """Yields nothing."""
        return iter(())

    def describe(self) -> dict[str, object]:
        """Returns what a report says about the data, as JSON values."""
        train, heldout = self._split()
        return {
            "source": type(self._source).__name__,
            "images": len(self._source),
            "classes": self._source.num_classes,
            "fingerprint": self._source.fingerprint(),
            "train_images": len(train),
            "heldout_images": len(heldout),
        }


class HeldoutImages:
    """Batches of every image held out once, always the same; the last one is filled up.

    Args:
        data: The input.
        numbers: Numbers of the images.
        batch_size: Rows of the global batch.
        rows: Rows to return.
    """

    def __init__(
        self, data: ImageInput, numbers: np.ndarray, batch_size: int, rows: tuple[int, ...]
    ):
        self._data, self._numbers = data, numbers
        self._batch_size, self._rows = batch_size, list(rows)

    @property
    def num_bytes(self) -> None:
        """None: there is no text."""

    def __len__(self) -> int:
        """Returns the number of batches."""
        return math.ceil(len(self._numbers) / self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches as of ``ImageInput``; ``label_mask`` is False where a row is padding."""
        for start in range(0, len(self._numbers), self._batch_size):
            some = self._numbers[start : start + self._batch_size]
            padded = np.resize(some, self._batch_size)
            batch = self._data._batch([int(n) for n in padded[self._rows]])
            batch["label_mask"] = (np.arange(self._batch_size) < len(some))[self._rows]
            yield batch
