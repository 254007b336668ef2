"""What was skipped or odd in each shard, beside its samples: counted once however often it is read, and warned of once."""

import logging
import threading
from collections import Counter
from typing import Final

from treadle.pipeline.storage import public_url

logger = logging.getLogger(__name__)

EXPECTED: Final = frozenset({"skipped_directory", "skipped_hidden", "skipped_macos"})
"""Members that every tar tool writes along: counted, not worth a warning."""

_MEANING: Final = {
    "no_end_marker": "it ends without the blocks that end an archive: it may have been cut between two files",
    "key_seen_again": "keys come again after other samples: the files of a sample must stand next to each other, or they are two samples",
    "key_cut_in_number": "keys end at the first dot, which stands within a number (22.05.png is field 05.png of key 22): rename the files",
    "skipped_no_field": "files without an extension belong to no sample",
}


class ShardCounts:
    """Counts by shard and kind: the most that any one reading of the shard met, since all its parts and epochs meet the same."""

    def __init__(self) -> None:
        self._by_url: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()

    def note(self, url: str, found: Counter[str]) -> None:
        """Takes over what one reading met, and warns of each kind that is new to the shard."""
        if not found:
            return
        with self._lock:
            known = self._by_url.setdefault(url, Counter())
            fresh = {kind: count for kind, count in found.items() if kind not in known}
            known |= found
            self._by_url[url] = known
        for kind, count in fresh.items():
            if kind not in EXPECTED:
                meaning = _MEANING.get(kind, "members that are no files are not read")
                logger.warning("shard %s: %s (%d): %s", public_url(url), kind, count, meaning)

    def of(self, url: str) -> Counter[str]:
        """The counts of one shard."""
        with self._lock:
            return Counter(self._by_url.get(url, ()))

    def total(self) -> Counter[str]:
        """The counts of all shards."""
        with self._lock:
            return sum(self._by_url.values(), Counter())
