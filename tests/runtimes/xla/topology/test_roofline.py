"""Operations and bytes of compiled programs, counted by hand."""

import itertools

import numpy as np
import pytest

from benchmarks.hlo import hlo_from_text
from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.hlo import read_module
from mtf_gradsync.runtimes.xla.topology.chips import Rates
from mtf_gradsync.runtimes.xla.topology.roofline import why_doubtful, work_of

pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(bool(xla.why_no_xla()), reason=xla.why_no_xla()),
]

RATES = Rates(flops=1e6, bytes=1e3)
SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""


def work(text, conditions=None):
    module = read_module(hlo_from_text("HloModule m, is_scheduled=true\n" + text))
    return work_of(module, RATES, conditions)


def test_each_operation_takes_the_longer_of_its_products_and_its_bytes():
    found = work("""
ENTRY %main (x: f32[40,50], y: f32[50,60]) -> f32[40,60] {
  %x = f32[40,50] parameter(0)
  %y = f32[50,60] parameter(1)
  %product = f32[40,60] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %twice = f32[40,60] add(%product, %product)
}""")
    flops = 2 * 40 * 50 * 60
    product, twice = 4 * (40 * 50 + 50 * 60 + 40 * 60), 4 * 3 * 40 * 60
    assert (found.flops, found.bytes) == (flops, product + twice)
    assert found.seconds == pytest.approx(max(flops / 1e6, product / 1e3) + twice / 1e3)
    quick = work_of(read_module(hlo_from_text(DOT)), Rates(flops=1e3, bytes=1e9))
    assert quick.seconds == pytest.approx(2 * 4 * 5 * 6 * 2 / 1e3)


# Two products in a batch.
DOT = """
HloModule m
ENTRY %main (x: f32[2,4,5], y: f32[2,6,5]) -> f32[2,4,6] {
  %x = f32[2,4,5] parameter(0)
  %y = f32[2,6,5] parameter(1)
  ROOT %p = f32[2,4,6] dot(%x, %y), lhs_batch_dims={0}, rhs_batch_dims={0},
    lhs_contracting_dims={2}, rhs_contracting_dims={2}
}
"""


def test_of_a_convolution_only_what_meets_numbers_counts():
    """Against a loop over all places of the window, with padding, strides and dilations."""
    rng = np.random.RandomState(0)
    seen = 0
    while seen < 60:
        numbers, kernel, stride, base, dilation = rng.randint(1, 7, 5)
        low, high = rng.randint(-1, 8, 2)
        dilated = (numbers - 1) * base + 1 + low + high
        reach = (kernel - 1) * dilation + 1
        if dilated < reach:
            continue
        seen += 1
        results = (dilated - reach) // stride + 1
        met = 0
        for result, place in itertools.product(range(results), range(kernel)):
            at = result * stride + place * dilation - low
            met += at % base == 0 and 0 <= at // base < numbers
        window = f"size={kernel} stride={stride} pad={low}_{high} lhs_dilate={base}"
        found = work(f"""
ENTRY %main (x: f32[3,{numbers},5], k: f32[{kernel},5,7]) -> f32[3,{results},7] {{
  %x = f32[3,{numbers},5] parameter(0)
  %k = f32[{kernel},5,7] parameter(1)
  ROOT %c = f32[3,{results},7] convolution(%x, %k),
    window={{{window} rhs_dilate={dilation}}}, dim_labels=b0f_0io->b0f
}}""")
        assert found.flops == 2 * 3 * 5 * 7 * met, window


def test_fusions_read_the_slices_that_they_take_and_write_what_they_change():
    found = work("""
%cut (table: f32[100,8], place: s32[]) -> f32[2,8] {
  %table = f32[100,8] parameter(0)
  %place = s32[] parameter(1)
  %same = f32[100,8] bitcast(%table)
  %zero = s32[] constant(0)
  %rows = f32[2,8] dynamic-slice(%same, %place, %zero), dynamic_slice_sizes={2,8}
  ROOT %negated = f32[2,8] negate(%rows)
}

%put (table: f32[100,8], rows: f32[2,8], place: s32[]) -> f32[100,8] {
  %table = f32[100,8] parameter(0)
  %rows = f32[2,8] parameter(1)
  %place = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %changed = f32[100,8] dynamic-update-slice(%table, %rows, %place, %zero)
}

ENTRY %main (table: f32[100,8], place: s32[]) -> f32[100,8] {
  %table = f32[100,8] parameter(0)
  %place = s32[] parameter(1)
  %rows = f32[2,8] fusion(%table, %place), kind=kLoop, calls=%cut
  ROOT %changed = f32[100,8] fusion(%table, %rows, %place), kind=kLoop, calls=%put
}""")
    rows = 4 * 2 * 8
    assert found.bytes == (rows + 4 + rows) + (rows + 4 + rows)
    assert found.seconds == pytest.approx(found.bytes / 1e3)


def test_products_in_fusions_count_and_all_is_read_that_is_used_twice():
    found = work(
        """
%both (x: f32[6,6]) -> f32[6,6] {
  %x = f32[6,6] parameter(0)
  %zero = s32[] constant(0)
  %one = f32[] constant(1)
  %row = f32[1,6] dynamic-slice(%x, %zero, %zero), dynamic_slice_sizes={1,6}
  %p = f32[6,6] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %wide = f32[6,6] pad(%row, %one), padding=0_5x0_0
  ROOT %out = f32[6,6] add(%p, %wide)
}

ENTRY %main (x: f32[6,6]) -> f32[6,6] {
  %x = f32[6,6] parameter(0)
  ROOT %out = f32[6,6] fusion(%x), kind=kOutput, calls=%both
}"""
    )
    assert found.flops == 2 * 6 * 6 * 6
    assert found.bytes == 2 * 4 * 6 * 6


def test_copies_beside_other_operations_take_nothing_and_collectives_do():
    found = work(
        SUM
        + """
%cut (x: f32[8,8]) -> f32[2,8] {
  %x = f32[8,8] parameter(0)
  ROOT %rows = f32[2,8] slice(%x), slice={[0:2], [0:8]}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %begun = (f32[8,8], f32[8,8], u32[]) copy-start(%x)
  %part = ((f32[8,8]), f32[2,8], u32[]) async-start(%x), calls=%cut
  %rows = f32[2,8] async-done(%part), calls=%cut
  %fast = f32[8,8] copy-done(%begun)
  %sent = f32[8,8] all-reduce-start(%fast), replica_groups={}, to_apply=%sum
  ROOT %summed = f32[8,8] all-reduce-done(%sent)
}"""
    )
    assert found.bytes == 2 * 4 * 8 * 8


def test_a_loop_turns_once_and_of_a_conditional_no_branch_counts():
    found = work("""
%turn (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %n = f32[8] negate(%x)
}

%more (x: f32[8]) -> pred[] {
  %x = f32[8] parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[8], c: pred[]) -> f32[8] {
  %x = f32[8] parameter(0)
  %c = pred[] parameter(1)
  %w = f32[8] while(%x), condition=%more, body=%turn
  ROOT %b = f32[8] conditional(%c, %w, %w), true_computation=%turn, false_computation=%turn
}""")
    assert found.bytes == 2 * 4 * 8


def test_custom_calls_count_with_their_bytes_and_are_named():
    found = work("""
ENTRY %main (x: s64[8]) -> u32[8] {
  %x = s64[8] parameter(0)
  %memory = f32[1000] custom-call(), custom_call_target="AllocateBuffer"
  %low = u32[8] custom-call(%x), custom_call_target="X64SplitLow"
  ROOT %k = u32[8] custom-call(%low), custom_call_target="kernel"
}""")
    assert found.bytes == (64 + 32) + (32 + 32)
    assert found.unknown == ("kernel",)


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        (1.9, ""),
        (1.0, ""),
        (0.9, "below its roofline of 1e+03 ms"),
        (40.0, "40 times its roofline of 1e+03 ms"),
    ],
)
def test_what_cannot_be_beside_the_roofline_of_the_whole(seconds, why):
    assert why_doubtful(seconds, 1.0) == why


@pytest.mark.parametrize(("conditions", "passes"), [(None, 0), (True, 2), (False, 3)])
def test_branches_count_by_the_value_of_conditions(conditions, passes):
    found = work(
        """
%update (x: f32[6,6]) -> f32[6,6] {
  %x = f32[6,6] parameter(0)
  ROOT %y = f32[6,6] negate(%x)
}

%skip (x: f32[6,6]) -> f32[6,6] {
  %x = f32[6,6] parameter(0)
  ROOT %y = f32[6,6] add(%x, %x)
}

ENTRY %main (p: pred[], x: f32[6,6]) -> f32[6,6] {
  %p = pred[] parameter(0)
  %x = f32[6,6] parameter(1)
  %y = f32[6,6] negate(%x)
  ROOT %out = f32[6,6] conditional(%p, %y, %y), true_computation=%update,
    false_computation=%skip
}""",
        conditions,
    )
    assert found.bytes == 4 * 6 * 6 * (2 + passes)
