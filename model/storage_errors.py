"""The ways in which a file of ours is bad, one error each, and the check that a file is of the kind that is wanted."""

from collections.abc import Mapping
from pathlib import Path


class StorageFileError(ValueError):
    """A file that cannot be read or written; the message names the path, what is wrong and what to do."""

    def __init__(self, path: str | Path, detail: str) -> None:
        super().__init__(f"{str(path) or 'the path'}: {detail}")
        self.path = str(path)
        self.detail = detail


class MissingFileError(StorageFileError):
    """There is no such file."""


class TruncatedFileError(StorageFileError):
    """The file ends before its content does."""


class DamagedFileError(StorageFileError):
    """The file is no safetensors file, or was changed after it was written."""


class NewerFormatError(StorageFileError):
    """A later version of Treadle wrote the file."""


class WrongFormatError(StorageFileError):
    """A whole file, but of another kind."""


class UnwritableFileError(StorageFileError):
    """The folder or the disk refused the file; what was there before is untouched."""


def require_format(path: str | Path, metadata: Mapping[str, str], kind: str, version: int) -> int:
    """The format version of a file whose metadata must carry `format=kind` and `format_version` up to `version`.

    Raises:
        WrongFormatError: the file is of another kind.
        NewerFormatError: its version is above `version`.
        DamagedFileError: its version is no number.
    """
    found = metadata.get("format")
    if found != kind:
        raise WrongFormatError(path, f"holds {found or 'tensors of no named kind'}: a {kind} is needed")
    text = metadata.get("format_version", "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise DamagedFileError(path, f"its format version is {text[:40]!r}: it must be a whole number")
    if int(text) > version:
        raise NewerFormatError(path, f"is a {kind} of format {text}, this version reads up to {version}: update treadle")
    return int(text)
