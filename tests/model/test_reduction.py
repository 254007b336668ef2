"""Sending slices of the gradient beside the backward pass: which, when, in what order."""

import torch
from torch import Tensor, nn

from treadle.model.mesh import World
from treadle.model.optimizer import FlatParameters
from treadle.model.reduction import GradientReduction


class Recorder(World):
    """Two ranks that hold the same: a sum doubles. Remembers what was sent, and what each slice held then."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.sent: list[tuple[int, int]] = []
        self.waited = 0

    def begin_sum(self, x: Tensor) -> object:
        begin = int(x.storage_offset())
        self.sent.append((begin, begin + x.numel()))
        x.mul_(2)
        return self

    def wait_for(self, work: object) -> None:
        assert work is self
        self.waited += 1


class Chain(nn.Module):
    """Four products of 16 x 16 in a row; `used` of them, from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.eye(16)) for _ in range(4))

    def forward(self, x: Tensor, used: int = 4) -> Tensor:
        for layer in list(self.layers)[:used]:
            x = x @ layer
        return x.sum()


def made(bucket_elements: int = 256) -> tuple[Recorder, Chain, FlatParameters, GradientReduction]:
    world, chain = Recorder(), Chain()
    parameters = FlatParameters(chain)
    return world, chain, parameters, GradientReduction(world, parameters, chain, bucket_bytes=4 * bucket_elements)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def test_slices_go_in_the_reverse_of_the_forward_pass_while_it_runs_back() -> None:
    world, chain, parameters, reduction = made()
    seen: list[int] = []
    for layer in chain.layers:
        layer.register_hook(lambda _: seen.append(len(world.sent)))
    reduction.arm(after_rows=False)
    backward(chain(torch.ones(1, 16)))
    # A layer's slice is away before the layer below it has its gradient.
    assert seen == [0, 1, 2, 3]
    assert world.sent == [(768, 1024), (512, 768), (256, 512), (0, 256)] == reduction.slices
    reduction.finish()
    assert (world.waited, reduction.sent_early) == (4, 4)
    # d sum(x I I I I) / d layer = x^T 1 = ones, twice.
    assert torch.equal(parameters.gradients, torch.full((1024,), 2.0))


def test_a_slice_of_several_parameters_waits_for_all() -> None:
    world, chain, _, reduction = made(bucket_elements=384)
    reduction.arm(after_rows=False)
    backward(chain(torch.ones(1, 16)))
    # 1024 elements in slices of 384: layers 3 and 2, then 2 and 1, then 1 and 0.
    assert world.sent == [(768, 1024), (384, 768), (0, 384)]


def test_what_has_no_gradient_holds_back_and_goes_at_the_end() -> None:
    world, chain, parameters, reduction = made()
    reduction.arm(after_rows=False)
    backward(chain(torch.ones(1, 16), used=2))
    # The last two layers come first in the order and have nothing.
    assert world.sent == []
    reduction.finish()
    assert world.sent == reduction.slices and reduction.sent_early == 0
    assert torch.equal(parameters.gradients[:512], torch.full((512,), 2.0)) and not parameters.gradients[512:].any()


def test_only_the_armed_pass_sends() -> None:
    world, chain, parameters, reduction = made()
    for _ in range(2):
        backward(chain(torch.ones(1, 16)))
    assert world.sent == []
    reduction.arm(after_rows=False)
    backward(chain(torch.ones(1, 16)))
    reduction.finish()
    assert torch.equal(parameters.gradients, torch.full((1024,), 6.0))
    # A step in which nobody had anything is not armed, and sends all the same.
    world.sent.clear()
    parameters.gradients.zero_()
    reduction.finish()
    assert world.sent == reduction.slices


def test_slices_wait_for_the_gathered_rows() -> None:
    world, chain, _, reduction = made()
    seen: list[int] = []

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            seen.append(len(world.sent))
            assert world.after_rows is not None
            world.after_rows()
            return gradients[0]

    reduction.arm(after_rows=True)
    # The rows' gradient comes after the top layer's.
    x = torch.ones(1, 16)
    for layer in list(chain.layers)[:2]:
        x = x @ layer
    x = Rows.apply(x)
    for layer in list(chain.layers)[2:]:
        x = x @ layer
    backward(x.sum())
    assert seen == [0] and world.sent == reduction.slices
    reduction.finish()
    assert world.after_rows is None


def test_one_process_sends_nothing() -> None:
    chain = Chain()
    parameters = FlatParameters(chain)
    reduction = GradientReduction(World(), parameters, chain)
    reduction.arm(after_rows=True)
    backward(chain(torch.ones(1, 16)))
    reduction.finish()
    assert reduction.slices == [] and torch.equal(parameters.gradients, torch.ones(1024))
