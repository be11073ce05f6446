"""Programs in which a loop turns once more, to estimate what its turns cost."""

import pytest

from mtf_gradsync.runtimes._private.jax import stablehlo_to_hlo
from mtf_gradsync.runtimes.xla.topology.estimate import turns_more

pytestmark = pytest.mark.xla

# A loop of four turns, whose body squares; "INNER" stands for more of it.
MODULE = """
module @step {
  func.func private @less(%i: tensor<i32>, %y: tensor<4xf32>) -> tensor<i1> {
    %end = stablehlo.constant dense<9> : tensor<i32>
    %0 = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
    return %0 : tensor<i1>
  }
  func.func @main(%x: tensor<4xf32>, %n: tensor<i32>) -> tensor<4xf32> {
    %first = stablehlo.constant dense<2> : tensor<i32>
    %0:2 = stablehlo.while(%i = %first, %y = %x) : tensor<i32>, tensor<4xf32>
    cond {
      %1 = func.call @less(%i, %y) : (tensor<i32>, tensor<4xf32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %by = stablehlo.constant dense<2> : tensor<i32>
      %1 = stablehlo.add %i, %by : tensor<i32>
      %2 = stablehlo.multiply %y, %y : tensor<4xf32>
      INNER
      stablehlo.return %1, %2 : tensor<i32>, tensor<4xf32>
    }
    return %0#1 : tensor<4xf32>
  }
}
"""
# A loop of three turns, whose body adds.
INNER = """%zero = stablehlo.constant dense<0> : tensor<i32>
      %3:2 = stablehlo.while(%j = %zero, %z = %2) : tensor<i32>, tensor<4xf32>
      cond {
        %three = stablehlo.constant dense<3> : tensor<i32>
        %4 = stablehlo.compare LT, %j, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %4 : tensor<i1>
      } do {
        %one = stablehlo.constant dense<1> : tensor<i32>
        %4 = stablehlo.add %j, %one : tensor<i32>
        %5 = stablehlo.add %z, %z : tensor<4xf32>
        stablehlo.return %4, %5 : tensor<i32>, tensor<4xf32>
      }"""
ONE = MODULE.replace("INNER", "")
NESTED = MODULE.replace("INNER", INNER).replace("%1, %2 :", "%1, %3#1 :")


def counts(module):
    """How many squares and loops a program has."""
    stablehlo_to_hlo(module)  # it is one
    return module.count("stablehlo.multiply"), module.count("stablehlo.while")


def test_a_turn_stands_before_the_loop():
    (one,), unknown = turns_more(ONE)
    # 2, 4, 6, 8: four turns, of which one is counted.
    assert (one.times, unknown) == (3, 0)
    assert counts(ONE) == (1, 1)
    assert counts(one.module) == (2, 1)


def test_conditions_that_are_functions_of_tuples():
    """As TensorFlow 2.15 has them."""
    given = "tuple<tensor<i32>, tensor<4xf32>>"
    module = ONE.replace(
        "@less(%i: tensor<i32>, %y: tensor<4xf32>) -> tensor<i1> {",
        f"@less(%all: {given}) -> tuple<tensor<i1>> {{\n"
        f"    %i = stablehlo.get_tuple_element %all[0] : ({given}) -> tensor<i32>",
    )
    module = module.replace(
        "return %0 : tensor<i1>\n  }\n  func.func @main",
        "%1 = stablehlo.tuple %0 : tuple<tensor<i1>>\n    return %1 : tuple<tensor<i1>>\n  }\n"
        "  func.func @main",
    )
    module = module.replace(
        "%1 = func.call @less(%i, %y) : (tensor<i32>, tensor<4xf32>) -> tensor<i1>",
        f"%all = stablehlo.tuple %i, %y : {given}\n"
        f"      %one = func.call @less(%all) : ({given}) -> tuple<tensor<i1>>\n"
        "      %1 = stablehlo.get_tuple_element %one[0] : (tuple<tensor<i1>>) -> tensor<i1>",
    )
    (one,), unknown = turns_more(module)
    assert module.count("tuple") > 8
    assert (one.times, unknown) == (3, 0)


def test_loops_in_loops_turn_as_often_as_both():
    (outer, inner), unknown = turns_more(NESTED)
    # What an inner turn has more is in 4 * 3 turns, 4 of which are in the outer ones.
    assert (outer.times, inner.times, unknown) == (3, 4 * 3 - 4, 0)
    assert counts(NESTED) == (1, 2)
    assert counts(outer.module) == (2, 3)
    assert counts(inner.module) == (1, 2)
    assert inner.module.count("stablehlo.add") == NESTED.count("stablehlo.add") + 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%i = %first", "%i = %n"),
        ("compare LT", "compare NE"),
        ("stablehlo.add %i, %by", "stablehlo.multiply %i, %by"),
        ("dense<2> : tensor<i32>\n      %1", "dense<-2> : tensor<i32>\n      %1"),
    ],
)
def test_turns_that_the_program_does_not_say_are_not_known(old, new):
    assert old in ONE
    assert turns_more(ONE.replace(old, new)) == ([], 1)


def test_one_turn_none_and_no_loop_need_no_other_program():
    assert turns_more(ONE.replace("dense<9>", "dense<4>")) == ([], 0)
    # The compiler removes a loop that never turns, and those in it.
    assert turns_more(NESTED.replace("dense<9>", "dense<2>")) == ([], 0)
    assert turns_more("module @step {}") == ([], 0)
