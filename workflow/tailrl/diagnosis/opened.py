"""A file as it is: what its first bytes say that it holds, and its content without compression."""

import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tailrl.diagnosis.left_out import DamagedError
from tailrl.runtime.errors import DataError, StorageError, reason
from tailrl.runtime.limits import out_of_memory, regular

COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED_ENDINGS = (".gz", ".xz", ".zst")
SIGNATURES = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow_stream",
    b"FEA1": "feather_1",
    b"\x93NUMPY": "npy",
    b"\xff\xfe": "utf_16",
    b"\xfe\xff": "utf_16",
    b"{": "json",
    b"[": "json",
}
ENDINGS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".pt", ".pth"), "torch"),
    ".npz": "npz",
    **dict.fromkeys((".pkl", ".pickle"), "pickle"),
}  # by ending, where the first bytes do not say
MOST_BLANK = 4096  # blank bytes before the first of a JSON text
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


@dataclass(frozen=True, slots=True)
class Opened:
    """A file's content without compression; `raw` is the file on the disk, whose place shows the progress."""

    stream: io.BufferedReader
    raw: io.BufferedReader
    kind: str


@contextmanager
def opened(file: Path) -> Iterator[Opened]:
    """The content of a file, and its kind: a value of SIGNATURES or ENDINGS, or nothing for an unknown one.

    Raises:
        StudyError: the file is missing, is no regular file or cannot be opened.
        DamagedError: reading fails later, such as at the end of a compressed file that was cut.
    """
    try:
        with open(file, "rb", opener=regular) as raw:
            stream = _decompressed(raw)
            yield Opened(stream, raw, _kind(stream, file))
    except READ_ERRORS as error:
        if out_of_memory(error):
            raise DataError(f"{file}: takes too much memory to read") from None
        raise DamagedError(f"{file}: cannot be read: {reason(error)}") from None


def plain_ending(file: Path) -> str:
    """The ending of a file's name, in lower case, without that of its compression."""
    ending = file.suffix.lower()
    return Path(file.stem).suffix.lower() if ending in COMPRESSED_ENDINGS else ending


def may_be_log(file: Path) -> bool:
    """Whether a file of a folder is worth a look: by its ending, or by its first bytes."""
    if plain_ending(file) in ENDINGS:
        return True
    try:
        with opened(file) as content:
            return bool(content.kind)
    except (DataError, StorageError):
        return False


def whole(content: Opened, file: Path, most: float) -> bytes:
    """All bytes of a file that cannot be read in parts; raises StudyError for more than `most`."""
    data = content.stream.read(int(most) + 1)
    if len(data) > most:
        raise DataError(f"{file}: has more than {most / 1e6:,.0f} MB in one piece; write one response a row, as JSONL")
    return data


def seekable(content: Opened, file: Path, most: float) -> IO[bytes]:
    """The content as a file with random access, in memory where it was compressed."""
    return content.raw if content.stream is content.raw else io.BytesIO(whole(content, file, most))


def _decompressed(raw: io.BufferedReader) -> io.BufferedReader:
    head = raw.peek(8)[:8]
    way = next((name for start, name in COMPRESSED.items() if head.startswith(start)), "")
    if way == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if way == "xz":
        return io.BufferedReader(lzma.LZMAFile(raw))
    if way == "zstd":
        import pyarrow  # type: ignore[import-untyped]

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    return raw


def _kind(stream: io.BufferedReader, file: Path) -> str:
    head = stream.peek(MOST_BLANK)[:MOST_BLANK]
    if head.startswith(b"PK\x03\x04"):
        return "torch" if b"data.pkl" in head else "npz" if b".npy" in head else ENDINGS.get(plain_ending(file), "zip")
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return "pickle"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"\x00" in text[:4] and text[:4].replace(b"\x00", b"")[:1] in (b"{", b"["):
        return "utf_16"  # without a mark, or UTF-32
    for start, kind in SIGNATURES.items():
        if (text if kind == "json" else head).startswith(start):
            return kind
    return ENDINGS.get(plain_ending(file), "")
