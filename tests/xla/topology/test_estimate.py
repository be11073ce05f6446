"""The compiler's estimate, as it is read, and what is estimated of conditionals."""

import numpy as np
import pytest

from mtf_gradsync._private.jax import stablehlo_to_hlo
from mtf_gradsync.xla.topology.estimate import read_estimate, with_conditions

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


def test_operations_without_an_estimate_are_counted():
    compiled = stablehlo_to_hlo(with_conditions(MODULE, True))
    numbers = {"flops": 8.0, "bytes accessed": 64.0, "optimal_seconds": 3e-6 - 2.0}
    found = read_estimate(numbers, compiled)
    assert (found.flops, found.bytes_accessed, found.unknown) == (8.0, 64.0, 2)
    # 2 - 3e-6 in float64, and back.
    np.testing.assert_allclose(found.seconds, 3e-6, rtol=1e-9)
    assert read_estimate({**numbers, "optimal_seconds": 3e-6}, compiled).unknown == 0
    assert found.bytes_copied == 0
