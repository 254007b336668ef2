"""The direct way of texts: drawn many at a time and packed at once, with nothing in between.

    order.rounds() --> text_path.py: columns of texts --> packer, until a batch is ready --> the next rounds once all are packed

Nothing runs ahead of the last samples drawn, so that the order itself knows the position, and no moves have to be noted and followed.
"""

import time
from collections.abc import Sequence

from treadle.pipeline.bag import TextBag, TextRun
from treadle.pipeline.feed_config import FeedConfig
from treadle.pipeline.identity import MASK, SAMPLE_STEP, shard_key
from treadle.pipeline.ledger import Ledger
from treadle.pipeline.losses import Losses
from treadle.pipeline.order import Located, Order, Rounds, whole
from treadle.pipeline.packer import Packer
from treadle.pipeline.text_path import TextPath


class Direct:
    """Draws texts and packs them, until something else comes."""

    def __init__(self, config: FeedConfig, order: Order, packer: Packer, text_path: TextPath, ledger: Ledger, losses: Losses) -> None:
        self._urls = config.urls
        self._order = order
        self._packer = packer
        self._text_path = text_path
        self._ledger = ledger
        self._losses = losses
        self._rounds: Rounds | None = None
        # Of the first samples drawn, which are texts: in columns where each is a text alone.
        self._texts: TextRun | Sequence[TextBag] = ()
        self._num_texts = 0
        self._done = 0
        self.rest: Sequence[Located] = ()
        """The other samples drawn, from the first that has to be decoded on."""
        self.ended = False
        """Whether there is no further sample."""

    @property
    def left(self) -> int:
        """Samples drawn and not packed."""
        return 0 if self._rounds is None else len(self._rounds.refs) - self._done

    def drop(self) -> None:
        """Forgets the samples that are left."""
        self._rounds, self._texts, self.rest = None, (), ()
        self._num_texts = self._done = 0

    def consume(self) -> bool:
        """Packs texts until a batch is ready or the data ends; False where something has to be decoded before."""
        packer = self._packer
        while not packer.ready():
            rounds = self._rounds
            if rounds is None or self._done == len(rounds.refs):
                if not self._draw():
                    return True
                continue
            if self._done == self._num_texts:
                return False
            if isinstance(self._texts, TextRun):
                items = 1
                place, fits = packer.add_texts(self._texts, self._done)
            else:
                place, bag = self._done + 1, self._texts[self._done]
                items, fits = len(bag.lengths), packer.add_decoded(bag, rounds.token(self._done))
            refs = rounds.refs[self._done : place]
            self._ledger.count(len(refs), sum([ref[3] for ref in refs]), 0.0)
            self._done = place
            if fits or len(refs) > 1:
                self._losses.packed()
            if not fits:
                self._losses.unfit(items)
        return True

    def _draw(self) -> bool:
        """Draws the next samples and makes bags of those that are texts; False at the end of the data."""
        begun = time.perf_counter()
        self.drop()
        rounds = self._rounds = self._order.rounds()
        if rounds is not None:
            seeds = self._seeds(rounds)
            # Whoever remembers the rounds for a token remembers no content.
            drawn, rounds.samples = rounds.samples, ()
            run = self._text_path.run(drawn, seeds, rounds.token)
            if run is not None:
                self._texts, self._num_texts = run, len(drawn)
            else:
                samples = list(map(whole, drawn, rounds.refs))
                self._texts = bags = self._text_path.bags(samples, seeds)
                self._num_texts, self.rest = len(bags), samples[len(bags) :]
        self._ledger.read_s += time.perf_counter() - begun
        self.ended = rounds is None
        self._losses.faults(self._order.take_faults())
        return not self.ended

    def _seeds(self, rounds: Rounds) -> list[int]:
        """What the ids of the samples are mixed from."""
        shards = list(zip(rounds.sources(), [ref[0] for ref in rounds.refs], strict=True))
        keys = {(source, shard): shard_key(self._urls[source][shard]) for source, shard in set(shards)}
        return [keys[each] + (ref[1] + 1) * SAMPLE_STEP & MASK for each, ref in zip(shards, rounds.refs, strict=True)]
