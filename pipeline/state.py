"""StreamState: a position in a stream, as small arrays of references, and nothing of the samples' content.

    per lane        lane, lane_draws
    per sub-lane    unit, next_index, next_offset, draws, taken, epoch, over, held_count      (lane by lane, source by source)
    per held-back   held_shard, held_index, held_offset, held_size                            (in hold-back order)
    per rank        rank, pending_count, packer/<rank>/...
    per pending bag pending_round, pending_taken, pending_lane, pending_epoch, pending_source, pending_shard, pending_index,
                    pending_offset, pending_size                                              (in the packer's arrival order)

A rank's state holds its own lanes; merged, the states of all ranks hold every lane and can be dealt to another number of ranks.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from treadle.pipeline.order import Cursor, Drawn, Ended, Held, OrderPlan, Ref, Standing
from treadle.pipeline.pending import NUM_FIELDS
from treadle.pipeline.sources import Manifest
from treadle.shape import entries_of, require_count, shown

FORMAT: Final = 1
"""Version of the columns below."""

_LANE_COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {"lane": np.int32, "lane_draws": np.int64}
_SUB_LANE_COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {
    "unit": np.int64,
    "next_index": np.int64,
    "next_offset": np.int64,
    "draws": np.int64,
    "taken": np.int64,
    "epoch": np.int64,
    "over": np.int64,
}
_HELD_COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {
    "held_shard": np.int32,
    "held_index": np.int32,
    "held_offset": np.int64,
    "held_size": np.int64,
}
_PENDING_COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {
    "pending_round": np.int64,
    "pending_taken": np.int64,
    "pending_lane": np.int32,
    "pending_epoch": np.int32,
    "pending_source": np.int32,
    "pending_shard": np.int32,
    "pending_index": np.int32,
    "pending_offset": np.int64,
    "pending_size": np.int64,
}
_RANK_COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {"rank": np.int32, "pending_count": np.int64}

MOST: Final = 2**62
"""Above any count: what is added to one stays a 64-bit integer."""

Columns = dict[str, NDArray[Any]]


class Pending(NamedTuple):
    """A bag that waits in the packer, by reference: the key that its sample had when drawn, and where the sample is."""

    round: int
    taken: int
    lane: int
    epoch: int
    source: int
    shard: int
    sample_index: int
    offset: int
    size: int

    @property
    def held(self) -> Held:
        """Where its sample is."""
        return Held(self.sample_index, self.offset, self.size)


class Share(NamedTuple):
    """What one rank goes on from."""

    lane_draws: list[int]
    cursors: list[Cursor]
    pools: list[list[Ref]]
    pending: list[Pending]
    """In the packer's arrival order; in draw order where the lanes were dealt anew."""
    packer: Columns
    """The packer's own state; where the lanes were dealt anew, what it knows of each bag, to add to an empty packer."""
    exact: bool
    """Whether the packer goes on where it was."""


class Position:
    """The consumed position of one rank: follows the order by the moves that travel with each sample.

    Kept as lists of references that are shared between positions, so that following one sample is a few list operations and a
    snapshot one copy of each list.
    """

    def __init__(self, plan: OrderPlan, rank: int, world_size: int) -> None:
        self._lanes = list(range(rank, plan.lanes, world_size))
        self._rank_of_lane = {lane: number for number, lane in enumerate(self._lanes)}
        sources = range(len(plan.sources))
        self._lane_draws = [0] * len(self._lanes)
        self._cursors: list[Cursor] = [(lane, 0, 0, 0, 0, 0, False) for lane in self._lanes for _ in sources]
        self._pools: list[list[Ref]] = [[] for _ in self._cursors]

    def restore(self, share: Share) -> None:
        """Stands where `share` does."""
        self.stand((share.lane_draws, share.cursors, [list(refs) for refs in share.pools]))

    def stand(self, standing: Standing) -> None:
        """Stands where the order does: takes the lists over."""
        self._lane_draws, self._cursors, self._pools = standing

    def follow(self, step: Drawn | Ended) -> None:
        """Takes over what one step of the order changed."""
        for sub_lane, appended, slot, cursor in step.moves:
            pool = self._pools[sub_lane]
            if appended:
                pool += appended
            if slot >= 0:
                last = pool.pop()
                if slot < len(pool):
                    pool[slot] = last
            self._cursors[sub_lane] = cursor
        if isinstance(step, Drawn):
            self._lane_draws[self._rank_of_lane[step.key[2]]] = step.lane_draws

    def epochs(self) -> list[int | None]:
        """The epoch that each sub-lane stands in, None where it is over."""
        return [None if over else epoch for _, _, _, _, _, epoch, over in self._cursors]

    def snapshot(self) -> Callable[[], Columns]:
        """What builds the columns of this very position, whenever they are asked for."""
        standing = self._lane_draws.copy(), self._cursors.copy(), [refs.copy() for refs in self._pools]
        return partial(columns_of, self._lanes, lambda: standing)


def start_columns(lanes: int, sources: int, rank: int, world_size: int) -> Callable[[], Columns]:
    """What builds the columns of a rank that has drawn nothing."""
    own = range(rank, lanes, world_size)
    cursors: list[Cursor] = [(lane, 0, 0, 0, 0, 0, False) for lane in own for _ in range(sources)]
    return partial(columns_of, own, lambda: ([0] * len(own), cursors, [[] for _ in cursors]))


def columns_of(lanes: Sequence[int], standing: Callable[[], Standing]) -> Columns:
    """The columns of where the lanes stand."""
    lane_draws, cursors, pools = standing()
    table = np.array(cursors, np.int64).reshape(-1, len(_SUB_LANE_COLUMNS))
    built: Columns = {"lane": np.array(lanes, np.int32), "lane_draws": np.array(lane_draws, np.int64)}
    for place, name in enumerate(_SUB_LANE_COLUMNS):
        built[name] = table[:, place].copy()
    records = np.fromiter(chain.from_iterable(chain.from_iterable(pools)), np.int64).reshape(-1, len(_HELD_COLUMNS))
    for place, (name, dtype) in enumerate(_HELD_COLUMNS.items()):
        built[name] = records[:, place].astype(dtype)
    built["held_count"] = np.array([len(refs) for refs in pools], np.int64)
    return built


class StreamState:
    """A position in a stream: of one rank, or of all ranks once merged."""

    __slots__ = ("_build", "_columns", "_manifest", "_ranks", "_world_size")

    def __init__(self, manifest: str, world_size: int, ranks: Sequence[int], columns: Columns | Callable[[], Columns]) -> None:
        """Takes the manifest as canonical JSON, and the columns or what builds them when first asked for."""
        self._manifest = manifest
        self._world_size = world_size
        self._ranks = tuple(ranks)
        self._build = columns if callable(columns) else None
        self._columns = None if callable(columns) else columns

    @classmethod
    def of_rank(
        cls,
        manifest: str,
        rank: int,
        world_size: int,
        position: Callable[[], Columns],
        pending: Sequence[Pending] | Callable[[], Sequence[Pending]],
        packer: Callable[[], Mapping[str, NDArray[Any]]],
    ) -> Self:
        """The state of one rank, built when first asked for; nothing that is passed may change any more."""

        def columns() -> Columns:
            built = position()
            waiting = pending() if callable(pending) else pending
            built["rank"] = np.array([rank], np.int32)
            built["pending_count"] = np.array([len(waiting)], np.int64)
            for place, (name, dtype) in enumerate(_PENDING_COLUMNS.items()):
                built[name] = np.fromiter((bag[place] for bag in waiting), dtype, len(waiting))
            for name, values in packer().items():
                built[f"packer/{rank}/{name}"] = values
            return built

        return cls(manifest, world_size, (rank,), columns)

    @property
    def manifest(self) -> Manifest:
        """What the position depends on: sources, seed, lanes, shuffle, epochs, schema, shape, options."""
        return Manifest.from_dict(json.loads(self._manifest))

    @property
    def manifest_json(self) -> str:
        """The manifest as canonical JSON: equal for positions of one stream."""
        return self._manifest

    @property
    def world_size(self) -> int:
        """Ranks of the stream that this position belongs to."""
        return self._world_size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose lanes are held here."""
        return self._ranks

    @property
    def lanes(self) -> int:
        """Lanes of the stream, over all ranks."""
        return self.manifest.lanes

    @property
    def columns(self) -> Mapping[str, NDArray[Any]]:
        """The arrays named in the module's table."""
        return self._built()

    @property
    def samples(self) -> int:
        """Samples drawn so far by the ranks held here, those that wait in the packer included."""
        return int(self._built()["draws"].astype(np.int64).sum())

    def _built(self) -> Columns:
        if self._columns is None:
            assert self._build is not None
            self._columns = self._build()
            self._build = None
        return self._columns

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StreamState):
            return NotImplemented
        mine, theirs = self._built(), other._built()
        return (
            (self._manifest, self._world_size, self._ranks) == (other._manifest, other._world_size, other._ranks)
            and mine.keys() == theirs.keys()
            and all(mine[name].dtype == theirs[name].dtype and np.array_equal(mine[name], theirs[name]) for name in mine)
        )

    __hash__ = None  # type: ignore[assignment]  # two positions compare by content, and content is arrays

    def __repr__(self) -> str:
        columns = self._built()
        return (
            f"StreamState(ranks={list(self._ranks)} of {self._world_size}, lanes={len(columns['lane'])} of {self.lanes}, "
            f"samples={self.samples}, held={len(columns['held_shard'])}, pending={len(columns['pending_lane'])})"
        )

    def __reduce__(self) -> tuple[Callable[[bytes], "StreamState"], tuple[bytes]]:
        return StreamState.from_bytes, (self.to_bytes(),)

    def to_bytes(self) -> bytes:
        """This state as one safetensors file."""
        columns: Columns = {name: np.ascontiguousarray(values) for name, values in self._built().items()}
        columns["manifest"] = np.frombuffer(self._manifest.encode(), np.uint8)
        columns["format"] = np.array([FORMAT, self._world_size], np.int64)
        data: bytes = save(columns)
        return data

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "StreamState":
        """The state that `to_bytes` wrote.

        Raises:
            ValueError: `data` are no bytes, no stream state, or one of another version, or one that contradicts itself.
        """
        try:
            data = bytes(memoryview(data))
        except TypeError:
            raise ValueError(f"StreamState.from_bytes.data is {shown(data)}: it must be the bytes that to_bytes answered") from None
        try:
            columns: Columns = dict(load(data))
        except SafetensorError as error:
            raise ValueError(f"stream state: these {len(data)} bytes are not a safetensors file: {error}") from error
        version = columns.pop("format", None)
        manifest = columns.pop("manifest", None)
        if version is None or manifest is None or version.shape != (2,) or version.dtype != np.int64 or manifest.dtype != np.uint8:
            raise ValueError("stream state: the file holds no format and manifest: it was not written by StreamState.to_bytes")
        if int(version[0]) != FORMAT:
            raise ValueError(f"stream state: its format is {int(version[0])}, this version reads {FORMAT}: use the version that wrote it")
        try:
            text = manifest.tobytes().decode()
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"stream state: its manifest is not JSON: {error}") from error
        if not isinstance(fields, dict) or not isinstance(fields.get("lanes"), int) or not isinstance(fields.get("sources"), list):
            raise ValueError("stream state: its manifest names no lanes and sources")
        _check_columns(columns, int(version[1]), Manifest.from_dict(fields))
        return cls(text, int(version[1]), tuple(columns["rank"].tolist()), columns)

    @classmethod
    def merge(cls, states: Iterable["StreamState"]) -> "StreamState":
        """The states of all ranks as one, which can be dealt to any number of ranks; their order does not matter.

        Raises:
            ValueError: the states are of different streams or worlds, or a rank is there twice or missing.
        """
        given = entries_of(states)
        if given is None or not all(isinstance(state, StreamState) for state in given):
            raise ValueError(f"StreamState.merge.states is {shown(states)}: it must be a list of StreamStates, one per rank")
        if not given:
            raise ValueError("StreamState.merge: no states were given: pass one per rank")
        states = sorted(given, key=lambda state: state._ranks)
        first = states[0]
        for state in states:
            if state._manifest != first._manifest:
                found = first.manifest.differences(state.manifest)
                raise ValueError("StreamState.merge: the states belong to different streams: " + "; ".join(found))
            if state._world_size != first._world_size:
                raise ValueError(
                    f"StreamState.merge: states of {first._world_size} ranks and of {state._world_size} cannot meet: pass those of one run"
                )
        ranks = [rank for state in states for rank in state._ranks]
        missing = sorted(set(range(first._world_size)) - set(ranks))
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if missing or twice:
            raise ValueError(
                f"StreamState.merge: of {first._world_size} ranks, missing {missing}, there twice {twice}: pass each rank's state once"
            )
        built = [state._built() for state in states]
        columns: Columns = {}
        lanes = np.concatenate([each["lane"] for each in built])
        by_lane = np.argsort(lanes, kind="stable")
        for name in _LANE_COLUMNS:
            columns[name] = np.concatenate([each[name] for each in built])[by_lane]
        sources = len(np.concatenate([each["unit"] for each in built])) // len(lanes)
        by_sub_lane = (by_lane[:, None] * sources + np.arange(sources)).ravel()
        counts = np.concatenate([each["held_count"] for each in built]).astype(np.int64)
        ends = np.cumsum(counts)
        spans = [np.arange(ends[sub_lane] - counts[sub_lane], ends[sub_lane]) for sub_lane in by_sub_lane]
        for name in (*_SUB_LANE_COLUMNS, "held_count"):
            columns[name] = np.concatenate([each[name] for each in built])[by_sub_lane]
        held = np.concatenate(spans)
        for name in _HELD_COLUMNS:
            columns[name] = np.concatenate([each[name] for each in built])[held]
        for name in (*_RANK_COLUMNS, *_PENDING_COLUMNS):
            columns[name] = np.concatenate([each[name] for each in built])
        for each in built:
            columns.update({name: values for name, values in each.items() if name.startswith("packer/")})
        return cls(first._manifest, first._world_size, ranks, columns)

    def deal(self, rank: int, world_size: int) -> Share:
        """What rank `rank` of `world_size` goes on from.

        At the world size of this state that is the rank's own exact position, packer included. At another the lanes
        `l % world_size == rank` and their pending bags, sorted by the key that each had when drawn, whoever drew it.

        Raises:
            ValueError: this state does not hold what that rank needs, or a number is out of range.
        """
        world_size = require_count("StreamState.deal", "world_size", world_size, 1)
        rank = require_count("StreamState.deal", "rank", rank, 0, world_size - 1)
        columns = self._built()
        same = world_size == self._world_size
        if same and rank not in self._ranks:
            raise ValueError(f"this stream is rank {rank}, the state is of {list(self._ranks)}: load the rank's own state or a merged one")
        if not same and len(self._ranks) != self._world_size:
            raise ValueError(
                f"this stream is one of {world_size} ranks, the state is of rank {list(self._ranks)} of {self._world_size}: "
                "merge the states of all ranks with StreamState.merge and load that"
            )
        lanes: list[int] = columns["lane"].tolist()
        sources = len(columns["unit"]) // len(lanes)
        own = [place for place, lane in enumerate(lanes) if lane % world_size == rank]
        lane_draws: list[int] = columns["lane_draws"].tolist()
        cursors = list(zip(*(columns[name].tolist() for name in _SUB_LANE_COLUMNS), strict=True))
        held = list(zip(*(columns[name].tolist() for name in _HELD_COLUMNS), strict=True))
        counts: list[int] = columns["held_count"].tolist()
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        share_cursors: list[Cursor] = []
        pools: list[list[Ref]] = []
        for place in own:
            for sub_lane in range(place * sources, (place + 1) * sources):
                unit, next_index, next_offset, draws, taken, epoch, over = cursors[sub_lane]
                share_cursors.append((unit, next_index, next_offset, draws, taken, epoch, bool(over)))
                records = held[starts[sub_lane] : starts[sub_lane] + counts[sub_lane]]
                pools.append(records)
        pending = [Pending(*bag) for bag in zip(*(columns[name].tolist() for name in _PENDING_COLUMNS), strict=True)]
        packer: Columns
        if same:
            place = self._ranks.index(rank)
            bounds = np.concatenate([[0], np.cumsum(columns["pending_count"].astype(np.int64))]).tolist()
            pending = pending[bounds[place] : bounds[place + 1]]
            prefix = f"packer/{rank}/"
            packer = {name.removeprefix(prefix): values for name, values in columns.items() if name.startswith(prefix)}
        else:
            places = sorted((place for place, bag in enumerate(pending) if bag.lane % world_size == rank), key=pending.__getitem__)
            packer = _dealt(columns, self._ranks, places, len(pending))
            pending = [pending[place] for place in places]
        return Share([lane_draws[place] for place in own], share_cursors, pools, pending, packer, same)


def _dealt(columns: Columns, ranks: Sequence[int], places: Sequence[int], count: int) -> Columns:
    """What the packers of `ranks` know of the bags at `places` of all `count` that wait in them: item lengths and demands.

    Raises:
        ValueError: the packers' columns do not belong together.
    """
    items: list[int] = []
    lengths: list[int] = []
    demands: list[list[int]] = []
    # Packed batches have no packer behind them.
    for rank in ranks if count else ():
        try:
            of_rank = {name: columns[f"packer/{rank}/{name}"] for name in ("bag_items", "item_length", "demand", "bag_demand")}
            table = of_rank["demand"].reshape(-1, NUM_FIELDS)[of_rank["bag_demand"]]
        except (KeyError, ValueError, IndexError) as error:
            raise ValueError(f"stream state: the packer of rank {rank} does not say what its bags take: {error}") from None
        items += of_rank["bag_items"].tolist()
        lengths += of_rank["item_length"].tolist()
        demands += table.tolist()
    if not len(items) == len(demands) == count or sum(items) != len(lengths) or min(items, default=0) < 0:
        raise ValueError(f"stream state: {count} bags wait, the packers know of {len(items)} with {len(lengths)} items")
    starts = [0, *accumulate(items)]
    return {
        "bag_items": np.array([items[place] for place in places], np.int64),
        "item_length": np.array([length for place in places for length in lengths[starts[place] : starts[place + 1]]], np.int64),
        "demand": np.array([demands[place] for place in places], np.int64).reshape(-1),
        "bag_demand": np.arange(len(places)),
    }


def _check_columns(columns: Columns, world_size: int, manifest: Manifest) -> None:
    """Refuses arrays that cannot be a state, before anything is built from them."""

    def column(name: str, dtype: type[np.generic], length: int | None) -> NDArray[Any]:
        values = columns.get(name)
        if values is None or values.dtype != dtype or values.ndim != 1 or (length is not None and len(values) != length):
            found = "missing" if values is None else f"{values.dtype} {list(values.shape)}"
            raise ValueError(f"stream state: column {name} is {found}: expected {np.dtype(dtype)} [{'any' if length is None else length}]")
        if name not in ("held_offset", "pending_offset") and len(values) and int(values.astype(np.int64).min()) < 0:
            raise ValueError(f"stream state: column {name} holds a negative number")
        if len(values) and not -MOST < int(values.min()) <= int(values.max()) < MOST:
            raise ValueError(f"stream state: column {name} holds a number of 2^62 or more")
        return values

    lanes, sources = manifest.lanes, len(manifest.sources)
    if world_size < 1 or lanes < 1:
        raise ValueError(f"stream state: {world_size} ranks and {lanes} lanes: both must be at least 1")
    rank = column("rank", np.int32, None)
    lane = column("lane", np.int32, None)
    ranks: list[int] = rank.tolist()
    if not ranks or ranks != sorted(set(ranks)) or ranks[-1] >= world_size:
        raise ValueError(f"stream state: ranks {ranks} are not some of 0 to {world_size - 1}, ascending")
    if len(lane) > lanes or lane.tolist() != [each for each in range(lanes) if each % world_size in set(ranks)]:
        raise ValueError(f"stream state: lanes {lane.tolist()} are not those of ranks {ranks} of {world_size}")
    column("lane_draws", np.int64, len(lane))
    sub_lanes = len(lane) * sources
    for name in _SUB_LANE_COLUMNS:
        column(name, np.int64, sub_lanes)
    held = int(column("held_count", np.int64, sub_lanes).astype(np.int64).sum())
    for name, dtype in _HELD_COLUMNS.items():
        column(name, dtype, held)
    shards = np.array([source.num_shards for source in manifest.sources])
    held_source = np.repeat(np.tile(np.arange(sources), len(lane)), columns["held_count"].astype(np.int64))
    if len(held_source) and (columns["held_shard"].astype(np.int64) >= shards[held_source]).any():
        raise ValueError("stream state: column held_shard names a shard that its source does not have")
    pending = int(column("pending_count", np.int64, len(ranks)).astype(np.int64).sum())
    for name, dtype in _PENDING_COLUMNS.items():
        column(name, dtype, pending)
    for name in columns:
        if name.startswith("packer/"):
            column(name, np.int64, None)
    if pending and int(columns["pending_source"].astype(np.int64).max()) >= sources:
        raise ValueError("stream state: column pending_source names a source that the manifest does not have")
    if pending and (columns["pending_shard"].astype(np.int64) >= shards[columns["pending_source"].astype(np.int64)]).any():
        raise ValueError("stream state: column pending_shard names a shard that its source does not have")
