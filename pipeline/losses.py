"""What a pass leaves out: told once each, counted or raised, until nothing at all is left.

Faults and bad samples go to the quarantine, or end the stream under `on_error="raise"`. A stream without an end of which a whole
epoch gives no bag is ended here.
"""

from collections.abc import Callable, Sequence
from typing import Final

from treadle.pipeline.feed_config import FeedConfig
from treadle.pipeline.ledger import Ledger
from treadle.pipeline.order import Fault
from treadle.pipeline.prepare import Outcome, Place
from treadle.pipeline.shards import ShardError
from treadle.pipeline.storage import public_url

STORAGE_KINDS: Final = frozenset({"not_found", "forbidden", "refused", "changed", "not_a_tar", "unreadable"})
"""Faults of the storage, which come and go; the others are damages of what is stored."""

DROUGHT_SAMPLES: Final = 256
"""Samples in a row without a bag after which it is looked at, again and again, whether a whole epoch has given none; powers of two too."""


class NoSamplesError(ValueError):
    """A stream without an end read a whole epoch of every source, and nothing in it could become part of a batch."""


class Losses:
    """What one pass leaves out."""

    def __init__(self, config: FeedConfig, ledger: Ledger, epochs: Callable[[], list[int | None]], *, restored: bool) -> None:
        """Takes what answers the epoch that each sub-lane stands in, None where it is over, and whether the pass goes on from a state."""
        self._config = config
        self._ledger = ledger
        self._epochs = epochs
        self._told: set[tuple[int, int, int, str]] = set()
        self._without_bag = 0
        self._drought_from: list[int | None] = []
        # Only from the start of the data is the first epoch seen whole.
        self._drought_epochs = 2 if restored else 1

    def faults(self, faults: Sequence[Fault]) -> None:
        """Counts shards that ended early: each once an epoch, however many parts it is cut into; or raises the first."""
        for fault in faults:
            error = fault.error
            assert isinstance(error, ShardError)
            if self._config.on_error == "quarantine":
                if error.kind in STORAGE_KINDS:
                    # It may have come between two parts of the shard: whichever meets it first tells.
                    key = (fault.source, fault.epoch, fault.shard, error.kind)
                    if key in self._told:
                        continue
                    self._told.add(key)
                elif fault.part:
                    # A damage is met by every part; the first one tells, on whichever rank, before or after a restore.
                    continue
            self._quarantine(error, self._config.urls[fault.source][fault.shard], "", "", error.offset, error.kind, error.detail)

    def outcome(self, place: Place, outcome: Outcome) -> None:
        """Counts what is wrong with a sample, or raises it."""
        if outcome.left_out:
            self._ledger.left_out.update(outcome.left_out)
        for error, member, offset in outcome.problems():
            self._quarantine(error, place.url, outcome.key, member, offset, error.kind, error.detail)

    def _quarantine(self, error: Exception, url: str, key: str, member: str, offset: int, kind: str, reason: str) -> None:
        if kind == "closed":
            # Told to stop, by whoever closes the stream: nothing is wrong with the shard.
            raise error
        if self._config.on_error == "raise":
            named = "".join(f", {name} {value!r}" for name, value in (("sample", key), ("member", member)) if value)
            error.add_note(f'in shard {public_url(url)}{named}, at byte {offset}; on_error="quarantine" leaves it out and goes on')
            raise error
        self._ledger.quarantine.record(url=url, key=key, member=member, offset=offset, kind=kind, reason=reason)
        self._ledger.quarantine.check(self._config.budget, self._ledger.samples, url, key, member, kind)

    def packed(self) -> None:
        """A sample gave a bag."""
        self._without_bag, self._drought_epochs = 0, 2

    def unfit(self, items: int) -> None:
        """A sample's bag could never fit a batch."""
        self._ledger.unfit_bags += 1
        self._ledger.unfit_items += items
        self.bagless()

    def bagless(self) -> None:
        """One more sample in a row gave no bag.

        Raises:
            NoSamplesError: a whole epoch of every source has given none, and there is no end: the next one would not either.
        """
        self._without_bag += 1
        count = self._without_bag
        if not self._config.plan.endless:
            return
        if count == 1:
            self._drought_from = self._epochs()
        if count % DROUGHT_SAMPLES and count & (count - 1):
            return
        for begun, epoch in zip(self._drought_from, self._epochs(), strict=True):
            if begun is not None and epoch is not None and epoch < begun + self._drought_epochs:
                return
        raise NoSamplesError(
            f"the last {count} samples, a whole epoch of every source, gave nothing to train on, and epochs=None has no end: "
            f"{self._ledger.losses() or 'they hold no files'}; check schema, shape and decoder options, or pass epochs"
        )
