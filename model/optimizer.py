"""AdamW over one flat buffer of weights, and the flat gradient that ranks reduce, measure and clip.

Every parameter of a module becomes a view of one fp32 buffer, decayed ones first, and its `.grad` a view of another of the same
layout. So every parameter has a gradient in every step (zeros where nothing touched it), the world sums it in fixed slices whatever the
modalities, and its norm is one reduction in one order.

The update is torch's fused AdamW (Loshchilov & Hutter, arXiv 1711.05101): `p *= 1 - lr * decay`, then
`p -= lr * m_hat / (sqrt(v_hat) + eps)`. It takes the flag that refuses an update from the device, so that nothing is read back.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from treadle.model.config import OptimizerConfig

ALIGNMENT = 16
"""Parameters start at multiples of this many elements (64 bytes), so that views load as vectors; the gaps stay zero."""

NORM_BLOCK = 4096
"""Elements whose squares are summed in one run: torch on the CPU adds in fp32 one after the other, 0.3 % too little at 40 M elements."""


def is_decayed(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, that is two or more dimensions and more than one row.

    Tables of embeddings with several rows count as matrices; norms, biases, single embeddings and temperatures do not.
    """
    return parameter.ndim >= 2 and parameter.shape[0] > 1


def euclidean_norm(flat: Tensor) -> Tensor:
    """The norm of a flat buffer, a float64 scalar on its device."""
    whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_BLOCK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    norm: Tensor = torch.linalg.vector_norm(torch.cat([blocks, rest[None]]), dtype=torch.float64)
    return norm


class FlatParameters:
    """The parameters of a module, moved into one buffer; their gradients are views of another.

    The order is decayed parameters first, each half in the module's own order.
    """

    is_sharded = False
    """Whether a rank holds parts of parameters only."""

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        if any(p.dtype != torch.float32 for _, p in named):
            raise ValueError("a trainer's master weights are fp32: the module holds parameters of another type")
        ordered = [(n, p) for n, p in named if is_decayed(p)] + [(n, p) for n, p in named if not is_decayed(p)]
        self._spans: dict[str, tuple[int, int, torch.Size]] = {}
        at = 0
        self.num_decayed = 0
        for name, parameter in ordered:
            self._spans[name] = (at, at + parameter.numel(), parameter.shape)
            at += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if is_decayed(parameter):
                self.num_decayed = at
        device = named[0][1].device
        self.weights = torch.zeros(at, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(at, dtype=torch.float32, device=device)
        for name, parameter in ordered:
            view = self.view(self.weights, name)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.view(self.gradients, name)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a buffer of this layout that belongs to a parameter, in its shape."""
        begin, end, shape = self._spans[name]
        return flat[begin:end].view(shape)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's part of a buffer of this layout, in the buffer's order."""
        for name in self._spans:
            yield name, self.view(flat, name)

    def regions(self) -> list[tuple[int, int]]:
        """The spans of the gradient that ranks sum: all of it."""
        return [(0, self.gradients.numel())]

    def norm(self) -> Tensor:
        """Euclidean norm of the gradient, an fp32 scalar on the device (collective where parameters are sharded)."""
        return euclidean_norm(self.gradients).float()

    def absorb(self) -> None:
        """Moves gradients that were left elsewhere into the buffer."""

    def publish(self) -> None:
        """Brings the buffer's weights to parameters that are no views of it."""

    def shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and a tensor of its whole shape."""
        yield from self.views(self.weights)

    def whole(self, flat: Tensor, *, copied: bool) -> dict[str, Tensor]:
        """The whole parameters of a buffer of this layout, by name: views of it, or of a copy on the host."""
        return dict(self.views(flat.to("cpu", copy=True) if copied else flat))

    def own(self, flat: Tensor) -> dict[str, Tensor]:
        """What of a gradient in this layout this rank alone can tell, whole parameters on the host, copied; ranks' answers add up."""
        return self.whole(flat, copied=True)

    def comes_summed(self, name: str) -> bool:
        """Whether a parameter's gradient is summed over ranks before it comes to the buffer."""
        return False

    def place(self, flat: Tensor, found: Mapping[str, Tensor]) -> None:
        """Copies whole parameters into a buffer of this layout."""
        for name, view in self.views(flat):
            if name in found:
                view.copy_(found[name])

    def clip(self, norm: Tensor, most: float) -> None:
        """Scales the gradient so that its norm, now `norm`, is at most `most`; 0 leaves it alone."""
        if most:
            self.gradients.mul_((most / norm.clamp(min=1e-12)).clamp(max=1.0))


class AdamW:
    """AdamW on flat parameters, with an update that the device can refuse."""

    def __init__(self, parameters: FlatParameters, config: OptimizerConfig) -> None:
        device = parameters.weights.device
        groups: list[dict[str, object]] = []
        self._halves: list[nn.Parameter] = []
        bounds = ((0, parameters.num_decayed, config.weight_decay), (parameters.num_decayed, parameters.weights.numel(), 0.0))
        for begin, end, decay in bounds:
            if end > begin:
                half = nn.Parameter(parameters.weights[begin:end])
                half.grad = parameters.gradients[begin:end]
                self._halves.append(half)
                groups.append({"params": [half], "weight_decay": decay})
        # A captured graph reads the rate from its device. The kernels of CUDA take fp32; those of the CPU keep what it is given.
        self._rate = torch.zeros((), dtype=torch.float32 if device.type == "cuda" else torch.float64, device=device)
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=self._rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        """Updates applied, which the bias corrections count; exact to 2^24."""
        self.first = torch.zeros_like(parameters.weights)
        """First moments, in the layout of the weights."""
        self.second = torch.zeros_like(parameters.weights)
        """Second moments."""
        for half, (begin, end) in zip(self._halves, [(b, e) for b, e, _ in bounds if e > b], strict=True):
            self._optimizer.state[half] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": self.first[begin:end],
                "exp_avg_sq": self.second[begin:end],
            }

    def step(self, learning_rate: float | Tensor, refused: Tensor) -> None:
        """Updates the weights by their gradients, unless `refused` (a scalar on the device) is true. Reads nothing back."""
        found_inf = refused.to(torch.float32)
        # The fused kernels read the flag where a gradient scaler leaves it.
        setattr(self._optimizer, "found_inf", found_inf)  # noqa: B010
        if isinstance(learning_rate, Tensor):
            self._rate.copy_(learning_rate)
        else:
            self._rate.fill_(learning_rate)
        self._optimizer.step()
        self.updates += 1 - found_inf

    def set_updates(self, updates: float) -> None:
        """Places a count of applied updates, as a checkpoint holds it."""
        if not (math.isfinite(updates) and updates >= 0):
            raise ValueError(f"updates is {updates}: a count of applied updates is finite and not negative")
        self.updates.fill_(updates)
        for half in self._halves:
            self._optimizer.state[half]["step"].fill_(updates)
