"""Retrieval against numbers worked out by hand, and against a plain sort."""

import math

import numpy as np
import pytest

from treadle.model.evaluate import Retrieval, chance_of_recall, ndcg, retrieve, retrieve_between


def unit(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def test_ndcg_of_ranks_one_three_six() -> None:
    # DCG = 1/log2(2) + 1/log2(4) + 1/log2(7) = 1 + 0.5 + 0.35621; IDCG = 1 + 1/log2(3) + 1/2 = 2.13093.
    assert ndcg([1, 3, 6], 3) == pytest.approx(0.87108, abs=5e-6)


def test_ndcg_beyond_the_cutoff_gains_nothing() -> None:
    assert ndcg([11], 1) == 0
    assert ndcg([10], 1) == pytest.approx(1 / math.log2(11))
    assert ndcg(list(range(1, 21)), 20) == pytest.approx(1)


def test_ranks_of_a_small_set() -> None:
    # Scores of the one query: 0.9, 0.1, 0.5, 0.3; documents 2 and 3 are relevant, at ranks 2 and 3.
    documents = unit((0.9,), (0.1,), (0.5,), (0.3,))
    result = retrieve(unit((1.0,)), documents, [[3, 2]], cutoffs=(1, 2, 3))
    assert dict(result.recall) == {1: 0, 2: 1, 3: 1}
    assert result.median_rank == 2
    assert result.mean_reciprocal_rank == 0.5
    gained, ideal = 1 / math.log2(3) + 1 / math.log2(4), 1 + 1 / math.log2(3)
    assert result.ndcg_at_10 == pytest.approx(gained / ideal)


def test_ties_go_to_the_lower_number_and_the_worst_case_is_told() -> None:
    same = np.ones((4, 2), dtype=np.float32)
    result = retrieve(same, same, [[0], [1], [2], [3]], cutoffs=(1, 2, 4))
    # A collapsed model ranks the documents 1, 2, 3, 4 for every query: query i finds its own at rank i + 1.
    assert dict(result.recall) == {1: 0.25, 2: 0.5, 4: 1}
    assert dict(result.worst_recall) == {1: 0, 2: 0, 4: 1}
    assert dict(result.chance) == {1: 0.25, 2: 0.5, 4: 1}
    assert result.median_rank == 2.5


def test_tied_relevant_documents_do_not_count_against_each_other() -> None:
    result = retrieve(unit((1.0,)), unit((0.5,), (0.5,), (0.1,)), [[0, 1]], cutoffs=(1,))
    assert result.worst_recall[1] == 1


def test_chance() -> None:
    assert chance_of_recall(200, 1, 1) == pytest.approx(1 / 200)
    assert chance_of_recall(200, 1, 5) == pytest.approx(5 / 200)
    # Two of four relevant, first two: 1 - C(2, 2) / C(4, 2) = 5 / 6.
    assert chance_of_recall(4, 2, 2) == pytest.approx(5 / 6)
    assert chance_of_recall(3, 1, 10) == 1
    assert chance_of_recall(10, 8, 3) == 1


def test_standard_error_and_chance_test() -> None:
    # 50 of 200 found: sqrt(0.25 * 0.75 / 200) = 0.030619.
    vectors = np.eye(200, dtype=np.float32)
    relevant = [[i] if i < 50 else [(i + 1) % 200] for i in range(200)]
    result = retrieve(vectors, vectors, relevant)
    assert result.recall[1] == 0.25
    assert result.standard_error[1] == pytest.approx(0.030619, abs=1e-6)
    # 0.25 - 3 * 0.0306 = 0.158 lies above 10 * 0.005 and 31 * 0.005, not above 32 * 0.005.
    assert result.beats_chance(1, 10)
    assert result.beats_chance(1, 31)
    assert not result.beats_chance(1, 32)


def test_against_a_plain_sort() -> None:
    draw = np.random.default_rng(5)
    queries = draw.integers(-2, 3, (300, 4)).astype(np.float32)
    documents = draw.integers(-2, 3, (70, 4)).astype(np.float32)
    relevant = [sorted(draw.choice(70, size=draw.integers(1, 5), replace=False).tolist()) for _ in range(300)]
    result = retrieve(queries, documents, relevant)
    firsts = []
    gains = []
    for query, wanted in zip(queries, relevant, strict=True):
        scores = documents @ query
        order = sorted(range(70), key=lambda n: (-scores[n], n))
        ranks = [order.index(n) + 1 for n in wanted]
        firsts.append(min(ranks))
        gains.append(ndcg(ranks, len(wanted)))
    for k in (1, 5, 10):
        assert result.recall[k] == pytest.approx(np.mean([first <= k for first in firsts]))
    assert result.median_rank == np.median(firsts)
    assert result.mean_reciprocal_rank == pytest.approx(np.mean([1 / first for first in firsts]))
    assert result.ndcg_at_10 == pytest.approx(np.mean(gains))


def test_between_kinds_only_partners_take_part() -> None:
    vectors = np.eye(4, dtype=np.float32)[[0, 1, 2, 0, 1, 3]]
    kinds = ["text", "text", "text", "image", "image", "audio"]
    labels = [10, 11, 12, 10, 11, 12]
    found = retrieve_between(vectors, kinds, labels)
    assert set(found) == {("text", "image"), ("image", "text"), ("text", "audio"), ("audio", "text")}
    assert (found["text", "image"].queries, found["text", "image"].documents) == (2, 2)
    assert found["text", "image"].recall[1] == 1
    assert (found["audio", "text"].queries, found["audio", "text"].documents) == (1, 1)


def test_within_a_kind_an_item_does_not_find_itself() -> None:
    vectors = unit((1, 0), (0.9, 0.1), (0, 1), (0.2, 0.9))
    found = retrieve_between(vectors, ["text"] * 4, [1, 2, 1, 2], cutoffs=(1, 3))
    result = found["text", "text"]
    # Each query's nearest is of the other label: (1, 0) finds (0.9, 0.1).
    assert dict(result.recall) == {1: 0, 3: 1}
    # Three documents without the query itself, one relevant.
    assert result.chance[1] == pytest.approx(1 / 3)


def test_samples_of_one_label_are_relevant_to_each_other() -> None:
    vectors = unit((1, 0), (0, 1), (0, 1), (1, 0))
    found = retrieve_between(vectors, ["text", "text", "image", "image"], [7, 7, 7, 7], cutoffs=(1,))
    assert found["text", "image"].recall[1] == 1
    assert found["text", "image"].chance[1] == 1


def test_record_is_flat() -> None:
    record = retrieve(np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32), [[0], [1]]).record()
    assert record["recall_at_1"] == 1
    assert record["queries"] == 2
    assert all(isinstance(value, int | float) for value in record.values())


@pytest.mark.parametrize(
    ("queries", "documents", "relevant", "message"),
    [
        (np.ones((1, 2)), np.ones((1, 3)), [[0]], "queries have 2 dimensions, documents 3"),
        (np.ones((1, 2)), np.ones((1, 2)), [], "1 queries and 0 sets"),
        (np.ones((0, 2)), np.ones((1, 2)), [], "0 queries"),
        (np.ones((1, 2)), np.ones((1, 2)), [[]], "query 0 has relevant documents"),
        (np.ones((1, 2)), np.ones((1, 2)), [[1]], "from 0 to 0"),
        (np.full((1, 2), np.nan), np.ones((1, 2)), [[0]], "query 0 is not finite"),
        (np.ones((1, 2)), np.array([[1, 2], [np.inf, 0]]), [[0]], "document 1 is not finite"),
        (np.ones(2), np.ones((1, 2)), [[0]], r"query has shape \[2\]"),
    ],
)
def test_refusals(queries: np.ndarray, documents: np.ndarray, relevant: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieve(queries, documents, relevant)


def test_retrieval_is_a_value() -> None:
    result = retrieve(np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32), [[0], [1]])
    assert isinstance(result, Retrieval)
    with pytest.raises(AttributeError):
        result.queries = 3  # type: ignore[misc]  # frozen
