"""In which order documents are read: held-out split, epoch permutations, mixing.

Everything here is a pure function of (documents, weights, seed), with random access: the k-th
document of training is found without having seen the k - 1 before it. That is what lets every row
of the batch be a stream of its own whose position is two integers.

The epoch permutation is a keyed bijection of our own (a Feistel network with cycle walking),
without memory, where a shuffled array would need 8 bytes per document and process. A saved position
means what it meant only as long as this permutation is the same, so it must not come with a
dependency's version; and grain's ``index_shuffle``, 6 us for a million documents, takes 7 ms for
five (it walks cycles of a domain that is far too large). grain's ``MapDataset.mix`` is not used
either: it rounds weights to whole percents of the smallest one, and its fixed pattern can tie a row
of the batch to one source when the pattern's length divides by the batch size.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from axcore.errors import DataError

__all__ = [
    "DocumentOrder",
    "Group",
    "Permutation",
    "document_hash",
    "heldout_mask",
    "indexed_hashes",
    "mixing_slots",
]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Draws after which a mixture's shares are exact; weights are kept to one part in this many.
_BLOCK = 10_000
# Even, so that both halves end where they began. Four rounds shuffle large data well; the few bits
# of a small corpus need more (tests/data/test_order.py measures it).
_ROUNDS = 8
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Group:
    """Documents ``start`` to ``stop - 1`` of a source, drawn with a relative ``weight``."""

    name: str
    start: int
    stop: int
    weight: float = 1.0


def document_hash(name: str) -> int:
    """Returns a 64-bit hash of ``name``, the same in every process and version."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def indexed_hashes(name: str, count: int) -> np.ndarray:
    """Returns hashes of documents 0 ... count - 1 of the file ``name``, shape (count,), uint64.

    One multiplication-xor chain per document (the splitmix64 finalizer), vectorized: hashing names
    one by one would take minutes for the 10**8 documents of a large corpus.
    """
    seed = np.uint64(document_hash(name))
    z = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN + seed
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def heldout_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Returns which documents are held out, shape (documents,), bool.

    A document is held out when its hash falls below ``fraction`` of the hash range, so adding or
    removing documents never moves another one across the split. Where that would leave one side
    empty, the document with the smallest (largest) hash fills it.

    Args:
        hashes: Hash of each document, shape (documents,), uint64.
        fraction: Share of documents to hold out, in [0, 1).
    """
    if fraction <= 0 or len(hashes) < 2:
        return np.zeros(len(hashes), dtype=bool)
    mask = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if not mask.any():
        mask[int(np.argmin(hashes))] = True
    elif mask.all():
        mask[int(np.argmax(hashes))] = False
    return mask


def mixing_slots(weights: Sequence[float], block: int = _BLOCK) -> np.ndarray:
    """Shares ``block`` draws among sources in proportion to weights (largest remainder).

    Returns:
        Draws per source, shape (sources,), int64, summing to ``block``.

    Raises:
        DataError: A weight is not positive, or too small for one draw in ``block``.
    """
    values = np.asarray(weights, dtype=np.float64)
    if len(values) == 0 or not np.isfinite(values).all() or (values <= 0).any():
        raise DataError(
            f"got mixture weights {tuple(weights)}, expected positive finite numbers",
            code="AX520",
            hint="leave a source out of the mixture instead of giving it weight 0",
        )
    exact = values / values.sum() * block
    slots = np.floor(exact).astype(np.int64)
    # Stable: equal remainders go to the earlier source on every machine.
    by_remainder = np.argsort(-(exact - slots), kind="stable")
    slots[by_remainder[: block - int(slots.sum())]] += 1
    if (slots == 0).any():
        raise DataError(
            f"got mixture weights {tuple(weights)}; the smallest is below one document in {block}",
            code="AX520",
            hint="give that source a larger weight, or leave it out",
        )
    return slots


class Permutation:
    """A permutation of 0 ... length - 1, chosen by ``key``, computed one place at a time.

    Args:
        length: Number of places, at least 1.
        key: Any text; different keys give unrelated permutations.
    """

    def __init__(self, length: int, key: str):
        self._length = length
        bits = max(2, (length - 1).bit_length())
        self._low, self._high = bits // 2, bits - bits // 2
        self._keys = tuple(document_hash(f"{key}\x1f{i}") for i in range(_ROUNDS))

    def __call__(self, place: int) -> int:
        """Returns where ``place`` goes."""
        # The network permutes a power of two that is less than twice the length; places beyond
        # the length are sent through again, which is less than one more time on average.
        while True:
            place = self._network(place)
            if place < self._length:
                return place

    def _network(self, place: int) -> int:
        # Halves of unequal width when the number of bits is odd; they change roles every round.
        here, there = self._low, self._high
        left, right = place >> there, place & ((1 << there) - 1)
        for key in self._keys:
            z = ((right ^ key) * 0xBF58476D1CE4E5B9) & _WORD
            z = ((z ^ (z >> 29)) * 0x94D049BB133111EB) & _WORD
            left, right = right, left ^ (z >> (64 - here))
            here, there = there, here
        return (left << there) | right


class DocumentOrder:
    """The endless sequence of documents to train on, with random access.

    ``order[k]`` is the document at place k. Each group (a source of a mixture) runs through its own
    epochs, each a new permutation; groups take turns so that every run of 10,000 draws that starts
    at a multiple of 10,000 holds each group's exact share.

    Args:
        groups: Document numbers of each group, arrays of shape (documents of the group,).
        names: A name per group, part of its permutation's seed.
        weights: Relative share of draws per group.
        seed: Any integer.
        shuffle: False reads every group in its own order, epoch after epoch.
    """

    def __init__(
        self,
        groups: Sequence[np.ndarray],
        *,
        names: Sequence[str],
        weights: Sequence[float],
        seed: int,
        shuffle: bool = True,
    ):
        self._groups = tuple(groups)
        self._names = tuple(names)
        self._slots = mixing_slots(weights)
        self._seed = seed
        self._shuffle = shuffle
        self._permutation = functools.lru_cache(maxsize=64)(self._make_permutation)
        self._block = functools.lru_cache(maxsize=8)(self._make_block)

    def __getitem__(self, place: int) -> int:
        """Returns the document number at ``place`` (0, 1, 2, ... without end)."""
        group, rank = self.locate(place)
        members = self._groups[group]
        epoch, position = divmod(rank, len(members))
        if self._shuffle:
            position = self._permutation(group, epoch)(position)
        return int(members[position])

    def locate(self, place: int) -> tuple[int, int]:
        """Returns (group, how many documents of that group come before ``place``)."""
        if len(self._groups) == 1:
            return 0, place
        number, inside = divmod(place, _BLOCK)
        owner, earlier = self._block(number)
        group = int(owner[inside])
        return group, number * int(self._slots[group]) + int(earlier[inside])

    def _make_permutation(self, group: int, epoch: int) -> Permutation:
        key = f"epoch\x1f{self._seed}\x1f{self._names[group]}\x1f{epoch}"
        return Permutation(len(self._groups[group]), key)

    def _make_block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        # A fresh arrangement per block: see the module's docstring on fixed patterns.
        base = np.repeat(np.arange(len(self._slots)), self._slots)
        keys = indexed_hashes(f"mixing\x1f{self._seed}\x1f{number}", _BLOCK)
        owner = base[np.argsort(keys, kind="stable")]
        earlier = np.empty(_BLOCK, dtype=np.int64)
        for group, count in enumerate(self._slots):
            earlier[owner == group] = np.arange(count)
        return owner, earlier
