"""Layouts: how foreign arrays and ours hold the same numbers.

Every transform is invertible and stated once. Those that only move axes return views, so that a
conversion holds one tensor at a time.

Example:
    >>> import numpy as np
    >>> query = np.zeros((4 * 8, 16))  # torch: (heads * head_dim, dim)
    >>> TorchLinear().to_ours([query], [(16, 4, 8)])[0].shape
    (16, 4, 8)
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from axcore.errors import CheckpointError

__all__ = [
    "Flatten",
    "Fused",
    "Identity",
    "Matrix",
    "Offset",
    "OneToOne",
    "PairsToHalves",
    "Stacked",
    "TorchLinear",
    "Transform",
    "Transpose",
]

Shape = tuple[int, ...]


class Transform(abc.ABC):
    """How the arrays of a rule's foreign names become those of its paths, and back."""

    @abc.abstractmethod
    def to_ours(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Returns one array for each of our paths.

        Args:
            arrays: Foreign arrays, of the shapes that ``foreign_shapes`` gives. One that is taken
                out of it may be read from a file then: take each once, and keep none.
            shapes: Shapes of our parameters.
        """

    @abc.abstractmethod
    def to_foreign(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the foreign arrays of ours: the inverse of ``to_ours``."""

    def foreign_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Returns the shapes that the foreign arrays must have for ours to have ``shapes``."""
        # An array of one byte, seen at every index: only axes move.
        seen = [np.broadcast_to(np.zeros((), np.int8), shape) for shape in shapes]
        return [array.shape for array in self.to_foreign(seen)]


class OneToOne(Transform):
    """A transform of one array into one; others can build on it (``inner``)."""

    @abc.abstractmethod
    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns our array, of ``shape``."""

    @abc.abstractmethod
    def foreign(self, array: np.ndarray) -> np.ndarray:
        """Returns the foreign array."""

    def to_ours(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """See :meth:`Transform.to_ours`."""
        return [self.ours(array, shape) for array, shape in zip(arrays, shapes, strict=True)]

    def to_foreign(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See :meth:`Transform.to_foreign`."""
        return [self.foreign(array) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Identity(OneToOne):
    """The same array."""

    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns ``array``."""
        del shape
        return array

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """Returns ``array``."""
        return array


@dataclasses.dataclass(frozen=True)
class TorchLinear(OneToOne):
    """``torch.nn.Linear.weight``, (out, in), against ours, (*in, *out).

    Attributes:
        num_in: Number of our leading dims that are input: 1 for ``query/weight (dim, heads,
            head_dim)``, 2 for ``output/weight (heads, head_dim, dim)``.
    """

    num_in: int = 1

    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """(out, in) -> (*in, *out)."""
        return array.T.reshape(shape)

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """(*in, *out) -> (out, in)."""
        return _matrix(array, self.num_in).T


@dataclasses.dataclass(frozen=True)
class Matrix(OneToOne):
    """A matrix (in, out) that is not transposed, against ours, (*in, *out).

    Attributes:
        num_in: Number of our leading dims that are input.
    """

    num_in: int = 1

    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """(in, out) -> (*in, *out)."""
        return array.reshape(shape)

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """(*in, *out) -> (in, out)."""
        return _matrix(array, self.num_in)


@dataclasses.dataclass(frozen=True)
class Flatten(OneToOne):
    """A vector against ours of any rank: a bias (heads * head_dim,) against (heads, head_dim)."""

    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """(values,) -> ``shape``."""
        return array.reshape(shape)

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """Any shape -> (values,)."""
        return array.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Transpose(OneToOne):
    """Moved axes: ``ours = foreign.transpose(axes)``; None reverses them."""

    axes: tuple[int, ...] | None = None

    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Foreign -> ours."""
        del shape
        return array.transpose(self.axes)

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """Ours -> foreign."""
        inverse = None if self.axes is None else tuple(int(i) for i in np.argsort(self.axes))
        return array.transpose(inverse)


@dataclasses.dataclass(frozen=True)
class PairsToHalves(OneToOne):
    """Rotary pairs side by side (foreign) against pairs half a head apart (ours).

    Our last dim is ``head_dim``; the foreign order along it is ``0, n/2, 1, n/2 + 1, ...`` of ours.

    Attributes:
        inner: The layout beside that.
        num_dims: How many leading dims of a head are paired; None: all.
    """

    inner: OneToOne = TorchLinear()
    num_dims: int | None = None

    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Foreign -> ours; copies."""
        return self._permuted(self.inner.ours(array, shape), lambda n: (n // 2, 2))

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """Ours -> foreign; copies."""
        return self.inner.foreign(self._permuted(array, lambda n: (2, n // 2)))

    def foreign_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See :meth:`Transform.foreign_shapes`."""
        return self.inner.foreign_shapes(shapes)

    def _permuted(self, array: np.ndarray, split: Callable[[int], Shape]) -> np.ndarray:
        size = array.shape[-1]
        n = size if self.num_dims is None else self.num_dims
        order = np.arange(size)
        order[:n] = np.arange(n).reshape(split(n)).T.reshape(-1)
        return array[..., order]


@dataclasses.dataclass(frozen=True)
class Offset(OneToOne):
    """``ours = foreign + value``: a scale stored as its distance from one, or the reverse."""

    value: float
    inner: OneToOne = Identity()

    def ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Foreign -> ours, computed in float32 or wider."""
        return self._wide(self.inner.ours(array, shape)) + self.value

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """Ours -> foreign."""
        return self.inner.foreign(self._wide(array) - self.value)

    def foreign_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See :meth:`Transform.foreign_shapes`."""
        return self.inner.foreign_shapes(shapes)

    def _wide(self, array: np.ndarray) -> np.ndarray:
        return array if array.dtype.itemsize >= 4 else array.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Fused(Transform):
    """One foreign array that holds several of ours side by side: fused QKV, gate and up.

    Attributes:
        inner: Layout of each part.
        axis: Foreign axis along which the parts stand: 0 is the output of a torch layer.
        groups: The parts alternate in so many groups: 1 is ``q k v``; with two, ``q0 k0 v0 q1 k1
            v1``, each the share of its group of heads.
    """

    inner: OneToOne = TorchLinear()
    axis: int = 0
    groups: int = 1

    def to_ours(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """One foreign array -> the parts."""
        (array,) = arrays
        parts = [self.inner.foreign_shapes([shape])[0] for shape in shapes]
        sizes = [self._share(part) for part in parts]
        grouped = self._grouped(array, sum(sizes))
        out: list[np.ndarray] = []
        start = 0
        for size, part, shape in zip(sizes, parts, shapes, strict=True):
            window = (*[slice(None)] * (self.axis + 1), slice(start, start + size))
            piece = grouped[window]
            out.append(self.inner.ours(piece.reshape(part), shape))
            start += size
        return out

    def to_foreign(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The parts -> one foreign array."""
        parts = [self.inner.foreign(array) for array in arrays]
        shares = [self._grouped(part, self._share(part.shape)) for part in parts]
        whole = np.concatenate(shares, axis=self.axis + 1)
        shape = list(parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in parts)
        return [whole.reshape(shape)]

    def _share(self, shape: Shape) -> int:
        size, rest = divmod(shape[self.axis], self.groups)
        if rest:
            raise CheckpointError(
                f"{shape[self.axis]} rows do not divide into {self.groups} groups",
                code="AX621",
                where=repr(self),
            )
        return size

    def _grouped(self, array: np.ndarray, size: int) -> np.ndarray:
        """Splits the axis in two: (groups, size)."""
        shape = (*array.shape[: self.axis], self.groups, size, *array.shape[self.axis + 1 :])
        return array.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Stacked(Transform):
    """Several foreign arrays, one for each index of our first dim (experts).

    The rule's foreign name has a placeholder that its path has not, such as ``{j}``.

    Attributes:
        inner: Layout of each of them.
    """

    inner: OneToOne = TorchLinear()

    def to_ours(self, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """The foreign arrays -> one of ours."""
        (shape,) = shapes
        out: np.ndarray | None = None
        for index, array in enumerate(arrays):
            if out is None:
                out = np.empty(shape, array.dtype)
            out[index] = self.inner.ours(array, shape[1:])
        assert out is not None  # a rule without foreign arrays applies no transform
        return [out]

    def to_foreign(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One of ours -> the foreign arrays."""
        (array,) = arrays
        return [self.inner.foreign(part) for part in array]


def _matrix(array: np.ndarray, num_in: int) -> np.ndarray:
    rows = math.prod(array.shape[:num_in])
    return array.reshape(rows, math.prod(array.shape[num_in:]))
