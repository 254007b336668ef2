"""The encoder: a trained tower that turns contents into vectors, token vectors and calibrated choices.

Contents of any number are packed into as many batches as they need; what a content becomes does not depend, beyond rounding, on what it
is packed with.

Suffixes: N contents, M dimensions, S segments, P positions, D hidden, W width of a token vector, L legal bytes in all.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import normalize

from treadle.decoders import DecodeError, DecodeOptions
from treadle.model.checkpoint import read_checkpoint, require_entries
from treadle.model.choices import choice_log_probabilities
from treadle.model.config import TrainerConfig
from treadle.model.device import Precision, computes_in_bf16, pick_device
from treadle.model.layout import BatchLayout
from treadle.model.network import Network
from treadle.pipeline import PackedBatch, Packer, StepItems
from treadle.pipeline.bag import DecodedBag, decode_bag
from treadle.pipeline.columns import Tape, content_list
from treadle.shape import MAX_CHOICES_PER_ITEM, Modality, entries_of, require_choice, require_count, require_member, require_path, shown

Content = bytes | bytearray | memoryview | NDArray[np.uint8] | str
"""One item's bytes; a string is its UTF-8."""

Contents = Iterable[Content] | tuple[bytes | NDArray[np.uint8], ArrayLike]
"""Contents in a list, or back to back as a `(data, offsets)` tape."""

OnError = Literal["raise", "nan"]

LOOK_AHEAD_BATCHES = 2
MAX_DECODING_THREADS = 16


class Encoder:
    """A network that only answers. Make one with `Encoder.load`."""

    def __init__(
        self, config: TrainerConfig, network: Network, device: torch.device, *, bf16: bool, options: DecodeOptions | None = None
    ) -> None:
        self.config = config
        self.device = device
        self._network = network.to(device).eval()
        self._bf16 = bf16
        self._options = options or DecodeOptions()

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        device: str | torch.device | None = None,
        *,
        precision: Precision | None = None,
        options: DecodeOptions | None = None,
    ) -> "Encoder":
        """The encoder of a trainer's checkpoint.

        Args:
            device: None takes CUDA where there is one.
            precision: None takes bf16 on CUDA, else fp32.

        Raises:
            ValueError: an argument is of another type, or there is no such device.
            StorageFileError: the file is missing, damaged, of a newer format or no checkpoint.
        """
        require_path("Encoder.load", "checkpoint", checkpoint)
        if precision is not None:
            require_choice("Encoder.load", "precision", precision, ("fp32", "bf16"))
        require_member("Encoder.load", "options", options, DecodeOptions, optional=True)
        placed = pick_device("Encoder.load.device", device)
        content = read_checkpoint(checkpoint)
        network = Network(content.config)
        require_entries(checkpoint, "weights", content.weights, network.named_parameters())
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(content.weights[name])
        return cls(content.config, network, placed, bf16=computes_in_bf16(precision, placed), options=options)

    @property
    def network(self) -> Network:
        """The trained modules, on the encoder's device."""
        return self._network

    @property
    def bf16(self) -> bool:
        """Whether matrix products run in bf16."""
        return self._bf16

    @property
    def hidden(self) -> int:
        """Values of a full vector."""
        return self.config.hidden

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What can be encoded."""
        return tuple(m for m in Modality if self.config.batch.is_live(m))

    @property
    def token_width(self) -> int:
        """Values of a token vector; 0 where the run trained none."""
        late = self.config.late_interaction
        return late.resolved(self.config.batch.resolved()).width if late.weight > 0 else 0

    def encode(self, modality: Modality | str, contents: Contents, dimensions: int | None = None, *, on_error: OnError = "raise") -> Tensor:
        """`[N, M]` fp32 unit vectors in the order of `contents`, on the encoder's device.

        Args:
            dimensions: how many leading values to keep before normalising [`hidden`]; widths that were trained serve best.
            on_error: `nan` answers a row of NaN for a content that cannot be decoded.

        Raises:
            DecodeError: a content cannot be decoded; its `index` says which.
            ValueError: the modality is not encoded here, or `dimensions` is out of range.
        """
        kind = self._kind(modality)
        require_choice("Encoder.encode", "on_error", on_error, ("raise", "nan"))
        width = require_count("Encoder.encode", "dimensions", self.hidden if dimensions is None else dimensions, 1, self.hidden)
        listed = _listed("contents", contents)
        out_NM = torch.full((len(listed), width), torch.nan, device=self.device)
        for batch, index_S in self._batches(kind, listed, None, on_error):
            states_PD, layout = self._states(batch)
            pooled_SD = self._network.tower.pool(states_PD, layout).float()
            out_NM[index_S] = normalize(pooled_SD[:, :width], dim=1)
        return out_NM

    def encode_tokens(
        self, modality: Modality | str, contents: Contents, *, max_tokens: int | None = None, on_error: OnError = "raise"
    ) -> list[Tensor]:
        """For each content `[tokens, W]` fp32 unit vectors, as late interaction scores them, in the order of `contents`.

        Args:
            max_tokens: keep only the first so many, as a query does: `config.late_interaction.max_query_span` of them in training.
            on_error: `nan` answers no tokens for a content that cannot be decoded.

        Raises:
            ValueError: the run trained no token head, the modality is not encoded here, or `max_tokens` is negative.
            DecodeError: a content cannot be decoded; its `index` says which.
        """
        if max_tokens is not None:
            max_tokens = require_count("Encoder.encode_tokens", "max_tokens", max_tokens)
        listed = _listed("contents", contents)
        kind = self._kind(modality)
        require_choice("Encoder.encode_tokens", "on_error", on_error, ("raise", "nan"))
        head = self._network.token_head
        if head is None:
            raise ValueError("the checkpoint holds no token head: train with late_interaction.weight above 0")
        out = [torch.zeros(0, self.token_width, device=self.device) for _ in listed]
        for batch, index_S in self._batches(kind, listed, None, on_error):
            states_PD, layout = self._states(batch)
            with torch.no_grad():
                vectors_PW = head(states_PD.float())
            for index, start, tokens in zip(index_S, layout.start_S.tolist(), layout.tokens_S.tolist(), strict=True):
                kept = tokens if max_tokens is None else min(tokens, max_tokens)
                out[index] = vectors_PW[start + 1 : start + 1 + kept].clone()
        return out

    def choose(self, states: Contents, choices: Contents) -> Tape[np.float32]:
        """The probability of each legal byte at the end of each state, as a `(data, offsets)` tape shaped like `choices`.

        Args:
            states: texts; one longer than a row is cut at its head.
            choices: the legal bytes of each state, distinct, at least one.

        Raises:
            ValueError: the run trained no text head, or an entry of `choices` is empty or repeats a byte.
        """
        listed, legal = _listed("states", states), _listed("choices", choices)
        if self._network.heads.of(Modality.TEXT) is None:
            raise ValueError("the checkpoint holds no text head: train with choices.weight above 0, or a masked objective")
        if len(listed) != len(legal):
            raise ValueError(f"there are {len(listed)} states and {len(legal)} entries of choices: give one for each")
        for index, entry in enumerate(legal):
            if not entry or len(set(entry)) != len(entry):
                raise ValueError(f"the choices of state {index} are {bytes(entry)!r}: they must be distinct bytes, at least one")
        offsets = np.zeros(len(legal) + 1, np.int64)
        np.cumsum([len(entry) for entry in legal], out=offsets[1:])
        data = np.zeros(int(offsets[-1]), np.float32)
        for batch, index_S in self._batches(Modality.TEXT, listed, legal, "raise"):
            states_PD, layout = self._states(batch)
            with torch.no_grad():
                probability_L = choice_log_probabilities(states_PD.float(), self._network.heads.text, layout).exp().cpu().numpy()
            for index, (first, end) in zip(index_S, pairwise(layout.choice_offsets_S1.tolist()), strict=True):
                data[offsets[index] : offsets[index + 1]] = probability_L[first:end]
        return Tape(data, offsets)

    def _states(self, batch: PackedBatch) -> tuple[Tensor, BatchLayout]:
        layout = BatchLayout.from_batch(batch, self.device)
        with torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            return self._network.tower(layout, None), layout

    def _kind(self, modality: Modality | str) -> Modality:
        kind = Modality.given("Encoder", "modality", modality)
        if kind not in self.modalities:
            raise ValueError(f"{kind} is not encoded here: the run trained {', '.join(map(str, self.modalities))}")
        return kind

    def _batches(
        self, kind: Modality, contents: list[bytes], choices: list[bytes] | None, on_error: OnError
    ) -> Iterator[tuple[PackedBatch, list[int]]]:
        """Packed batches, and which content each segment is."""
        shape = self.config.batch if choices is None else replace(self.config.batch, max_choices_per_item=MAX_CHOICES_PER_ITEM)
        packer = Packer(shape, window=LOOK_AHEAD_BATCHES, options=self._options)

        def decoded(index: int) -> DecodedBag:
            return decode_bag(_one(kind, contents[index], None if choices is None else choices[index]), shape, self._options)

        for index, future in _in_order(decoded, len(contents)):
            try:
                packer.add_decoded(future.result(), token=index)
            except DecodeError as error:
                if on_error == "nan":
                    continue
                located = DecodeError(error.kind, f"content {index}: {error.detail.removeprefix('item 0: ')}")
                located.index = index
                raise located from error
            while packer.ready():
                yield _taken(packer)
        while packer.num_pending:
            yield _taken(packer)


def _in_order(call: Callable[[int], DecodedBag], count: int) -> Iterator[tuple[int, "Future[DecodedBag]"]]:
    """Calls with 0 to `count - 1` on a few threads, a bounded number ahead, answered in order."""
    threads = min(MAX_DECODING_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "treadle-decode") as pool:
        ahead: deque[Future[DecodedBag]] = deque()
        try:
            for index in range(count):
                while len(ahead) < 4 * threads and index + len(ahead) < count:
                    ahead.append(pool.submit(call, index + len(ahead)))
                yield index, ahead.popleft()
        finally:
            for future in ahead:
                future.cancel()


def _one(kind: Modality, content: bytes, choices: bytes | None) -> StepItems:
    if choices is None:
        return StepItems([kind], [content])
    # Targets are what training compares with; here they only have to be a distribution.
    return StepItems([kind], [content], choices=[choices], choice_targets=[[1 / len(choices)] * len(choices)])


def _taken(packer: Packer) -> tuple[PackedBatch, list[int]]:
    batch, tokens = packer.take_with_tokens()
    return batch, [int(token) for token in tokens if isinstance(token, int)]


def _listed(name: str, contents: Contents) -> list[bytes]:
    if isinstance(contents, bytes | bytearray | memoryview | str):
        raise ValueError(f"{name} is one content: give a list of them, or a (data, offsets) tape")
    if isinstance(contents, tuple) and len(contents) == 2 and not isinstance(contents[1], bytes | bytearray | memoryview | str):
        tape = content_list(contents, max(0, np.size(contents[1]) - 1), name)
        assert isinstance(tape, Tape)
        return [tape.data[a:b].tobytes() for a, b in pairwise(tape.offsets.tolist())]
    listed = entries_of(contents)
    if listed is None:
        raise ValueError(f"{name} is {shown(contents)}: it must be a list of contents, or a (data, offsets) tape")
    entries = [c.encode() if isinstance(c, str) else c for c in listed]
    return [bytes(c) for c in content_list(entries, len(entries), name)]
