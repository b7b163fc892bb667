"""Text files as they are read: plain, gzip or zstd, to their very end or with an error."""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Literal

import zstandard

Compression = Literal["", "gzip", "zstd"]

READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError)
"""What reading a file that `open_text` opened may raise: it is gone, cut or damaged."""


def open_text(path: str, compression: Compression) -> BinaryIO:
    """The file's bytes, decompressed while they are read."""
    if compression == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    raw = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
    return io.BufferedReader(_ZstdFrames(raw), 1 << 20) if compression == "zstd" else raw


class _ZstdFrames(io.RawIOBase):
    """Frame after frame. Raises EOFError where the last one is cut, which zstandard's own reader takes for an end."""

    PIECE = 4096  # compressed bytes at a time: what a hostile piece expands to is held

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._plain = raw, memoryview(b"")
        self._frame: zstandard.ZstdDecompressionObj | None = None

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """As any raw stream."""
        while not self._plain:
            if not (piece := self._raw.read(self.PIECE)):
                if self._frame is not None:
                    raise EOFError("the last zstd frame is cut")
                return 0
            self._plain = memoryview(self._inflate(piece))
        size = min(len(buffer), len(self._plain))
        buffer[:size], self._plain = self._plain[:size], self._plain[size:]
        return size

    def _inflate(self, piece: bytes) -> bytes:
        out = []
        while piece:
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            out.append(self._frame.decompress(piece))
            piece = b""
            if self._frame.eof:
                piece, self._frame = self._frame.unused_data, None
        return b"".join(out)

    def close(self) -> None:
        """The file too."""
        self._raw.close()
        super().close()
