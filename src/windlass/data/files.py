"""What every room of data needs: files that a crash cannot tear."""

import os
import threading
from pathlib import Path


def write_durably(path: Path, *chunks: bytes | memoryview, is_alone: bool = True) -> None:
    """The file exists whole under its name, or not at all, whatever kills the machine. Not `is_alone`: another process may write
    the same file at once."""
    writer = "" if is_alone else f".{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    with open(temporary, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
