"""The packer by its promises: whole bags, capacities, relations, counts, streams that resume."""

import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.decoders import DecodeError
from treadle.pipeline import BatchShape, Edges, PackedBatch, Packer, Relations, StepItems
from treadle.pipeline.bag import DecodedBag, decode_bag


def shape_of(rows: int = 4, segments: int = 16, columns: int = 32, **more: Any) -> BatchShape:
    return BatchShape(max_rows_per_device=rows, max_segments_per_device=segments, max_columns_per_row=columns, **more)


def texts(*lengths: int, **columns: Any) -> StepItems:
    """Texts of so many positions each, prefix included."""
    return StepItems([0] * len(lengths), [bytes([65 + item % 26]) * (length - 1) for item, length in enumerate(lengths)], **columns)


@dataclass
class Late:
    max_query_span: int = 0
    max_query_tokens_per_device: int = 0
    max_documents_per_device: int = 0
    max_document_tokens_per_device: int = 0


def check_places(batch: PackedBatch) -> None:
    """Segments lie back to back in their rows, in order, and the positions say the same."""
    ends = [0] * batch.shape.max_rows_per_device
    expected = np.full_like(batch.position_segment, -1)
    for segment in range(batch.segments):
        row, start, length = int(batch.row[segment]), int(batch.start[segment]), int(batch.length[segment])
        assert start == ends[row]
        ends[row] += length
        expected[row, start : start + length] = segment
    assert max(ends) <= batch.shape.max_columns_per_row
    assert np.array_equal(batch.position_segment, expected)
    assert (np.diff(batch.bag[: batch.segments]) >= 0).all()
    assert all(0 <= share <= 1 for share in batch.fill.values())


def test_a_step_that_fits_keeps_its_order() -> None:
    batch = Packer(shape_of()).pack(
        texts(5, 9, 3, ids=[7, 8, 9], groups=[-1, 0, 5], temperature_groups=[0, 3, 1], sides=["none", "query", "document"])
    )
    assert batch.segments == 3 and batch.bags == 3 and batch.items == 3 and batch.dropped == 0
    assert batch.tokens == 4 + 8 + 2 and batch.positions == 17
    assert batch.item[:3].tolist() == [0, 1, 2] and batch.id[:3].tolist() == [7, 8, 9] and not batch.ids_defaulted
    assert (
        batch.group[:3].tolist() == [-1, 0, 5]
        and batch.temperature_group[:3].tolist() == [0, 3, 1]
        and batch.side[:3].tolist() == [0, 1, 2]
    )
    assert [batch.payload(segment).tobytes() for segment in range(3)] == [b"AAAA", b"BBBBBBBB", b"CC"]
    assert batch.grid[:3].tolist() == [[4, 1, 1], [8, 1, 1], [2, 1, 1]] and batch.extent[:3].tolist() == [[1, 1, 4], [1, 1, 8], [1, 1, 2]]
    assert batch.closed_by == "end" and batch.state is None
    check_places(batch)


def test_ids_default_to_the_items_index() -> None:
    batch = Packer(shape_of(rows=1)).pack(texts(30, 20, 2))
    assert batch.item[:2].tolist() == [0, 2] and batch.id[:2].tolist() == [0, 2] and batch.ids_defaulted


def test_no_items_make_an_empty_batch() -> None:
    packer = Packer(shape_of())
    for batch in (packer.pack(StepItems([], [])), packer.take()):
        assert batch.segments == batch.bags == batch.tokens == batch.items == 0
        assert batch.fill == {"positions": 0.0, "segments": 0.0, "bags": 0.0, "edges": 0.0}
        assert (batch.position_segment == -1).all() and batch.tape_offsets[-1] == 0
    assert list(packer.flush()) == [] and not packer.ready()


def test_bags_are_admitted_whole_or_dropped() -> None:
    # Bag 1 needs 20 + 20 columns; two rows of 32 hold bag 0 and one of the two.
    items = texts(20, 20, 6, 20, 4, bags=[0, 1, 2, 1, 0])
    batch = Packer(shape_of(rows=2)).pack(items)
    assert batch.item[: batch.segments].tolist() == [0, 4, 2]
    assert batch.bag[: batch.segments].tolist() == [0, 0, 1]
    assert batch.dropped == 2 and batch.items == 5 and batch.bags == 2
    assert batch.closed_by == "positions"
    check_places(batch)


def test_a_step_that_fits_in_arrival_order_is_not_dropped_by_cleverness() -> None:
    # 4 + 3 + 3 in each of two rows of 10: best fit decreasing pairs 4 with 4 and strands a 3.
    batch = Packer(shape_of(rows=2, columns=10)).pack(texts(4, 3, 3, 4, 3, 3))
    assert batch.dropped == 0 and batch.positions == 20
    together = Packer(shape_of(rows=2, columns=10)).pack(texts(4, 4, 3, 3, 3, 3, bags=[0] * 6))
    assert together.dropped == 0 and together.positions == 20


@pytest.mark.parametrize(
    ("more", "items", "kept", "closed_by"),
    [
        ({"segments": 3}, texts(2, 2, 2, 2), [0, 1, 2], "segments"),
        ({"max_bags_per_device": 2}, texts(2, 2, 2, bags=[5, 5, 6]), [0, 1, 2], "end"),
        ({"max_bags_per_device": 2}, texts(2, 2, 2, bags=[5, 7, 6]), [0, 1], "bags"),
    ],
)
def test_capacities_of_a_step(more: dict[str, Any], items: StepItems, kept: list[int], closed_by: str) -> None:
    batch = Packer(shape_of(**more)).pack(items)
    assert batch.item[: batch.segments].tolist() == kept and batch.closed_by == closed_by


@pytest.mark.parametrize("name", ["attract", "repel", "ignore"])
def test_each_edge_set_has_its_own_capacity(name: str) -> None:
    edges = Edges([0, 2, 2, 2, 4], [1, 2, 0, 1])
    packer = Packer(shape_of(), max_edges=3)
    batch = packer.pack(texts(2, 2, 2, 2, relations=Relations(**{name: edges})))
    # Item 3 would bring the third and fourth edge.
    assert batch.item[: batch.segments].tolist() == [0, 1, 2] and batch.dropped == 1 and batch.dropped_edges == 2
    assert batch.fill["edges"] == pytest.approx(2 / 3) and len(getattr(batch, name)) == 2
    assert (
        packer.pack(
            texts(2, 2, 2, 2, relations=Relations(attract=Edges([0, 2, 2, 2, 2], [1, 2]), repel=Edges([0, 0, 0, 0, 2], [0, 1])))
        ).dropped
        == 0
    )


def test_edges_to_what_is_dropped_cost_nothing() -> None:
    # All ten attract all others: ninety edges. Four segments and their twelve edges fit where twelve are allowed.
    others = np.array([[other for other in range(10) if other != item] for item in range(10)])
    items = texts(*[2] * 10, relations=Relations(attract=Edges(np.arange(11) * 9, others.reshape(-1))))
    batch = Packer(shape_of(segments=4), max_edges=12).pack(items)
    assert batch.item[: batch.segments].tolist() == [0, 1, 2, 3] and batch.dropped == 6
    assert len(batch.attract) == 12 and batch.dropped_edges == 78 and batch.fill["edges"] == 1


def test_max_edges_derives_eight_per_segment() -> None:
    assert Packer(shape_of(segments=6)).pack(StepItems([], [])).max_edges == 48


def test_late_interaction_capacities() -> None:
    late = Late(max_query_span=4, max_query_tokens_per_device=8, max_documents_per_device=2, max_document_tokens_per_device=12)
    packer = Packer(shape_of(), late_interaction=late)
    # Queries count min(tokens, 4): 4 + 3; a third with 2 tokens passes 8. Documents count 5 + 6 tokens.
    batch = packer.pack(texts(11, 4, 3, 6, 7, sides=[1, 1, 1, 2, 2]))
    assert batch.item[: batch.segments].tolist() == [0, 1, 3, 4]
    assert batch.fill["query_tokens"] == 7 / 8 and batch.fill["documents"] == 1 and batch.fill["document_tokens"] == 11 / 12
    # Both roles count in both.
    batch = packer.pack(texts(6, 6, 6, sides=[3, 3, 3]))
    assert batch.item[: batch.segments].tolist() == [0, 1] and batch.fill["query_tokens"] == 1 and batch.closed_by == "query_tokens"
    assert packer.pack(texts(14, 2, sides=[2, 0])).item[:1].tolist() == [1]
    with pytest.raises(KeyError):
        _ = Packer(shape_of()).pack(texts(2)).fill["documents"]
    derived = Packer(shape_of(), late_interaction=Late()).capacities
    assert (derived.query_span, derived.query_tokens, derived.documents, derived.document_tokens) == (64, 64 * 16, 16, 4 * 32)


def test_edges_between_bags_of_one_step_stay_while_both_ends_do() -> None:
    relations = Relations(attract=Edges([0, 1, 2, 3], [2, 2, 1], [0.5, 0.25, 4.0]), repel=Edges([0, 0, 0, 1], [0]))
    whole = Packer(shape_of()).pack(texts(2, 3, 4, bags=[1, 0, 1], relations=relations))
    # Bags are numbered by their first item: segments are items 0, 2, 1.
    assert whole.item[:3].tolist() == [0, 2, 1]
    assert (
        whole.attract.offsets[:4].tolist() == [0, 1, 2, 3]
        and whole.attract.ids.tolist() == [1, 2, 1]
        and whole.attract.weights.tolist() == [0.5, 4.0, 0.25]
    )
    assert whole.repel.ids.tolist() == [0] and whole.repel.sources().tolist() == [1]
    assert (whole.attract.offsets[3:] == 3).all() and whole.attract.offsets.shape == (17,)


def test_undecodable_items() -> None:
    packer = Packer(shape_of())
    items = texts(3, 1, 4, relations=Relations(attract=Edges([0, 2, 2, 3], [1, 2, 1])))
    with pytest.raises(DecodeError, match="item 1: ") as caught:
        packer.pack(items)
    assert caught.value.kind == "empty" and caught.value.index == 1
    batch = packer.pack(items, on_error="drop")
    assert batch.item[:2].tolist() == [0, 2] and batch.dropped == 1 and batch.dropped_edges == 2 and batch.items == 3
    assert batch.attract.ids.tolist() == [1] and batch.closed_by == "end"
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        packer.pack(items, on_error="ignore")  # type: ignore[arg-type]  # what is refused


def test_truncated_counts_packed_items_cut_at_the_row() -> None:
    batch = Packer(shape_of(rows=2)).pack(StepItems([0, 0, 0, 0], [b"x" * 31, b"x" * 32, b"x" * 99, b"y"]))
    assert batch.item[: batch.segments].tolist() == [0, 1] and batch.truncated == 1 and batch.dropped == 2


def test_choices_and_targets_follow_their_segments() -> None:
    items = texts(4, 5, 6, bags=[0, 1, 0], choices=[None, b"AB", b"xyz"], choice_targets=[None, [0.25, 0.75], [0.5, 0.5, 0.0]])
    batch = Packer(shape_of(max_choices_per_item=3)).pack(items)
    assert batch.item[:3].tolist() == [0, 2, 1]
    assert batch.length[:3].tolist() == [4, 7, 6] and batch.tokens == 3 + 5 + 4
    data, offsets = batch.choices
    assert offsets[:4].tolist() == [0, 0, 3, 5] and data.tobytes() == b"xyzAB" and (offsets[4:] == 5).all()
    assert batch.choice_targets.data.tolist() == [0.5, 0.5, 0.0, 0.25, 0.75]


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepItems, int, int, int]:
    count = draw(st.integers(0, 9))
    lengths = draw(st.lists(st.integers(2, 14), min_size=count, max_size=count))
    bags = draw(st.one_of(st.none(), st.lists(st.integers(-2, 3), min_size=count, max_size=count)))

    def edges() -> Edges:
        offsets, ids, weights = [0], [], []
        for item in range(count):
            targets = sorted(draw(st.sets(st.integers(0, max(0, count - 1)), max_size=3)) - {item})
            ids += targets
            weights += [draw(st.sampled_from([0.0, 0.5, 2.0])) for _ in targets]
            offsets.append(len(ids))
        return Edges(offsets, ids, weights if draw(st.booleans()) else ())

    items = texts(
        *lengths,
        bags=bags,
        groups=draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=count, max_size=count)),
        ids=draw(st.one_of(st.none(), st.lists(st.integers(0, 2**64 - 1), min_size=count, max_size=count))),
        relations=Relations(edges(), edges(), edges()) if draw(st.booleans()) else None,
    )
    return items, draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 12))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(steps())
def test_a_step_against_the_obvious(step: tuple[StepItems, int, int, int]) -> None:
    items, rows, segments, max_edges = step
    batch = Packer(shape_of(rows=rows, segments=segments, columns=14), max_edges=max_edges).pack(items)
    check_places(batch)
    packed = batch.item[: batch.segments].tolist()
    assert len(set(packed)) == len(packed) and batch.dropped == len(items) - len(packed)
    bags = [(int(items.bags[item]), item)[0] if items.bags is not None else item for item in range(len(items))]
    assert all(
        (other in packed) == (item in packed) for item in range(len(items)) for other in range(len(items)) if bags[item] == bags[other]
    )
    assert len({bags[item] for item in packed}) == batch.bags
    lost = 0
    for name, edges in items.relations.named():
        expected: list[tuple[int, int, float]] = []
        for item in range(len(items)):
            run = range(int(edges.offsets[item]), int(edges.offsets[item + 1])) if len(edges.offsets) else range(0)
            for edge in run:
                target, weight = int(edges.ids[edge]), float(edges.weights[edge]) if len(edges.weights) else 1.0
                if item in packed and target in packed:
                    expected.append((packed.index(item), packed.index(target), weight))
                else:
                    lost += 1
        found = getattr(batch, name)
        found.check(segments, name)
        assert len(found) <= max_edges
        assert list(zip(found.sources().tolist(), found.ids.tolist(), found.weights.tolist(), strict=True)) == sorted(expected)
    assert batch.dropped_edges == lost
    for segment, item in enumerate(packed):
        assert batch.payload(segment).tobytes() == bytes(items.content(item))
        assert items.groups is not None and batch.group[segment] == items.groups[item]
        assert batch.id[segment] == (item if items.ids is None else items.ids[item])


def random_bag(rng: random.Random, number: int, columns: int) -> StepItems:
    count = rng.choice([1, 1, 2, 3])
    lengths = [rng.randint(2, columns) if rng.random() < 0.3 else rng.randint(2, columns // 4) for _ in range(count)]
    offsets = [count - 1] * count
    ids = [[other for other in range(count) if other != item] for item in range(count)]
    attract = Edges(np.cumsum([0, *offsets]), [other for run in ids for other in run])
    return texts(*lengths, ids=[number * 8 + item for item in range(count)], groups=[number] * count, relations=Relations(attract=attract))


def test_a_stream_packs_every_bag_once_within_the_delay() -> None:
    rng = random.Random(3)
    packer = Packer(shape_of(segments=40), window=3)
    arrived: dict[int, int] = {}
    seen: list[int] = []
    delays: list[int] = []
    taken = 0

    def look(batch: PackedBatch) -> None:
        check_places(batch)
        groups = [int(batch.group[segment]) for segment in range(batch.segments)]
        assert sorted(set(groups)) == sorted(set(groups), key=groups.index), "bags keep their arrival order"
        for first in sorted(set(groups)):
            members = [segment for segment in range(batch.segments) if groups[segment] == first]
            assert batch.id[members].tolist() == [first * 8 + place for place in range(len(members))]
            assert all(
                batch.attract.ids[batch.attract.offsets[m] : batch.attract.offsets[m + 1]].tolist() == [o for o in members if o != m]
                for m in members
            )
            seen.append(first)
            delays.append(taken - arrived[first])

    for number in range(1, 400):
        arrived[number] = taken
        assert packer.add(random_bag(rng, number, 32))
        while packer.ready():
            look(packer.take())
            taken += 1
    for batch in packer.flush():
        look(batch)
        taken += 1
    assert sorted(seen) == list(range(1, 400)) and max(delays) <= 2 * 3 and packer.num_pending == 0


def test_a_stream_resumes_bit_for_bit_from_integers() -> None:
    shape = shape_of(segments=40).resolved()
    rng = random.Random(4)
    bags = [decode_bag(random_bag(rng, number, 32), shape) for number in range(1, 200)]

    def run(packer: Packer, start: int) -> list[tuple[int, dict[str, np.ndarray], list[tuple[object, DecodedBag]], PackedBatch]]:
        out = []
        for number in range(start, len(bags)):
            # A bag may find the packer ready still, right after a restore.
            while packer.ready():
                out.append((number, packer.state(), packer.pending, packer.take()))
            packer.add_decoded(bags[number], token=number)
        while packer.num_pending:
            out.append((len(bags), packer.state(), packer.pending, packer.take()))
        return out

    whole = run(Packer(shape, window=2), 0)
    assert len(whole) > 12
    state = whole[0][1]
    for at in range(0, len(whole), 3):
        arrived, state, waiting, _ = whole[at]
        assert all(values.dtype == np.int64 for values in state.values())
        again = Packer(shape, window=2)
        again.load(state, [bag for _, bag in waiting], [token for token, _ in waiting])
        assert again.pending == waiting
        rest = run(again, arrived)
        assert [batch for *_, batch in rest] == [batch for *_, batch in whole[at:]]
    with pytest.raises(ValueError, match="packer state: bag_arrival missing"):
        Packer(shape, window=2).load({name: values for name, values in state.items() if name != "bag_arrival"}, [])
    with pytest.raises(ValueError, match="packer state: 1 tokens for 0 bags"):
        Packer(shape, window=2).load(state, [], [1])


def test_packing_a_step_leaves_a_stream_alone() -> None:
    def stream(disturbed: bool) -> list[PackedBatch]:
        rng = random.Random(5)
        packer = Packer(shape_of(segments=40), window=2)
        out = []
        for number in range(1, 80):
            packer.add(random_bag(rng, number, 32))
            if disturbed:
                packer.pack(texts(5, 40, 32, 32, 32, 32, 32))
            while packer.ready():
                out.append(packer.take())
        return [*out, *packer.flush()]

    assert stream(True) == stream(False)


def test_what_could_never_fit_is_counted_by_the_next_batch() -> None:
    packer = Packer(shape_of(rows=1, segments=3), window=1)
    assert not packer.add(texts(20, 20))
    assert not packer.add(texts(2, 2, 2, 2, relations=Relations(attract=Edges([0, 1, 2, 2, 2], [1, 0]))))
    assert packer.add(StepItems([0, 0], [b"", b"ok"], relations=Relations(repel=Edges([0, 1, 1], [1]))), on_error="drop")
    assert not packer.add(StepItems([0], [b""]), on_error="drop")
    with pytest.raises(DecodeError):
        packer.add(StepItems([0], [b""]))
    batch = packer.take()
    assert batch.segments == 1 and batch.dropped == 2 + 4 + 1 + 1 and batch.dropped_edges == 2 + 1
    assert batch.item[0] == 0 and batch.items == 1
    assert packer.take().dropped == 0


def test_add_takes_one_bag_and_ids_for_all_or_none() -> None:
    packer = Packer(shape_of())
    with pytest.raises(ValueError, match="add takes one bag, and bags names 2"):
        packer.add(texts(2, 2, bags=[0, 1]))
    assert packer.add(texts(2, 2, bags=[4, 4]))
    assert packer.add(texts(2, 2))
    with pytest.raises(ValueError, match="ids: some pending bags carry ids and others do not"):
        packer.add(StepItems([0, 0], [b"", b"a"], ids=[3, 4]), on_error="drop")
    batch = packer.take()
    assert batch.dropped == 0
    assert batch.ids_defaulted and batch.id[:4].tolist() == [0, 1, 2, 3] and batch.bag[:4].tolist() == [0, 0, 1, 1]
    assert packer.add(texts(2, ids=[3])) and not packer.take().ids_defaulted


def test_tokens_of_the_caller_come_back_in_bag_order() -> None:
    packer = Packer(shape_of())
    for name in ("first", "second", "third"):
        packer.add(texts(3, 2), token=name)
    assert [token for token, _ in packer.pending] == ["first", "second", "third"]
    batch, tokens = packer.take_with_tokens()
    assert batch.bags == 3 and tokens == ["first", "second", "third"]


def test_late_interaction_capacities_may_be_numpys() -> None:
    late: Any = Late(np.int64(3), np.int64(3), np.int64(3), np.int64(3))  # type: ignore[arg-type]  # what a user's own may hold
    batch = Packer(shape_of(), late_interaction=late).pack(StepItems([0, 0], [b"ab", b"abc"], sides=[1, 2]))
    assert batch.segments == 2 and batch.fill["document_tokens"] == 1.0


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"window": 0}, "Packer.window is 0"),
        ({"max_edges": -1}, "Packer.max_edges is -1"),
        ({"window": 2.0}, "Packer.window is 2.0: it must be an integer"),
        ({"late_interaction": Late(max_query_span=-1)}, "late_interaction.max_query_span is -1"),
        ({"late_interaction": Late(max_documents_per_device=-2)}, "late_interaction.max_documents_per_device is -2"),
    ],
)
def test_bad_configuration_is_refused(named: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packer(shape_of(), **named)


def test_fill_of_short_texts_through_the_public_interface() -> None:
    """Steady state: at least 0.995 of the positions where items are shorter than a quarter of a row."""
    rng = np.random.default_rng(11)
    packer = Packer(BatchShape(max_rows_per_device=16, max_segments_per_device=512, max_columns_per_row=256), window=2)
    fills: list[float] = []
    for length in rng.integers(3, 64, 6000).tolist():
        packer.add(texts(length))
        while packer.ready():
            fills.append(packer.take().fill["positions"])
    assert len(fills) > 30 and float(np.mean(fills[2:])) >= 0.995


def test_the_packer_imports_neither_torch_nor_a_codec() -> None:
    code = (
        "import sys; from treadle import BatchShape, Packer, StepItems; "
        "shape = BatchShape(max_rows_per_device=1, max_segments_per_device=2, max_columns_per_row=8); "
        "assert Packer(shape).pack(StepItems([0], [b'text'])).segments == 1; "
        "print(sorted({'torch', 'triton', 'PIL', 'av', 'fsspec', 'safetensors', 'torchaudio', 'soxr'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
