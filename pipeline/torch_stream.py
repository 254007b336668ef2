"""TorchStream: a shard stream as a torch `IterableDataset`, for any trainer and any number of DataLoader workers.

Each worker owns a share of the rank's lanes, as if it were a rank of its own: worker `w` of `n` on rank `r` of `W` is rank
`r * n + w` of `W * n`. Batches come whole, so the DataLoader takes `batch_size=None`.

    loader = stream.loader(num_workers=4)
    for batch in loader:
        ...
        checkpoint["data"] = stream.state_dict()
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from treadle.pipeline.batch import PackedBatch
from treadle.pipeline.state import StreamState
from treadle.pipeline.stream import ShardStream
from treadle.shape import entries_of, require_count, require_member, shown

if TYPE_CHECKING:
    Batches = IterableDataset[PackedBatch]
else:
    Batches = IterableDataset


_KEYS = ("states", "merged", "readers", "next_reader")
"""What `state_dict` answers."""

PREFETCHED: Final = 2
"""Batches that a DataLoader has each worker make before it hands one out, unless told otherwise."""


def _shared_counts() -> torch.Tensor:
    """Two numbers at 0 that worker processes share, however they are started; where the system has no shared memory, their own."""
    counts = torch.zeros(2, dtype=torch.int64)
    untyped: Any = counts
    with suppress(RuntimeError):
        untyped.share_memory_()
    return counts


class TorchStream(Batches):
    """Yields the `PackedBatch`es of a `ShardStream`, with `state_dict` and `load_state_dict`.

    The state is that of the batches that have been *handed out*, however many a DataLoader has fetched ahead. Without workers, and
    in `loader()`, that is known by itself. With a DataLoader of one's own and workers, call `observe(batch)` for each batch that it
    gives; a loader that keeps each worker's `state_dict` itself (torchdata's StatefulDataLoader) needs neither. Reading begins where
    the stream stands, or where `load_state_dict` says.
    """

    def __init__(self, stream: ShardStream) -> None:
        """
        Raises:
            ValueError: `stream` is none.
        """
        super().__init__()
        require_member("TorchStream", "stream", stream, ShardStream)
        self.stream = stream
        self._states: dict[int, StreamState] = {}
        """By rank among all readers, the position after the last batch handed out."""
        self._loaded: StreamState | None = None
        """A merged state that no reader has gone on from yet."""
        self._readers = 1
        """Workers that the states above belong to."""
        self._next_reader = 0
        """Which reader the next batch comes from; a DataLoader asks them in turn."""
        self._made = _shared_counts()
        """Seen by all processes: most batches that a worker has made, and how many have been observed."""

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        if worker is None:
            self._readers = 1
            for batch in self._going_on(self.stream):
                self.observe(batch)
                yield batch
            return
        # The worker that is asked first goes on where the next batch is due.
        number = (worker.id + self._next_reader) % worker.num_workers
        with self._going_on(self._part(number, worker.num_workers)) as stream:
            for count, batch in enumerate(stream, 1):
                # What this copy knows is its own position; whose turn is next is known where the batches arrive.
                assert batch.state is not None
                self._states[stream.rank] = batch.state
                self._made[0] = max(count, int(self._made[0]))
                yield batch

    def _part(self, number: int, count: int) -> ShardStream:
        """What one of `count` workers reads, from where the stream stands.

        Raises:
            ValueError: the stream is one of several ranks and has begun: its lanes are dealt anew with those of all others.
        """
        part = self.stream.split(number, count)
        if part.rank not in self._states and self._loaded is None and self.stream.state.samples:
            part.load_state(self.stream.state)
        return part

    def _going_on(self, stream: ShardStream) -> ShardStream:
        """`stream`, from the loaded state where there is one."""
        # Readers that have handed out nothing stand at the beginning, however many they were.
        readers = {state.world_size for state in self._states.values() if state.samples}
        if readers - {stream.world_size}:
            raise ValueError(
                f"the loaded state is of {max(readers)} readers over all ranks, now there are {stream.world_size}: merge the state_dicts of "
                "all ranks with TorchStream.merge and load that"
            )
        state = self._states.get(stream.rank, self._loaded)
        if state is not None and (state is self._loaded or state.world_size == stream.world_size):
            stream.load_state(state)
        return stream

    def observe(self, batch: PackedBatch) -> None:
        """Notes that `batch` has been handed out.

        Raises:
            ValueError: it does not come from a stream.
        """
        require_member("TorchStream.observe", "batch", batch, PackedBatch)
        state = batch.state
        if state is None:
            raise ValueError("observe: this batch carries no state: it does not come from a ShardStream")
        self._states[state.ranks[0]] = state
        self._made[1] += 1
        self._readers = max(1, state.world_size // self.stream.world_size)
        self._next_reader = (state.ranks[0] - self.stream.rank * self._readers + 1) % self._readers

    def loader(self, *, num_workers: int = 0, prefetch_factor: int | None = None, **options: Any) -> Iterator[PackedBatch]:
        """The batches through a DataLoader, observed as they are handed out.

        Args:
            num_workers: processes that read; 0 reads in this one.
            prefetch_factor: batches that each worker reads ahead; None leaves it to the DataLoader.
            options: any other option of a DataLoader.

        Raises:
            ValueError: a number is out of range, or as the DataLoader.
        """
        num_workers = require_count("TorchStream.loader", "num_workers", num_workers, 0, 4096)
        if prefetch_factor is not None:
            prefetch_factor = require_count("TorchStream.loader", "prefetch_factor", prefetch_factor, 1)
        loader: DataLoader[PackedBatch] = DataLoader(
            self, batch_size=None, num_workers=num_workers, prefetch_factor=prefetch_factor, **options
        )
        for batch in loader:
            self.observe(batch)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out: bytes and numbers only; in a worker, of that worker.

        Raises:
            ValueError: a DataLoader of one's own has handed out batches of its workers, and none was observed.
        """
        states, merged = dict(self._states), self._loaded
        if get_worker_info() is None:
            made, observed = (int(count) for count in self._made)
            if made > PREFETCHED and not observed:
                raise ValueError(
                    "TorchStream.state_dict: workers have made batches, and none was observed, so that nobody knows which of them were "
                    "handed out: call observe(batch) for each batch of the DataLoader, or take the batches from loader()"
                )
            if states or merged is None:
                # A reader that has handed nothing out yet stands where it began.
                for number in range(self._readers):
                    rank = self.stream.rank * self._readers + number
                    if rank not in states:
                        with self._part(number, self._readers) as part:
                            if merged is not None:
                                part.load_state(merged)
                            states[rank] = part.state
                merged = None
        return {
            "states": {rank: state.to_bytes() for rank, state in sorted(states.items())},
            "merged": None if merged is None else merged.to_bytes(),
            "readers": self._readers,
            "next_reader": self._next_reader,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict`, or `merge`, answered.

        Raises:
            ValueError: it is no such thing, or belongs to another stream.
        """
        require_member("TorchStream.load_state_dict", "state_dict", state_dict, Mapping)
        missing = [name for name in _KEYS if name not in state_dict]
        if missing:
            raise ValueError(f"load_state_dict: {', '.join(missing)} missing: pass what state_dict or merge answered")
        self._states = {int(rank): StreamState.from_bytes(data) for rank, data in state_dict["states"].items()}
        merged = state_dict["merged"]
        self._loaded = None if merged is None else StreamState.from_bytes(merged)
        self._readers, self._next_reader = int(state_dict["readers"]), int(state_dict["next_reader"])
        self._made.zero_()

    @staticmethod
    def merge(state_dicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The state_dicts of all ranks as one, to be loaded by any number of ranks and workers.

        Raises:
            ValueError: a reader's state is there twice or missing, or one is no state_dict.
        """
        given = entries_of(state_dicts)
        if given is None or not all(isinstance(each, Mapping) and {*_KEYS} <= each.keys() for each in given):
            raise ValueError(f"TorchStream.merge.state_dicts is {shown(state_dicts)}: it must be a list of what state_dict answered")
        if any(each["merged"] is not None for each in given):
            raise ValueError(
                "TorchStream.merge: a reader has not handed out a batch since a merged state was loaded: merge after its first one"
            )
        states = [StreamState.from_bytes(data) for each in given for data in each["states"].values()]
        return {"states": {}, "merged": StreamState.merge(states).to_bytes(), "readers": 1, "next_reader": 0}
