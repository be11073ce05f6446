"""Of equal constants one is kept."""

import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

from mtf_gradsync.runtimes.xla.stablehlo import share_constants

pytest.importorskip("jaxlib")


MODULE = """
func.func public @main(%x: tensor<2xi32>) -> (tensor<2xi32>, tensor<2xi32>, tensor<2xi64>) {
  %a = stablehlo.constant dense<[1, 2]> : tensor<2xi32>
  %b = stablehlo.constant dense<[1, 2]> : tensor<2xi32>
  %c = stablehlo.constant dense<[1, 3]> : tensor<2xi32>
  %long = stablehlo.constant dense<[1, 2]> : tensor<2xi64>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %same = stablehlo.constant dense<1> : tensor<i32>
  %y = stablehlo.add %a, %b : tensor<2xi32>
  %i, %z = stablehlo.while(%j = %one, %k = %y) : tensor<i32>, tensor<2xi32>
  cond {
    %less = stablehlo.compare LT, %j, %same : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %less : tensor<i1>
  } do {
    %d = stablehlo.constant dense<[1, 2]> : tensor<2xi32>
    %e = stablehlo.constant dense<[1, 2]> : tensor<2xi32>
    %f = stablehlo.add %d, %e : tensor<2xi32>
    stablehlo.return %j, %f : tensor<i32>, tensor<2xi32>
  }
  return %z, %c, %long : tensor<2xi32>, tensor<2xi32>, tensor<2xi64>
}
"""


def test_equal_arrays_of_a_block_become_one():
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(MODULE)
        share_constants(module.operation)
        assert module.operation.verify()
        lines = [line.strip() for line in str(module).splitlines()]
    # One for the function and one for the body; other values and types are others.
    arrays = [line.partition(" = ")[2] for line in lines if "dense<[" in line]
    assert sorted(arrays) == [
        "stablehlo.constant dense<[1, 2]> : tensor<2xi32>",
        "stablehlo.constant dense<[1, 2]> : tensor<2xi32>",
        "stablehlo.constant dense<[1, 2]> : tensor<2xi64>",
        "stablehlo.constant dense<[1, 3]> : tensor<2xi32>",
    ]
    for line in lines:
        if "stablehlo.add" in line:
            left, _, right = line.partition("add ")[2].partition(" :")[0].partition(", ")
            assert left == right
    # Numbers stay: they cost nothing.
    assert sum("dense<1>" in line for line in lines) == 2
