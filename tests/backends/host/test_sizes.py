"""Which numbers of a kernel's text differ between the shapes of a model, and what stands for them."""

from __future__ import annotations

from graphc.backends.host.generator import Loops
from graphc.backends.host.sizes import KnownKernels


def turned(length: int) -> tuple[str, Loops]:
    body = f"y0[(r0 * 8 + r1)] = (x0[(r1 * {length} + r0)] / ({length}.0f)) + x0[(r0 / {length})];"
    return body, Loops(rows=[("r0", length), ("r1", 8)])


def test_numbers_that_differ_are_read_from_a_table() -> None:
    known = KnownKernels()
    known.note(*turned(74))
    body, sizes = known.without_sizes(*turned(77), free=["r0", "r1"])
    assert body == "y0[(r0 * 8 + r1)] = (x0[(r1 * size_0i + r0)] / (size_1f)) + x0[(r0 / 77)];"
    assert sizes.words == [77, 0x429A0000]  # a float by its bits
    assert dict(sizes.loops) == {"r0": 77}


def test_a_number_that_was_the_same_so_far_stays() -> None:
    known = KnownKernels()
    known.note(*turned(74))
    assert known.without_sizes(*turned(74), free=["r0"])[0] == turned(74)[0]


def test_kernels_of_another_form_do_not_count() -> None:
    known = KnownKernels()
    known.note("y0[r0] = x0[(r0 * 3)];", Loops(rows=[("r0", 5)]))
    known.note("y0[r0] = x0[(r0 + 4)];", Loops(rows=[("r0", 6)]))
    body, sizes = known.without_sizes("y0[r0] = x0[(r0 + 4)];", Loops(rows=[("r0", 7)]), free=["r0"])
    assert body == "y0[r0] = x0[(r0 + 4)];"
    assert dict(sizes.loops) == {"r0": 7}


def test_a_loop_whose_size_decides_the_order_of_a_sum_keeps_it() -> None:
    known = KnownKernels()
    known.note("s1 = Sum::of(s1, x0[c1]);", Loops(columns=[("c1", 30)]))
    _, sizes = known.without_sizes("s1 = Sum::of(s1, x0[c1]);", Loops(columns=[("c1", 31)]), free=[])
    assert not sizes.loops
