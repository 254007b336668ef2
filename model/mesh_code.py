"""Which code a rank runs: a version number says nothing of a checkout that somebody edits."""

import hashlib
import importlib.util
from pathlib import Path

PACKAGES = ("treadle", "treadle.decoders", "treadle.kernels", "treadle.launch", "treadle.model", "treadle.pipeline")


def code_digest() -> str:
    """A digest of the package's source files, by their names and bytes; nothing is imported for it."""
    digest = hashlib.blake2b(digest_size=8)
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(folder).glob("*.py")):
                data = path.read_bytes()
                digest.update(f"{package}/{path.name} {len(data)}\n".encode())
                digest.update(data)
    return digest.hexdigest()
