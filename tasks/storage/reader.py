"""A seekable file over ranged reads: a Parquet footer costs a few kilobytes, not the object."""

import io
from collections.abc import Callable
from typing import BinaryIO, cast

BUFFER_BYTES = 1 << 16


class RangeReader(io.RawIOBase):
    """Reads `size` bytes through `fetch(start, length)`, which returns exactly those bytes or raises StorageError."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch, self._position = size, fetch, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As for any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Where the next read starts."""
        return self._position

    def readinto(self, buffer: object) -> int:
        """Fill `buffer` with one ranged request."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        length = min(len(view), self._size - self._position)
        if length <= 0:
            return 0
        view[:length] = self._fetch(self._position, length)
        self._position += length
        return length


def buffered(size: int, fetch: Callable[[int, int], bytes]) -> BinaryIO:
    """`RangeReader` with a small read-ahead."""
    return cast(BinaryIO, io.BufferedReader(RangeReader(size, fetch), BUFFER_BYTES))
