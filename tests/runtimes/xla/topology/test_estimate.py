"""The compiler's estimate, as it is read, and what is estimated of conditionals."""

import numpy as np
import pytest

from benchmarks.hlo import hlo_from_text
from mtf_gradsync.runtimes._private.jax import stablehlo_to_hlo
from mtf_gradsync.runtimes.xla.topology.chips import Rates
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate, read_estimate, with_conditions

pytestmark = pytest.mark.xla

MODULE = """
module @step {
  func.func @main(%a: tensor<i1>, %b: tensor<i1>, %x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = "stablehlo.if"(%a) ({
      %1 = stablehlo.add %x, %x : tensor<4xf32>
      %2 = "stablehlo.if"(%b) ({
        %3 = stablehlo.multiply %1, %1 : tensor<4xf32>
        stablehlo.return %3 : tensor<4xf32>
      }, {
        stablehlo.return %1 : tensor<4xf32>
      }) : (tensor<i1>) -> tensor<4xf32>
      stablehlo.return %2 : tensor<4xf32>
    }, {
      %4 = stablehlo.negate %x : tensor<4xf32>
      stablehlo.return %4 : tensor<4xf32>
    }) : (tensor<i1>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


@pytest.mark.parametrize(("value", "has"), [(True, {"add", "multiply"}), (False, {"negate"})])
def test_branches_stand_in_line_where_conditions_are_known(value, has):
    text = with_conditions(MODULE, value)
    assert "stablehlo.if" not in text
    assert {name for name in ("add", "multiply", "negate") if f"stablehlo.{name}" in text} == has
    # Nothing to put in line any more.
    assert with_conditions(text, value) is None


OPPOSITE = """
module @step {
  func.func @main(%a: tensor<i1>, %x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
    %0 = stablehlo.not %a : tensor<i1>
    %1 = "stablehlo.if"(%0) ({
      %2 = stablehlo.sine %x : tensor<4xf32>
      stablehlo.return %2 : tensor<4xf32>
    }, {
      stablehlo.return %x : tensor<4xf32>
    }) : (tensor<i1>) -> tensor<4xf32>
    OTHER
    return %1, %3 : tensor<4xf32>, tensor<4xf32>
  }
}
"""
UPDATE = """%3 = "stablehlo.if"(%a) ({
      %4 = stablehlo.add %x, %x : tensor<4xf32>
      stablehlo.return %4 : tensor<4xf32>
    }, {
      stablehlo.return %x : tensor<4xf32>
    }) : (tensor<i1>) -> tensor<4xf32>"""


@pytest.mark.parametrize(
    ("other", "value", "has"),
    [
        (UPDATE, True, {"add"}),
        (UPDATE, False, {"sine"}),
        # Alone, it is a condition like any other.
        ("%3 = stablehlo.add %x, %x : tensor<4xf32>", True, {"add", "sine"}),
        ("%3 = stablehlo.add %x, %x : tensor<4xf32>", False, {"add"}),
    ],
)
def test_a_step_has_one_of_two_opposite_branches(other, value, has):
    text = with_conditions(OPPOSITE.replace("OTHER", other), value)
    assert {name for name in ("add", "sine") if f"stablehlo.{name}" in text} == has


RATES = Rates(flops=1e9, bytes=1e6)


def test_an_estimate_has_libtpus_own_numbers_too():
    compiled = stablehlo_to_hlo(with_conditions(MODULE, True))
    numbers = {"flops": 8.0, "bytes accessed": 64.0, "optimal_seconds": 3e-6 - 2.0}
    found = read_estimate(numbers, compiled, RATES)
    assert (found.flops, found.compiler_bytes, found.unknown) == (8.0, 64.0, 0)
    # 2 - 3e-6 in float64, and back: each operation without an estimate is -1.
    np.testing.assert_allclose(found.compiler_seconds, 3e-6, rtol=1e-9)
    own = read_estimate({**numbers, "optimal_seconds": 3e-6}, compiled, RATES)
    assert own.compiler_seconds == 3e-6
    assert found.bytes_copied == 0
    # The times are of the program's operations, whatever libtpu's are.
    assert found.seconds == own.seconds == pytest.approx(found.bytes_accessed / 1e6)
    assert found.roofline_seconds == found.bytes_accessed / 1e6
    products = read_estimate({**numbers, "flops": 1e9}, compiled, RATES)
    assert products.roofline_seconds == 1.0


COPY = """
HloModule step, is_scheduled=true
ENTRY %step (x: SHAPE) -> SHAPE {
  %x = SHAPE{LAYOUT} parameter(0)
  %begun = (SHAPE{FAST}, SHAPE{LAYOUT}, u32[]{:S(2)}) copy-start(%x)
  ROOT %done = SHAPE{FAST} copy-done(%begun)
}
"""


@pytest.mark.parametrize(
    ("shape", "order", "tiles", "bytes_"),
    [
        ("f32[5,64]", "1,0", "T(8,128)", 8 * 128 * 4),
        ("f32[5,200]", "0,1", "T(8,128)", 200 * 128 * 4),
        # The second part of a tile orders its numbers.
        ("bf16[4,60,2,32]", "1,3,2,0", "T(8,128)(2,1)", 4 * 2 * 32 * 128 * 2),
        ("s32[130]", "0", "T(128)", 2 * 128 * 4),
        ("f32[3]", "0", "", 3 * 4),
        ("f32[]", "", "T(128)", 4),
    ],
)
def test_copies_count_with_the_padding_of_tiles(shape, order, tiles, bytes_):
    layout, fast = (f"{{{order}:{tiles}{space}}}" for space in ("", "S(1)"))
    text = COPY.replace("{LAYOUT}", layout.replace(":}", "}")).replace("{FAST}", fast)
    numbers = {"flops": 0.0, "bytes accessed": 0.0, "optimal_seconds": 0.0}
    found = read_estimate(numbers, hlo_from_text(text.replace("SHAPE", shape)), RATES)
    assert found.bytes_copied == bytes_


SPLIT = """
module @step {
  func.func @main(%a: tensor<i1>, %x: tensor<4xui32>) -> tensor<4xui32> {
    %0 = stablehlo.custom_call @X64SplitHigh(%x) : (tensor<4xui32>) -> tensor<4xui32>
    %1 = stablehlo.custom_call @X64Combine(%0) : (tensor<4xui32>) -> tensor<4xui32>
    %2 = "stablehlo.if"(%a) ({
      %3 = stablehlo.custom_call @X64SplitLow(%1) : (tensor<4xui32>) -> tensor<4xui32>
      stablehlo.return %3 : tensor<4xui32>
    }, {
      stablehlo.return %1 : tensor<4xui32>
    }) : (tensor<i1>) -> tensor<4xui32>
    return %2 : tensor<4xui32>
  }
}
"""


def test_steps_of_seconds_do_not_hide_operations_without_an_estimate():
    # Two outside of the branch, which the estimate leaves out.
    numbers = {"flops": 8.0, "bytes accessed": 64.0, "optimal_seconds": 4.25 - 2.0}
    assert read_estimate(numbers, stablehlo_to_hlo(SPLIT), RATES).compiler_seconds == 4.25


def test_turns_add_what_one_more_of_them_takes():
    once = CostEstimate(10.0, 20.0, 3.0, 1, ("X",), 4.0, 0, RATES, 5.0, 6.0)
    more = CostEstimate(15.0, 22.0, 4.0, 9, (), 0.0, 0, RATES, 5.5, 8.0)
    sums = 10.0 + 3 * 5, 20.0 + 3 * 2, 3.0 + 3 * 1, 1, ("X",), 4.0 - 3 * 4, 0, RATES
    assert once.plus(3, once, more) == CostEstimate(*sums, 5.0 + 3 * 0.5, 6.0 + 3 * 2)
