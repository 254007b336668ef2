"""The step's number and what follows from it, on the device: a captured graph counts for itself which step it takes.

Every draw's counter and the learning rate come from this number, so that nothing of a step's scalars travels with its batch.
"""

import math

import torch
from torch import Tensor

from treadle.model.config import Schedule


class DeviceClock:
    """Counts steps on the device; the host says where to start and remembers where it has got to."""

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self._schedule = schedule.resolved()
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        """int64 scalar: the step being taken, from one; 0 before the first."""

    def place(self, step: int) -> None:
        """Sets the number of the last step taken: after steps that the clock did not see."""
        self.step.fill_(step)

    def advance(self) -> None:
        """Begins the next step."""
        self.step.add_(1)

    def counter(self, purpose: int) -> Tensor:
        """int64 scalar: word 3 of the counters of this step's draws, `(16 step + purpose) mod 2^32`."""
        return (self.step * 16 + purpose) & 0xFFFFFFFF

    def learning_rate(self) -> Tensor:
        """float64 scalar: `Schedule.learning_rate_at` of this step."""
        shown = self._schedule
        peak, floor, warmup = shown.learning_rate, shown.min_learning_rate, shown.warmup_steps
        top = max(1, warmup)
        step = self.step.double()
        done = (step - top) / max(1, shown.steps - top)
        cosine = floor + (peak - floor) * 0.5 * (1 + torch.cos(math.pi * done))
        rate = torch.where(step >= shown.steps, floor, cosine)
        rate = torch.where(step <= top, peak, rate)
        return torch.where(step < warmup, peak * step / max(1, warmup), rate)
