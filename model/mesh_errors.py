"""What went wrong on rank 0 alone, raised on every rank: one that does not know goes on to a collective that nobody else will join."""

import json

from treadle.model import storage_errors
from treadle.model.mesh import World
from treadle.model.progress import Stopped
from treadle.model.storage_errors import StorageFileError


def raise_together(world: World, error: Exception | None) -> None:
    """Raises rank 0's `error` on every rank (collective); returns where there is none. What other ranks pass is not looked at.

    Raises:
        StorageFileError: of the same kind and text as rank 0's.
        Stopped: rank 0 was told to stop.
        RuntimeError: any other error of rank 0, with its text.
    """
    told = world.share_bytes(b"" if error is None or world.rank else _described(error))
    if not told:
        return
    if world.rank == 0 and error is not None:
        raise error
    note = json.loads(told)
    kind = getattr(storage_errors, note["kind"], None)
    if isinstance(kind, type) and issubclass(kind, StorageFileError):
        raise kind(note["path"], note["detail"])
    if note["kind"] == Stopped.__name__:
        raise Stopped(note["detail"])
    raise RuntimeError(f"rank 0 failed with {note['kind']}: {note['detail']}")


def _described(error: Exception) -> bytes:
    path, detail = (error.path, error.detail) if isinstance(error, StorageFileError) else ("", str(error))
    return json.dumps({"kind": type(error).__name__, "path": path, "detail": detail}).encode()
