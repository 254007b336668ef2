"""An accumulation window: gradients of earlier micro-batches that wait for the step that ends it.

Gradients are kept by term and unnormalised, because what they will be divided by is the whole window's count, not yet known. They stay
on their rank until the step reduces them; those of a sharded tower's blocks are summed as they come, and each rank keeps its slices.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from treadle.model.checkpoint import CheckpointMismatchError, RankState
from treadle.model.objectives import TERMS
from treadle.model.optimizer import FlatParameters


class AccumulationWindow:
    """What `accumulate` added since the last step, on this rank."""

    def __init__(self, parameters: FlatParameters) -> None:
        self._parameters = parameters
        device = parameters.weights.device
        self.gradients: dict[str, Tensor] = {}
        """Flat gradients by term."""
        self.counts_K = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        self.sums_K = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        self.micro_batches = 0
        self.truncated = 0
        self.dropped = 0

    def add(self, term: str) -> None:
        """Adds what the parameters' gradients hold now as a part of `term`."""
        if term in self.gradients:
            self.gradients[term] += self._parameters.gradients
        else:
            self.gradients[term] = self._parameters.gradients.clone()

    def pour(self, scales_K: Tensor) -> None:
        """Adds every term's gradient, scaled, to the parameters' gradients."""
        for k, term in enumerate(TERMS):
            if term in self.gradients:
                self._parameters.gradients.addcmul_(self.gradients[term], scales_K[k].float())

    def clear(self) -> None:
        """Starts a new window."""
        self.gradients.clear()
        self.counts_K.zero_()
        self.sums_K.zero_()
        self.micro_batches = self.truncated = self.dropped = 0

    def state(self) -> RankState:
        """The window on the host, copied (collective where parameters are sharded); its stream is left to the caller."""
        state = RankState(micro_batches=self.micro_batches, truncated=self.truncated, dropped=self.dropped)
        if self.micro_batches:
            state.counts, state.sums = self.counts_K.cpu().clone(), self.sums_K.cpu().clone()
            for term, flat in self.gradients.items():
                state.pending[term] = {name: part for name, part in self._parameters.own(flat).items() if bool(part.any())}
        return state

    def load(self, path: str, state: RankState, world: RankState) -> None:
        """Takes over a recorded window.

        Args:
            world: all ranks' windows summed, where gradients of sharded parameters come from.

        Raises:
            CheckpointMismatchError: it holds a term or parameter that this run does not have.
        """
        self.clear()
        if not state.micro_batches:
            return
        if state.counts is None or state.sums is None or len(state.counts) != len(TERMS) or len(state.sums) != len(TERMS):
            raise CheckpointMismatchError(f"{path}: its open accumulation window holds other terms than this version has")
        self.micro_batches, self.truncated, self.dropped = state.micro_batches, state.truncated, state.dropped
        self.counts_K.copy_(state.counts)
        self.sums_K.copy_(state.sums)
        for term in sorted(state.pending.keys() | world.pending.keys()):
            if term not in TERMS:
                raise CheckpointMismatchError(f"{path}: its open accumulation window holds the unknown term {term[:40]!r}")
            parts = {n: part for n, part in state.pending.get(term, {}).items() if not self._parameters.comes_summed(n)}
            parts |= {n: part for n, part in world.pending.get(term, {}).items() if self._parameters.comes_summed(n)}
            self.gradients[term] = self._flat(path, term, parts)

    def _flat(self, path: str, term: str, parts: Mapping[str, Tensor]) -> Tensor:
        flat = torch.zeros_like(self._parameters.gradients)
        known = dict(self._parameters.shapes())
        for name, part in parts.items():
            if name not in known or known[name].shape != part.shape:
                raise CheckpointMismatchError(f"{path}: its open accumulation window holds {term} gradients of {name}, which do not fit")
        self._parameters.place(flat, parts)
        return flat
