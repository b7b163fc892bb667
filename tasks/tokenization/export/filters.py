"""How many rows a trainer's own loader will drop, from each trainer's published code."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Dropped = Callable[["RowFacts", int | None, int], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What filters look at: lengths, and the flat mask with its offsets."""

    offsets: NDArray[np.int64]
    mask: NDArray[np.int8]

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> "RowFacts":
        """Facts of a token batch."""
        lists = batch.column("loss_mask")
        offsets = lists.offsets.to_numpy().astype(np.int64)
        return cls(offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False))

    def supervised(self, length: int | None) -> NDArray[np.int64]:
        """Supervised tokens of each row inside its first `length` tokens."""
        return self._sums(self._inside(length))

    def adjacent(self, length: int | None) -> NDArray[np.int64]:
        """Pairs of neighbouring supervised tokens of each row inside its first `length` tokens."""
        inside = self._inside(length).astype(bool)
        pairs = np.zeros(len(inside), dtype=np.int8)
        pairs[:-1] = inside[:-1] & inside[1:]
        starts = self.offsets[1:-1]
        pairs[starts[starts > 0] - 1] = 0  # a pair does not cross rows
        return self._sums(pairs)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def _inside(self, length: int | None) -> NDArray[np.int8]:
        if length is None:
            return self.mask
        sizes = self.lengths()
        position = np.arange(len(self.mask)) - np.repeat(self.offsets[:-1], sizes)
        return np.where(position < length, self.mask, np.int8(0))

    def _sums(self, values: NDArray[np.int8]) -> NDArray[np.int64]:
        before = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
        return np.asarray(before[self.offsets[1:]] - before[self.offsets[:-1]])


def specforge(facts: RowFacts, length: int | None, block: int) -> NDArray[np.bool_]:
    """specforge 0.2.0, DFlash: fewer than 2 supervised tokens, or no two adjacent ones, inside data.max_length."""
    return np.asarray((facts.supervised(length) < 2) | (facts.adjacent(length) < 1))


def speculators(facts: RowFacts, length: int | None, block: int) -> NDArray[np.bool_]:
    """speculators 0.9.0: nothing supervised inside --seq-length."""
    return np.asarray(facts.supervised(length) == 0)


def model_optimizer(facts: RowFacts, length: int | None, block: int) -> NDArray[np.bool_]:
    """Model-Optimizer: hidden-state dumps skip rows of 10 tokens or fewer and rows longer than the window."""
    sizes = facts.lengths()
    return np.asarray((sizes <= 10) | ((sizes > length) if length is not None else False))


def deepspec(facts: RowFacts, length: int | None, block: int) -> NDArray[np.bool_]:
    """DeepSpec: fewer than 14 supervised tokens."""
    return np.asarray(facts.supervised(length) < 14)


def two_blocks(facts: RowFacts, length: int | None, block: int) -> NDArray[np.bool_]:
    """TorchSpec and AngelSlim: fewer than two draft blocks of supervised tokens."""
    return np.asarray(facts.supervised(length) < 2 * block)


def nothing(facts: RowFacts, length: int | None, block: int) -> NDArray[np.bool_]:
    """Automodel drops no row that has a prompt and an answer."""
    return np.zeros(len(facts.offsets) - 1, dtype=np.bool_)


RULES: dict[Dropped, tuple[str, str]] = {
    specforge: ("specforge 0.2.0", "rows with fewer than 2 supervised tokens, or no two adjacent ones, in {window}"),
    speculators: ("speculators 0.9.0", "rows with nothing supervised in {window}"),
    model_optimizer: ("Model-Optimizer", "rows of 10 tokens or fewer, and rows longer than its window"),
    deepspec: ("DeepSpec", "rows with fewer than 14 supervised tokens in {window}"),
    two_blocks: ("", "rows with fewer than 2 draft blocks of {block} supervised tokens in {window}"),
    nothing: ("Automodel", "no row that has a prompt and an answer"),
}
"""Who filters, where it is one trainer, and what it drops."""


def told(dropped: Dropped, trainer: str, length: int | None, block: int) -> tuple[str, str]:
    """(who, what it drops) in words; `length` is the trainer's window in tokens."""
    who, rule = RULES[dropped]
    window = "the whole row" if length is None else f"the first {length:,} tokens"
    return who or trainer, rule.format(window=window, block=block)
