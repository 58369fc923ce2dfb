"""Sources of labelled images: files, and numbers drawn by code."""

from __future__ import annotations

import abc
import functools
import hashlib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from axcore.config import REQUIRED, Configurable, Required
from axcore.data._order import indexed_hashes
from axcore.data._source import digest_of
from axcore.errors import DataError

__all__ = ["BaseImageSource", "DrawnNumbers", "NpzImages"]


class BaseImageSource(Configurable, abc.ABC):
    """Labelled images with random access; making one touches nothing, ``prepare`` does."""

    class Config(Configurable.Config):
        """Fields that every source has: none."""

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> BaseImageSource: ...

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @abc.abstractmethod
    def prepare(self) -> None:
        """Finds and checks the images; once is enough, more is harmless.

        Raises:
            DataError: They are missing, unreadable or not what they should be.
        """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of images."""

    @abc.abstractmethod
    def __getitem__(self, index: int, /) -> tuple[np.ndarray, int]:
        """Returns image ``index``, uint8 (height, width, channels), and its class."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns a digest that changes with the images; saved positions carry it."""

    @property
    @abc.abstractmethod
    def num_classes(self) -> int:
        """Number of classes: one more than the largest label."""


class NpzImages(BaseImageSource):
    """Images and labels of an ``.npz`` file, as ``numpy.savez`` writes it; never unpickled."""

    class Config(BaseImageSource.Config):
        """``images`` is uint8 (N, height, width) or (N, height, width, channels)."""

        path: Required[str] = REQUIRED
        # Names of the arrays.
        images: str = "images"
        labels: str = "labels"

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg

    def prepare(self) -> None:
        """See :meth:`BaseImageSource.prepare`."""
        self._arrays  # noqa: B018

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        path = self._cfg.path
        try:
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                if not isinstance(file, np.lib.npyio.NpzFile):
                    raise ValueError("it is a single array")
                images, labels = file[self._cfg.images], file[self._cfg.labels]
        except FileNotFoundError as error:
            raise DataError("there is no such file", code="AX553", where=path) from error
        except KeyError as error:
            raise DataError(
                f"it has no array {error}",
                code="AX553",
                where=path,
                hint="name its arrays: images=..., labels=...",
            ) from error
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"cannot be read: {error}",
                code="AX553",
                where=path,
                hint="write it with numpy.savez(path, images=..., labels=...), plain numbers only",
            ) from error
        images = images[..., None] if images.ndim == 3 else images
        whole = np.issubdtype(labels.dtype, np.integer) and labels.shape == images.shape[:1]
        if images.dtype != np.uint8 or images.ndim != 4 or not images.size or not whole:
            raise DataError(
                f"got images {images.dtype}{list(images.shape)} and labels "
                f"{labels.dtype}{list(labels.shape)}, expected uint8 (N, height, width, channels) "
                "and N integers",
                code="AX553",
                where=path,
            )
        if labels.min() < 0:
            raise DataError(f"the label {labels.min()} is negative", code="AX553", where=path)
        return images, labels.astype(np.int64)

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self._arrays[1])

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, int]:
        """See :meth:`BaseImageSource.__getitem__`."""
        images, labels = self._arrays
        return images[index], int(labels[index])

    def fingerprint(self) -> str:
        """Returns a digest of the file."""
        with Path(self._cfg.path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(self._arrays[1].max()) + 1


# The segments of each digit: top, upper left and right, middle, lower left and right, bottom.
_SEGMENTS = ("1110111", "0010010", "1011101", "1011011", "0111010")
_SEGMENTS += ("1101011", "1101111", "1010010", "1111111", "1111011")


class DrawnNumbers(BaseImageSource):
    """Numbers drawn by code: real images to learn from that need no file.

    Image i shows its class in decimal digits of seven segments, at a place, a size, a brightness
    and with a noise that follow from i. So it is the same everywhere, and never the same twice.
    """

    class Config(BaseImageSource.Config):
        """The default is as small as digits are still legible."""

        # Height and width, in pixels.
        image_size: int = 16
        num_channels: int = 1
        num_classes: int = 10
        num_images: int = 2000

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        self._digits = len(str(cfg.num_classes - 1))
        if min(cfg.num_channels, cfg.num_classes, cfg.num_images) < 1:
            raise DataError(f"got {cfg}, expected at least 1 of each", code="AX531")
        if cfg.image_size < max(8, 5 * self._digits):
            raise DataError(
                f"got image_size={cfg.image_size}, too small to draw {self._digits} digit(s)",
                code="AX531",
                hint=f"at least {max(8, 5 * self._digits)}",
            )

    def prepare(self) -> None:
        """Does nothing."""

    def __len__(self) -> int:
        """Returns ``num_images``."""
        return self._cfg.num_images

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, int]:
        """See :meth:`BaseImageSource.__getitem__`."""
        cfg, size = self._cfg, self._cfg.image_size
        number, drawn_height, drawn_width, top, left, ink, ground = (
            int(h >> np.uint64(16)) for h in indexed_hashes(f"number\x1f{index}", 7)
        )
        label = number % cfg.num_classes
        # Three quarters to all of what the image has room for.
        height = size * 3 // 4 + drawn_height % (size // 4 + 1)
        width = self._cell(drawn_width)
        canvas = np.zeros((size, size), bool)
        top %= size - height + 1
        left %= size - width * self._digits + 1
        for place, digit in enumerate(f"{label:0{self._digits}}"):
            column = left + place * width
            cell = canvas[top : top + height, column : column + width - 1]
            _draw(cell, _SEGMENTS[int(digit)])
        noise = indexed_hashes(f"noise\x1f{index}", canvas.size) >> np.uint64(59)
        gray = np.where(canvas, 160 + ink % 64, ground % 64).astype(np.uint8)
        gray += noise.astype(np.uint8).reshape(gray.shape)
        return np.repeat(gray[:, :, None], cfg.num_channels, axis=2), label

    def _cell(self, drawn: int) -> int:
        widest = self._cfg.image_size // self._digits
        narrowest = max(5, widest * 2 // 3)
        return narrowest + drawn % (widest - narrowest + 1)

    def fingerprint(self) -> str:
        """Returns a digest of the first images and of the configuration."""
        first = [self[i][0].tobytes() for i in range(min(8, len(self)))]
        return digest_of(self._cfg.to_text(), *first)

    @property
    def num_classes(self) -> int:
        """``num_classes`` of the configuration."""
        return self._cfg.num_classes


def _draw(cell: np.ndarray, segments: str) -> None:
    """Draws a digit that fills a cell, (height, width) bool."""
    height, width = cell.shape
    thick = max(1, min(height, width) // 6)
    middle = (height - thick) // 2
    rows = (slice(0, middle + thick), slice(middle, height))
    horizontal = {0: slice(0, thick), 3: slice(middle, middle + thick), 6: slice(-thick, None)}
    vertical = {1: (0, slice(0, thick)), 2: (0, slice(-thick, None))}
    vertical |= {4: (1, slice(0, thick)), 5: (1, slice(-thick, None))}
    for number, is_on in enumerate(segments):
        if is_on == "0":
            continue
        if number in horizontal:
            cell[horizontal[number]] = True
        else:
            half, columns = vertical[number]
            cell[rows[half], columns] = True
