"""What a stream counts and times over all its passes, and which of its stages the others wait for.

read      draws samples, reads and labels them        this thread; waits for storage, and while enough is ahead
decode    content to payloads                          workers; wait for samples, and while the byte limit is reached
pack      placement, copies                            this thread; waits for the head to be decoded, and for the next to be asked for
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from treadle.pipeline.quarantine import Quarantine
from treadle.pipeline.shard_counts import ShardCounts

STAGES = ("read", "decode", "pack", "consumer")
"""What can limit a stream; `consumer` is whoever asks for the batches, a training step as a rule."""


@dataclass(slots=True)
class Ledger:
    """What a stream counts over all its passes."""

    quarantine: Quarantine
    left_out: Counter[str]
    """Files that the schema or the shape left out, by reason."""
    shard_counts: ShardCounts = field(default_factory=ShardCounts)
    """What was skipped or odd in the shards themselves."""
    unfit_bags: int = 0
    """Samples whose items could never fit one batch together."""
    unfit_items: int = 0
    samples: int = 0
    read_bytes: int = 0
    """Tar bytes of the samples consumed."""
    batches: int = 0
    batch_bytes: int = 0
    """Used bytes of the batches."""
    elapsed_s: float = 0.0
    """From the first batch asked for to the last one handed out."""
    read_s: float = 0.0
    """Drawing, reading, labelling, waits for storage included."""
    storage_s: float = 0.0
    """Waits for storage."""
    full_s: float = 0.0
    """While enough was ahead."""
    inline_s: float = 0.0
    """Decoding in this thread."""
    pack_s: float = 0.0
    consumer_s: float = 0.0
    """Between a batch handed out and the next one asked for."""
    worked_s: float = 0.0
    """Decoding, over all workers."""
    worker_s: float = 0.0
    """What the workers were there for: their number times the time since the first task."""
    waited_s: float = 0.0
    """Waits for the head to be decoded."""
    decoded_bytes: int = 0
    peak_bytes: int = 0
    _asked_s: float = 0.0
    _answered_s: float = 0.0

    def asked(self) -> float:
        """A batch is asked for; the clock."""
        now = self._asked_s = time.perf_counter()
        if self._answered_s:
            self.consumer_s += now - self._answered_s
            self.elapsed_s += now - self._answered_s
        return now

    def answered(self) -> None:
        """A batch, or the end, is handed out."""
        self._answered_s = time.perf_counter()
        self.elapsed_s += self._answered_s - self._asked_s

    def count(self, samples: int, size: int, read_s: float) -> None:
        """Counts samples consumed, their tar bytes, and the seconds that drawing them took."""
        self.samples += samples
        self.read_bytes += size
        self.read_s += read_s

    def losses(self) -> str:
        """What did not become part of a batch, in one line; empty where all of it did."""
        found = [self.quarantine.summary()] if self.quarantine.total else []
        if self.unfit_bags:
            found.append(f"{self.unfit_bags} samples ({self.unfit_items} items) can fit no batch of this shape")
        for name, counts in (("left out", self.left_out), ("in the shards", self.shard_counts.total())):
            if counts:
                found.append(f"{name}: " + ", ".join(f"{count} {reason}" for reason, count in counts.most_common()))
        return "; ".join(found)

    def stats(self, workers: int, in_flight_bytes: int) -> dict[str, Any]:
        """What `ShardStream.stats` answers."""
        elapsed_s = max(self.elapsed_s, 1e-9)
        reading_s = max(0.0, self.read_s - self.storage_s)
        idle_s = max(0.0, self.worker_s - self.worked_s)
        room_s = min(idle_s, self.full_s * max(1, workers))
        return {
            "limiting_stage": self._limiting(room_s),
            "elapsed_s": self.elapsed_s,
            "read": {
                "busy_s": reading_s,
                "wait_input_s": self.storage_s,
                "wait_room_s": self.full_s,
                "samples": self.samples,
                "bytes": self.read_bytes,
                "bytes_per_s": self.read_bytes / elapsed_s,
            },
            "decode": {
                "busy_s": self.worked_s + self.inline_s,
                "wait_input_s": idle_s - room_s,
                "wait_room_s": room_s,
                "workers": workers,
                "bytes": self.decoded_bytes,
                "bytes_per_s": self.decoded_bytes / elapsed_s,
                "in_flight_bytes": in_flight_bytes,
                "peak_bytes": self.peak_bytes,
            },
            "pack": {
                "busy_s": self.pack_s,
                "wait_input_s": self.waited_s,
                "wait_room_s": self.consumer_s,
                "batches": self.batches,
                "bytes": self.batch_bytes,
                "bytes_per_s": self.batch_bytes / elapsed_s,
                "unfit_bags": self.unfit_bags,
                "unfit_items": self.unfit_items,
            },
        }

    def _limiting(self, room_s: float) -> str:
        """The stage that the others wait for; empty before the first batch."""
        if not self.batches:
            return ""
        shares = {"read": self.read_s, "decode": self.inline_s, "pack": self.pack_s, "consumer": self.consumer_s}
        # Waits for the head are the workers' doing if they were busy, and the reader's if they had nothing to do.
        shares["decode" if 2 * self.worked_s >= self.worker_s - room_s else "read"] += self.waited_s
        return max(shares, key=shares.__getitem__)
