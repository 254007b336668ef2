"""The packer against a slow, obvious oracle: random items, bags, labels, relations and capacities, for one step and for streams.

The oracle knows a batch only by what it must mean: every bag whole, once, at places that do not overlap; every label, choice, target and
edge that of its item; no capacity passed; no bag waiting for more than two windows; what is refused could not have fitted.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.pipeline import BatchShape, Edges, PackedBatch, Packer, Relations, StepItems
from treadle.pipeline.batch_file import batch_from_bytes, batch_parts

COLUMNS = 14
EDGE_SETS = ("attract", "repel", "ignore")


@dataclass
class Late:
    max_query_span: int
    max_query_tokens_per_device: int
    max_documents_per_device: int
    max_document_tokens_per_device: int


class Item(NamedTuple):
    """One text and all that is said of it."""

    text: bytes
    group: int
    temperature_group: int
    side: int
    identity: int
    legal: bytes
    targets: tuple[float, ...]

    @property
    def positions(self) -> int:
        return 1 + len(self.text) + bool(self.legal)


@dataclass
class Step:
    """Items, their bags, and their edges: (source, target, weight)."""

    items: list[Item]
    bags: list[int] = field(default_factory=list)
    edges: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    with_ids: bool = True

    def columns(self, *, with_bags: bool = True) -> StepItems:
        named = {}
        for name in EDGE_SETS:
            edges = self.edges.get(name, {})
            runs = [[target for source, target in sorted(edges) if source == item] for item in range(len(self.items))]
            named[name] = Edges(
                np.cumsum([0, *map(len, runs)]), [target for run in runs for target in run], [edges[pair] for pair in sorted(edges)]
            )
        return StepItems(
            [0] * len(self.items),
            [item.text for item in self.items],
            bags=self.bags if with_bags else None,
            temperature_groups=[item.temperature_group for item in self.items],
            sides=[item.side for item in self.items],
            groups=[item.group for item in self.items],
            ids=[item.identity for item in self.items] if self.with_ids else None,
            choices=[item.legal or None for item in self.items],
            choice_targets=[item.targets or None for item in self.items],
            relations=Relations(**named),
        )


class Limits(NamedTuple):
    rows: int
    segments: int
    bags: int
    edges: int
    late: Late | None

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            max_rows_per_device=self.rows,
            max_segments_per_device=self.segments,
            max_columns_per_row=COLUMNS,
            max_bags_per_device=self.bags,
            max_choices_per_item=4,
        )

    def use(self, items: list[Item], num_bags: int, edges: dict[str, int]) -> list[tuple[int, int]]:
        """What a batch of these takes of each capacity but the positions, beside the capacity."""
        found = [(len(items), self.segments), (num_bags, self.bags), *((edges[name], self.edges) for name in EDGE_SETS)]
        if self.late is not None:
            queries = [min(len(item.text), self.late.max_query_span) for item in items if item.side & 1]
            documents = [len(item.text) for item in items if item.side & 2]
            found += [
                (sum(queries), self.late.max_query_tokens_per_device),
                (len(documents), self.late.max_documents_per_device),
                (sum(documents), self.late.max_document_tokens_per_device),
            ]
        return found

    def could_fit(self, bag: Step) -> bool:
        """Whether one batch could hold this bag alone, by trying every row for every item."""
        counts = {name: len(bag.edges.get(name, {})) for name in EDGE_SETS}
        if any(used > most for used, most in self.use(bag.items, 1, counts)):
            return False
        lengths = sorted((item.positions for item in bag.items), reverse=True)

        def place(at: int, free: tuple[int, ...]) -> bool:
            if at == len(lengths):
                return True
            return any(
                place(at + 1, tuple(sorted([*free[:row], size - lengths[at], *free[row + 1 :]])))
                for row, size in enumerate(free)
                if size >= lengths[at] and (not row or free[row - 1] != size)
            )

        return place(0, (COLUMNS,) * self.rows)


@st.composite
def items(draw: st.DrawFn) -> Item:
    text = draw(st.binary(min_size=1, max_size=COLUMNS - 2))
    legal = bytes(draw(st.lists(st.integers(65, 70), max_size=4, unique=True))) if draw(st.booleans()) else b""
    shares = [draw(st.integers(1, 9)) for _ in legal]
    return Item(
        text,
        draw(st.one_of(st.just(0), st.integers(-(2**63), 2**63 - 1))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 2**64 - 1)),
        legal,
        tuple(share / sum(shares) for share in shares),
    )


@st.composite
def steps(draw: st.DrawFn, most: int, *, with_ids: bool) -> Step:
    found = draw(st.lists(items(), min_size=1, max_size=most))
    count = len(found)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    edges: dict[str, dict[tuple[int, int], float]] = {}
    if pairs:
        for name in EDGE_SETS:
            chosen = draw(st.lists(st.sampled_from(pairs), max_size=5, unique=True))
            edges[name] = {pair: draw(st.sampled_from([0.0, 0.25, 3.0])) for pair in chosen}
    return Step(found, draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), edges, with_ids)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    late = Late(draw(st.integers(1, 9)), draw(st.integers(4, 40)), draw(st.integers(1, 6)), draw(st.integers(8, 60)))
    return Limits(
        draw(st.integers(1, 4)),
        draw(st.integers(2, 10)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 9)),
        late if draw(st.booleans()) else None,
    )


def check_places(batch: PackedBatch) -> None:
    owners: dict[tuple[int, int], int] = {}
    for segment in range(batch.segments):
        for column in range(int(batch.start[segment]), int(batch.start[segment] + batch.length[segment])):
            assert (int(batch.row[segment]), column) not in owners
            owners[int(batch.row[segment]), column] = segment
    expected = [[owners.get((row, column), -1) for column in range(COLUMNS)] for row in range(batch.shape.max_rows_per_device)]
    assert batch.document_ids().tolist() == expected
    for line in expected:
        # In a row nothing is left free between segments.
        assert -1 not in line[: len(line) - line.count(-1)]
    in_order = [at for line in expected for at in line if at >= 0]
    lengths = [in_order.count(segment) for segment in dict.fromkeys(in_order)]
    assert batch.cu_seqlens().tolist() == [0, *np.cumsum(lengths).tolist()]


def check_item(batch: PackedBatch, segment: int, item: Item) -> None:
    assert batch.payload(segment).tobytes() == item.text and batch.modality[segment] == 0
    assert batch.grid[segment].tolist() == [len(item.text), 1, 1] and batch.extent[segment].tolist() == [1, 1, len(item.text)]
    assert batch.length[segment] == item.positions
    assert (batch.group[segment], batch.temperature_group[segment], batch.side[segment]) == (item.group, item.temperature_group, item.side)
    data, offsets = batch.choices
    targets, target_offsets = batch.choice_targets
    assert data[offsets[segment] : offsets[segment + 1]].tobytes() == item.legal
    assert targets[target_offsets[segment] : target_offsets[segment + 1]].tolist() == [float(np.float32(target)) for target in item.targets]


def check_edges(batch: PackedBatch, expected: dict[str, dict[tuple[int, int], float]]) -> None:
    for name in EDGE_SETS:
        edges: Edges = getattr(batch, name)
        edges.check(batch.shape.max_segments_per_device, name)
        found = dict(zip(zip(edges.sources().tolist(), edges.ids.tolist(), strict=True), edges.weights.tolist(), strict=True))
        assert found == expected[name]


def check_counts(batch: PackedBatch, packed: list[Item], bounds: Limits) -> None:
    assert batch.positions == sum(item.positions for item in packed) <= bounds.rows * COLUMNS
    assert batch.tokens == sum(len(item.text) for item in packed)
    counts = {name: len(getattr(batch, name)) for name in EDGE_SETS}
    for used, most in bounds.use(packed, batch.bags, counts):
        assert used <= most
    assert all(0 <= share <= 1 for share in batch.fill.values())
    # What is written and read back is the same, and passes every check of a file.
    assert batch_from_bytes(b"".join(map(bytes, batch_parts(batch)))) == batch


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps(9, with_ids=True) | steps(9, with_ids=False), limits())
def test_one_step(step: Step, bounds: Limits) -> None:
    batch = Packer(bounds.shape, max_edges=bounds.edges, late_interaction=bounds.late).pack(step.columns())
    check_places(batch)
    packed = batch.item[: batch.segments].tolist()
    assert len(set(packed)) == len(packed) and batch.items == len(step.items) and batch.dropped == len(step.items) - len(packed)
    # Bags whole, numbered by the first of their items, their items in order.
    labels = [step.bags[item] for item in packed]
    assert Counter(labels) == Counter(label for label in step.bags if label in labels)
    assert packed == sorted(packed, key=lambda item: (step.bags.index(step.bags[item]), item))
    assert batch.bag[: len(packed)].tolist() == [list(dict.fromkeys(labels)).index(label) for label in labels]
    for segment, number in enumerate(packed):
        check_item(batch, segment, step.items[number])
        assert batch.id[segment] == (step.items[number].identity if step.with_ids else number)
    assert batch.ids_defaulted == (not step.with_ids) or not packed
    expected = {
        name: {(packed.index(a), packed.index(b)): w for (a, b), w in step.edges.get(name, {}).items() if a in packed and b in packed}
        for name in EDGE_SETS
    }
    check_edges(batch, expected)
    assert batch.dropped_edges == sum(map(len, step.edges.values())) - sum(map(len, expected.values()))
    check_counts(batch, [step.items[number] for number in packed], bounds)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data(), limits(), st.integers(1, 3))
def test_a_stream(data: st.DataObject, bounds: Limits, window: int) -> None:
    bags = data.draw(st.lists(steps(4, with_ids=True), min_size=1, max_size=25))
    packer = Packer(bounds.shape, window=window, max_edges=bounds.edges, late_interaction=bounds.late)
    # The oracle tells bags apart by the ids of their items, which are made different.
    bags = [
        Step([item._replace(identity=number << 8 | place) for place, item in enumerate(bag.items)], edges=bag.edges)
        for number, bag in enumerate(bags)
    ]
    batches: list[PackedBatch] = []
    arrived: dict[int, int] = {}
    refused = refused_edges = 0
    for number, bag in enumerate(bags):
        while packer.ready():
            batches.append(packer.take())
        if packer.add(bag.columns(with_bags=False)):
            arrived[number] = len(batches)
        else:
            assert not bounds.could_fit(bag)
            refused, refused_edges = refused + len(bag.items), refused_edges + sum(map(len, bag.edges.values()))
    batches += packer.flush()
    if not batches:
        batches.append(packer.take())
    seen: list[int] = []
    for taken, batch in enumerate(batches):
        check_places(batch)
        identities = [int(identity) for identity in batch.id[: batch.segments]]
        numbers = list(dict.fromkeys(identity >> 8 for identity in identities))
        assert numbers == sorted(numbers) and batch.bags == len(numbers)
        # Whole bags, one after the other.
        assert identities == [item.identity for number in numbers for item in bags[number].items]
        segment_of = {identity: segment for segment, identity in enumerate(identities)}
        packed = [item for number in numbers for item in bags[number].items]
        for segment, item in enumerate(packed):
            check_item(batch, segment, item)
        expected: dict[str, dict[tuple[int, int], float]] = {name: {} for name in EDGE_SETS}
        for number in numbers:
            for name, edges in bags[number].edges.items():
                for (source, target), weight in edges.items():
                    expected[name][segment_of[number << 8 | source], segment_of[number << 8 | target]] = weight
        check_edges(batch, expected)
        check_counts(batch, packed, bounds)
        seen += numbers
        assert all(taken - arrived[number] < 2 * window for number in numbers)
    assert sorted(seen) == sorted(arrived)
    assert sum(batch.dropped for batch in batches) == refused or packer.take().dropped + sum(batch.dropped for batch in batches) == refused
    assert refused_edges >= sum(batch.dropped_edges for batch in batches)
