"""How well vectors find their partners: recall at k, ranks and nDCG, against chance, with standard errors.

A document's rank counts the documents that score more, and those that score the same and come first, so that a model whose vectors
collapse gets no credit for ties; `worst_recall` counts every tie against the model. Nothing here samples: all documents are ranked.

Suffixes: Q queries, N documents, D width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

CUTOFFS = (1, 5, 10)
NDCG_CUTOFF = 10
BLOCK_QUERIES = 256
"""Queries scored at a time: memory is this times the documents, whatever the queries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrieval:
    """How a set of queries found their relevant documents among all of them."""

    queries: int
    documents: int
    recall: Mapping[int, float]
    """By k: the share of queries with a relevant document among their first k."""
    worst_recall: Mapping[int, float]
    """The same with every tie counted against the query."""
    chance: Mapping[int, float]
    """By k: what documents in random order would reach."""
    standard_error: Mapping[int, float]
    """By k: of `recall`, as the share of `queries` independent trials."""
    median_rank: float
    """Rank of a query's first relevant document, counted from one."""
    mean_reciprocal_rank: float
    ndcg_at_10: float
    """Normalised discounted cumulative gain of the first ten, every relevant document gaining one."""

    def beats_chance(self, k: int, times: float, errors: float = 3.0) -> bool:
        """Whether recall at `k` lies above `times` chance by more than `errors` standard errors."""
        return self.recall[k] - errors * self.standard_error[k] > times * self.chance[k]

    def record(self) -> dict[str, float | int]:
        """This result as flat numbers, for logs and JSON."""
        out: dict[str, float | int] = {"queries": self.queries, "documents": self.documents}
        for k in self.recall:
            out[f"recall_at_{k}"] = self.recall[k]
            out[f"worst_recall_at_{k}"] = self.worst_recall[k]
            out[f"chance_at_{k}"] = self.chance[k]
            out[f"standard_error_at_{k}"] = self.standard_error[k]
        return out | {
            "median_rank": self.median_rank,
            "mean_reciprocal_rank": self.mean_reciprocal_rank,
            "ndcg_at_10": self.ndcg_at_10,
        }


def chance_of_recall(documents: int, relevant: int, k: int) -> float:
    """The chance that one of `relevant` documents is among the first `k` of a random order: `1 - C(N - r, k) / C(N, k)`."""
    if k >= documents or k > documents - relevant:
        return 1.0
    return 1.0 - math.comb(documents - relevant, k) / math.comb(documents, k)


def ndcg(ranks: Sequence[int], relevant: int, cutoff: int = NDCG_CUTOFF) -> float:
    """Normalised discounted cumulative gain at `cutoff` of relevant documents at these ranks, counted from one (Järvelin and Kekäläinen 2002)."""
    gained = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= cutoff)
    ideal = sum(1 / math.log2(place + 2) for place in range(min(relevant, cutoff)))
    return gained / ideal if ideal else 0.0


def _checked(name: str, vectors: Vectors) -> Vectors:
    array = np.asarray(vectors, dtype=np.float32)
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {list(array.shape)}: it must be one vector a row")
    broken = ~np.isfinite(array).all(axis=1)
    if broken.any():
        raise ValueError(f"{name} {int(np.flatnonzero(broken)[0])} is not finite: leave out items without a vector")
    return array


def retrieve(
    queries_QD: Vectors,
    documents_ND: Vectors,
    relevant: Sequence[Sequence[int]],
    *,
    skip: Sequence[int] | None = None,
    cutoffs: Sequence[int] = CUTOFFS,
) -> Retrieval:
    """Ranks all documents for each query by inner product and compares with the relevant ones.

    Args:
        queries_QD: a vector a query; unit vectors make the inner product a cosine.
        documents_ND: a vector a document.
        relevant: for each query the numbers of its relevant documents, at least one.
        skip: for each query a document that is left out of its ranking, the query itself as a rule; -1 leaves out none.
        cutoffs: the k of recall at k, ascending.

    Raises:
        ValueError: shapes disagree, a vector is not finite, a document number is out of range, or a query has no relevant document.
    """
    queries, documents = _checked("query", queries_QD), _checked("document", documents_ND)
    count, pool = len(queries), len(documents)
    if queries.shape[1] != documents.shape[1]:
        raise ValueError(f"queries have {queries.shape[1]} dimensions, documents {documents.shape[1]}: encode both at one width")
    if not count or len(relevant) != count or (skip is not None and len(skip) != count):
        raise ValueError(
            f"there are {count} queries and {len(relevant)} sets of relevant documents: there must be one for each, and a query"
        )
    skipped: Indices = np.full(count, -1) if skip is None else np.asarray(skip, dtype=np.int64)
    best: Indices = np.empty(count, dtype=np.int64)
    worst: Indices = np.empty(count, dtype=np.int64)
    gains = np.empty(count)
    for first in range(0, count, BLOCK_QUERIES):
        scores = queries[first : first + BLOCK_QUERIES] @ documents.T
        for row, score_N in enumerate(scores):
            number = first + row
            wanted = np.unique(np.asarray(relevant[number], dtype=np.int64))
            if not len(wanted) or wanted[0] < 0 or wanted[-1] >= pool or skipped[number] in wanted:
                raise ValueError(
                    f"query {number} has relevant documents {list(relevant[number])}: some, other than itself, from 0 to {pool - 1}"
                )
            if skipped[number] >= 0:
                score_N[skipped[number]] = -np.inf
            ranks, tied = _ranks(score_N, wanted)
            best[number], worst[number] = ranks.min(), tied.min()
            gains[number] = ndcg([int(rank) for rank in ranks], len(wanted))
    return _summary(best, worst, gains, pool, [len(set(items)) for items in relevant], skipped >= 0, tuple(cutoffs))


def _ranks(score_N: Vectors, wanted: Indices) -> tuple[Indices, Indices]:
    """Ranks of the wanted documents, counted from one: ties by document number, and ties with others all lost."""
    own = score_N[wanted][:, None]
    more = (score_N[None, :] > own).sum(axis=1)
    same = score_N[None, :] == own
    earlier = (same & (np.arange(len(score_N))[None, :] < wanted[:, None])).sum(axis=1)
    others = same.sum(axis=1) - same[:, wanted].sum(axis=1)
    return more + earlier + 1, more + others + 1


def _summary(
    best: Indices,
    worst: Indices,
    gains: npt.NDArray[np.float64],
    pool: int,
    relevant: list[int],
    skips: npt.NDArray[np.bool_],
    cutoffs: tuple[int, ...],
) -> Retrieval:
    recall = {k: float((best <= k).mean()) for k in cutoffs}
    count = len(best)
    kinds, times = np.unique(np.stack([np.array(relevant), skips.astype(np.int64)]), axis=1, return_counts=True)
    chance = {
        k: float(sum(chance_of_recall(pool - int(s), int(r), k) * int(n) for (r, s), n in zip(kinds.T, times, strict=True)) / count)
        for k in cutoffs
    }
    return Retrieval(
        queries=count,
        documents=pool,
        recall=recall,
        worst_recall={k: float((worst <= k).mean()) for k in cutoffs},
        chance=chance,
        standard_error={k: math.sqrt(p * (1 - p) / count) for k, p in recall.items()},
        median_rank=float(np.median(best)),
        mean_reciprocal_rank=float((1 / best).mean()),
        ndcg_at_10=float(gains.mean()),
    )


def retrieve_between(
    vectors_ND: Vectors, kinds: Sequence[str], labels: Sequence[int], *, cutoffs: Sequence[int] = CUTOFFS
) -> dict[tuple[str, str], Retrieval]:
    """Retrieval between every two kinds of item that share labels, both ways, and within a kind where a label has several items.

    Items of one label are relevant to each other. Between two kinds only items with a partner of the other kind take part, so that N pairs
    are N queries and N documents.

    Args:
        vectors_ND: a vector an item.
        kinds: what each item is, a modality's name for one.
        labels: what each item shows; samples with equal content share a label.
    """
    if not len(vectors_ND) == len(kinds) == len(labels):
        raise ValueError(
            f"there are {len(vectors_ND)} vectors, {len(kinds)} kinds and {len(labels)} labels: there must be one of each an item"
        )
    members: dict[str, dict[int, list[int]]] = {}
    for number, (kind, label) in enumerate(zip(kinds, labels, strict=True)):
        members.setdefault(kind, {}).setdefault(label, []).append(number)
    found: dict[tuple[str, str], Retrieval] = {}
    for kind, ours in members.items():
        for other, theirs in members.items():
            within = kind == other
            shared = [label for label in ours if label in theirs and (not within or len(ours[label]) > 1)]
            if not shared:
                continue
            queries = sorted(number for label in shared for number in ours[label])
            documents = sorted(number for label in shared for number in theirs[label])
            place = {number: index for index, number in enumerate(documents)}
            relevant = [[place[n] for n in theirs[labels[query]] if n != query] for query in queries]
            skip = [place[query] for query in queries] if within else None
            found[kind, other] = retrieve(vectors_ND[queries], vectors_ND[documents], relevant, skip=skip, cutoffs=cutoffs)
    return found
