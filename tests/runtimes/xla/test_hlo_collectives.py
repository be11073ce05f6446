"""Reading collectives out of HLO; of bytes in newer forms by any TensorFlow, without jax."""

import pytest

from benchmarks.hlo import hlo_from_text
from mtf_gradsync import xla
from mtf_gradsync.runtimes._private.tensorflow import hlo_module
from tests.runtimes.xla.topology.hlo_modules import (
    COLLECTIVE_DEVICE_LIST,
    FOUND,
    IOTA_DEVICE_LIST,
    TEXT,
    TYPES,
    Module,
    device_list,
    instruction,
    iota_in_device_list,
    iota_list,
    mesh_axes,
)

VECTOR = ("F32", 4)


def scheduled(names):
    """The module of `TEXT`, with an order of the main computation's instructions."""
    module = hlo_module(hlo_from_text(TEXT))
    (main,) = (c for c in module.computations if c.name == "main")
    ids = {i.name: i.id for i in main.instructions}
    module.schedule.sequences[main.id].instruction_ids.extend(ids[n] for n in names.split())
    return module.SerializeToString()


@pytest.mark.xla
def test_lists_each_collective_with_what_is_around_it():
    expected = [xla.HloCollective(*facts) for facts in FOUND]
    found = xla.find_hlo_collectives(scheduled("arg i start done f tuple w g gd moved again"))
    assert found == expected
    assert [c.is_conditional for c in found] == [False, False, True, False, False, True]
    assert [c.is_in_loop for c in found] == [False, False, True, False, False, False]
    # XLA writes a module without a schedule in an order of its own.
    found = xla.find_hlo_collectives(hlo_from_text(TEXT))
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.xla
def test_the_order_is_that_of_the_schedule_where_there_is_one():
    found = xla.find_hlo_collectives(scheduled("arg i moved start done f tuple w g gd again"))
    assert [c.name for c in found] == ["moved", "start", "both", "r", "all", "r"]


def split_update(into="zeros", cut="dynamic-slice", call="fusion"):
    """A weight update that the TPU compiler has split over four cores, as it writes it."""
    module, i = Module(), instruction
    whole, part, place = ("F32", 8, 4), ("F32", 2, 4), ("S32",)
    scatter = module.computation(
        "all-reduce-scatter",
        i("g", "parameter", whole),
        i("h", "parameter", whole),
        i("sum", "all-reduce", [whole, whole], ["g", "h"]),
        i("n", "replica-id", place),
        i("g0", "get-tuple-element", whole, ["sum"]),
        i("h0", "get-tuple-element", whole, ["sum"]),
        i("half", "dynamic-slice", part, ["g0", "n"]),
        i("rest", "dynamic-slice", part, ["g0", "n"]),
        i("all", cut, part, ["h0", "n"]),
        i("out", "tuple", [part, part, part], ["half", "rest", "all"]),
    )
    # In two pieces, as the compiler sends them on two paths.
    gather = module.computation(
        "all-gather",
        i("p", "parameter", part),
        i("zero", "constant", ("F32",)),
        i("zeros", "broadcast", whole, ["zero"]),
        i("others", "parameter", whole),
        i("n", "replica-id", place),
        i("half", "slice", ("F32", 1, 4), ["p"]),
        i("first", "dynamic-update-slice", whole, [into, "half", "n"]),
        i("both", "dynamic-update-slice", whole, ["first", "half", "n"]),
        i("joined", "all-reduce", whole, ["both"]),
    )
    module.computation(
        "main",
        i("g", "parameter", whole),
        i("shard", call, [part, part, part], ["g", "g"], [scatter]),
        i("new", "get-tuple-element", part, ["shard"]),
        i("value", call, whole, ["new"], [gather]),
        entry=True,
    )
    found = xla.find_hlo_collectives(module.serialized())
    return [(c.operation, c.bytes_per_core) for c in found]


def test_a_split_weight_update_sends_a_reduce_scatter_and_an_all_gather():
    whole = 8 * 4 * 4
    assert split_update() == [("reduce-scatter", 2 * whole), ("all-gather", whole // 4)]
    # Where not all of the result is cut, or not all but a part is zero, all of it is sent.
    assert split_update(cut="negate")[0] == ("all-reduce", 2 * whole)
    assert split_update(into="others")[1] == ("all-reduce", whole)
    # Of operations that no fusion joins each is done by itself.
    assert split_update(call="call") == [("all-reduce", 2 * whole), ("all-reduce", whole)]


def test_a_collective_fused_with_other_operations_counts_once():
    """Its copies: where it starts, with an operation meanwhile, and where it is done."""
    module, i = Module(), instruction
    whole, part = ("F32", 8, 4), ("F32", 2, 4)
    copies = {}
    for chain in ("0", "1"):
        for name in ("start", "meanwhile", "done"):
            copies[name, chain] = module.computation(
                f"{name}_{chain}",
                i("p", "parameter", part),
                i("g", "all-gather", whole, ["p"]),
            )
            gather = module.proto.computations[-1].instructions[-1]
            gather.frontend_attributes.map["chain_id"] = chain
    module.computation(
        "main",
        i("p", "parameter", part),
        *(
            i(f"{name}_{chain}", "fusion", whole, ["p"], [computation])
            for (name, chain), computation in copies.items()
        ),
        i("alone", "all-gather", whole, ["p"]),
        entry=True,
    )
    found = xla.find_hlo_collectives(module.serialized())
    assert [(c.computation, c.bytes_per_core) for c in found] == [
        ("start_0", 32), ("start_1", 32), ("main", 32)
    ]  # fmt: skip


def groups(name="all-reduce", **arguments):
    module = Module()
    arg = instruction("arg", "parameter", VECTOR)
    module.computation(
        "main", arg, instruction("r", name, VECTOR, ["arg"], **arguments), entry=True
    )
    (found,) = xla.find_hlo_collectives(module.serialized())
    return found.groups


def test_reads_groups_that_are_listed():
    assert groups(groups=[[0, 1], [2, 3]]) == ((0, 1), (2, 3))
    assert groups("collective-permute", groups=[[0, 1], [1, 0]]) == ((0, 1), (1, 0))
    assert groups() == ()


NEWER = {
    "listed": (COLLECTIVE_DEVICE_LIST, device_list([[0, 2], [1, 3]]), ((0, 2), (1, 3))),
    "counted": (IOTA_DEVICE_LIST, iota_list(1, 4, [4], [0]), ((0, 1, 2, 3),)),
    "counted across": (IOTA_DEVICE_LIST, iota_list(2, 2, [2, 2], [1, 0]), ((0, 2), (1, 3))),
    "counted in three": (
        IOTA_DEVICE_LIST,
        iota_list(2, 4, [2, 2, 2], [1, 0, 2]),
        ((0, 1, 4, 5), (2, 3, 6, 7)),
    ),
    "counted in a list": (
        COLLECTIVE_DEVICE_LIST,
        iota_in_device_list(2, 2, [2, 2], [1, 0]),
        ((0, 2), (1, 3)),
    ),
}


@pytest.mark.parametrize("spelling", list(NEWER))
def test_reads_groups_in_newer_spellings_with_any_tensorflow(spelling):
    _, raw, expected = NEWER[spelling]
    assert groups(raw=raw) == expected


def test_groups_by_the_axes_of_a_mesh_are_refused():
    with pytest.raises(ValueError, match="'r': Groups that are named by mesh axes"):
        groups(raw=mesh_axes())


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        (("F32",), 4),
        (("S64", 3, 5), 120),
        (("BF16", 3), 6),
        (("F8E5M2", 5), 5),
        # TensorFlow 2.12 knows no smaller ones.
        *([(("S4", 6), 3)] if "S4" in TYPES else []),
        (("C64", 2), 16),
        (("F32", 0), 0),
        ([("F32", 2), [("PRED", 3), ("TOKEN",)]], 11),
    ],
)
def test_bytes_are_those_of_the_operands(shape, size):
    module = Module()
    arg = instruction("arg", "parameter", shape)
    # An all-gather's result is larger.
    gather = instruction("g", "all-gather", ("F32", 1000), ["arg", "arg"])
    module.computation("main", arg, gather, entry=True)
    (found,) = xla.find_hlo_collectives(module.serialized())
    assert found.bytes_per_core == 2 * size


def test_a_type_of_unknown_size_is_refused():
    module = Module()
    arg = instruction("arg", "parameter", (120, 4))
    module.computation("main", arg, instruction("r", "all-reduce", VECTOR, ["arg"]), entry=True)
    with pytest.raises(ValueError, match="element type 120 is of unknown size"):
        xla.find_hlo_collectives(module.serialized())


@pytest.mark.parametrize("module", [b"module @main {}", b"", Module().serialized()])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(ValueError, match="HloModuleProto"):
        xla.find_hlo_collectives(module)
