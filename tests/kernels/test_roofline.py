"""The page of predicted times against the formula it states, and against what the kernels declare."""

import pytest

from treadle.kernels.registry import Cost, Workload
from treadle.kernels.roofline import BANDWIDTH_SHARE, CHIPS, LAUNCH_S, PAGE, Line, lines, model_operations, page, parameters, products

H200 = next(chip for chip in CHIPS if chip.name == "H200")


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m treadle.kernels.roofline"


def test_every_kernel_has_a_line_with_a_cost() -> None:
    from treadle.kernels.registry import all_kernels

    table = {line.name: line for line in lines(Workload())}
    for kernel in all_kernels():
        assert table[kernel.name].cost.bytes > 0 and f"| {kernel.name}" in PAGE.read_text()
        assert (table[kernel.name].cost.matrix_operations > 0) == (kernel.kind == "matrix"), kernel.name


def test_a_launch_takes_the_longer_of_its_two_times() -> None:
    streaming = Line(name="a", cost=Cost(bytes=4.8e9, launches=3), share=0.5)
    # A gigabyte at 4.8 TB/s is a millisecond, and the bandwidth is not all there.
    assert streaming.seconds(H200) == pytest.approx(3 * (1e-3 / BANDWIDTH_SHARE + LAUNCH_S))
    product = Line(name="b", cost=Cost(bytes=1.0, matrix_operations=989e9), share=0.5)
    assert product.seconds(H200) == pytest.approx(2e-3 + LAUNCH_S) and product.bound(H200) == "products"
    assert Line(name="c", cost=Cost(bytes=8.0), share=1.0).bound(H200) == "launch"


def test_operations_of_the_model() -> None:
    """Per layer 4 D^2 in attention and 3 D F in SwiGLU; heads of 1024, 1536 and 320 values; attention's `12 L D` a position and layer."""
    work = Workload()
    layer = 4 * 1024**2 + 3 * 1024 * 2816
    assert parameters(work) == 24 * layer + 1024 * (1024 + 1536 + 320)
    hidden = 0.75 * 1024 * (24_576 * 1024 + 16_384 * 1536 + 8192 * 320)
    assert model_operations(work) == 6 * (65_536 * 24 * layer + hidden) + 12 * 256 * 65_536 * 1024 * 24
    assert sum(1 for _ in products(work)) == 7


def test_alternatives_are_shown_and_not_summed() -> None:
    by_name = {line.name: line for line in lines(Workload())}
    assert not by_name["pair_tiles_ranked"].counted and by_name["pair_tiles"].counted
    assert "| pair_tiles_ranked * |" in page()
