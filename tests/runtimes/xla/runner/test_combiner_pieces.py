"""Packs that are written piece by piece hold the bits of concatenations."""

import re

import numpy as np
import pytest

from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.runner.combiner import combined_for_cpus
from mtf_gradsync.runtimes.xla.runner.jax_devices import put
from mtf_gradsync.runtimes.xla.runner.loaded_program import LoadedProgram, compiled

pytestmark = pytest.mark.skipif(bool(xla.why_no_xla()), reason=xla.why_no_xla())

CORES = 2
SUM = """({
  ^bb0(%a: tensor<TYPE>, %b: tensor<TYPE>):
    %s = stablehlo.add %a, %b : tensor<TYPE>
    stablehlo.return %s : tensor<TYPE>
  })"""


def module(shapes, dtype, axis, between, scatters):
    """A program that packs its arguments and sums the pack, with a reshape between or not."""
    kinds = [f"tensor<{'x'.join(map(str, s))}x{dtype}>" for s in shapes]
    packed = list(shapes[0])
    packed[axis] = sum(s[axis] for s in shapes)
    given = between or packed
    result = [given[0] // CORES, *given[1:]] if scatters else given
    kind = {
        n: f"tensor<{'x'.join(map(str, s))}x{dtype}>"
        for n, s in (("packed", packed), ("given", given), ("result", result))
    }
    arguments = [f"%x{i}" for i in range(len(shapes))]
    signature = ", ".join(f"{a}: {k}" for a, k in zip(arguments, kinds))
    name = "reduce_scatter" if scatters else "all_reduce"
    where = "scatter_dimension = 0 : i64, " if scatters else ""
    groups = f"replica_groups = dense<[{list(range(CORES))}]> : tensor<1x{CORES}xi64>"
    return f"""
func.func public @main({signature}) -> {kind["result"]} {{
  %p = "stablehlo.concatenate"({", ".join(arguments)}) <{{dimension = {axis} : i64}}>
    : ({", ".join(kinds)}) -> {kind["packed"]}
  %g = stablehlo.reshape %p : ({kind["packed"]}) -> {kind["given"]}
  %r = "stablehlo.{name}"(%g) <{{{where}{groups}}}> {SUM.replace("TYPE", dtype)}
    : ({kind["given"]}) -> {kind["result"]}
  return %r : {kind["result"]}
}}"""


ROWS = [(4, 512 + 128 * i) for i in range(9)]
WIDTH = sum(s[1] for s in ROWS)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("shapes", "axis", "between", "scatters"),
    [
        ([(900 + i,) for i in range(9)], 0, None, False),
        ([(40 + i, 3, 7) for i in range(12)], 0, None, False),
        (ROWS, 1, None, True),
        (ROWS, 1, [4, WIDTH // 128, 128], True),
        # Of other rows than were packed: scattered as it was.
        (ROWS, 1, [8, WIDTH // 2], True),
    ],
)
def test_bits_stay(shapes, axis, between, scatters, dtype):
    import jax
    import jax.numpy as jnp

    text = module(shapes, dtype, axis, between, scatters)
    changed = combined_for_cpus(text)
    assert "concatenate" not in changed
    assert len(re.findall("dynamic_update_slice", changed)) == len(shapes)
    # Scattered as packed, where that has the same rows.
    as_packed = re.search(rf"\(tensor<4x{WIDTH}x{dtype}>\) -> tensor<2x{WIDTH}x", changed)
    assert bool(as_packed) == (scatters and (between is None or between[0] == 4))
    devices = jax.devices("cpu")[:CORES]
    rng = np.random.RandomState(0)
    kind = {"f32": np.float32, "bf16": jnp.bfloat16}[dtype]
    arrays = [rng.randn(CORES, *s).astype(kind) for s in shapes]
    results = []
    for one in (text, changed):
        program = LoadedProgram(compiled(one, devices), devices)
        (result,) = program.run([put(list(a), devices) for a in arrays])
        results.append([np.asarray(a).astype(np.float32) for a in result.arrays])
    np.testing.assert_array_equal(*results)
    packed = np.concatenate([a.astype(np.float32) for a in arrays], axis + 1)
    total = (packed[0] + packed[1]).astype(kind).astype(np.float32)
    total = total.reshape(between or total.shape)
    expected = np.split(total, CORES) if scatters else [total] * CORES
    np.testing.assert_array_equal(results[0], expected)


@pytest.mark.parametrize(
    "shapes",
    [[(9000,)] * 3, [(40,)] * 20],
    ids=["few tensors", "small tensors"],
)
def test_small_packs_stay_as_they_are(shapes):
    text = module(shapes, "f32", 0, None, False)
    assert combined_for_cpus(text) == text


def test_what_is_not_summed_stays_as_it_is():
    text = module([(900,)] * 9, "f32", 0, None, False)
    text = re.sub(r"%r = .*?\n    : .*?\n", "", text, flags=re.S).replace("return %r", "return %g")
    assert "all_reduce" not in text
    assert combined_for_cpus(text) == text


def sums(groups):
    """A program of sums: x; x + 1 of the first; x and what depends on no sum, by their groups."""
    names = [f'{{mtf_gradsync.together = "{g}"}}' if g else "" for g in groups]
    given = ["%x", "%after", "%x", "%other"]
    lines = [
        f"""  %s{i} = "stablehlo.all_reduce"({x}) <{{replica_groups = dense<[[0, 1]]> :
    tensor<1x2xi64>}}> {SUM.replace("TYPE", "f32")} {name} : (tensor<3xf32>) -> tensor<3xf32>"""
        for i, (x, name) in enumerate(zip(given, names))
    ]
    lines.insert(1, "  %after = stablehlo.add %s0, %x : tensor<3xf32>")
    lines.insert(3, "  %other = stablehlo.add %x, %x : tensor<3xf32>")
    four = ", ".join(["tensor<3xf32>"] * 4)
    return f"""
func.func public @main(%x: tensor<3xf32>) -> ({four}) {{
{chr(10).join(lines)}
  return %s0, %s1, %s2, %s3 : {four}
}}"""


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        (["a", None, "a", "a"], 2),
        # The result of the first is used before the last member of its group.
        (["a", "b", "a", "b"], 2),
        # A group whose second sum takes the first one's result, as in a function called twice.
        (["a", "a", "a", "a"], 2),
        (["a", "b", "c", "d"], 4),
        ([None] * 4, 4),
    ],
)
def test_sums_of_a_group_are_packed_where_none_depends_on_another(groups, left):
    import jax

    text = sums(groups)
    changed = combined_for_cpus(text)
    assert changed.count("stablehlo.all_reduce") == left
    devices = jax.devices("cpu")[:CORES]
    program = LoadedProgram(compiled(changed, devices), devices)
    x = np.array([[1, 2, 3], [10, 20, 30]], np.float32)
    first, *others = [r.arrays[1] for r in program.run([put(list(x), devices)])]
    total = x.sum(0)
    np.testing.assert_array_equal(first, total)
    np.testing.assert_array_equal(others, [3 * total, total, 2 * total])
