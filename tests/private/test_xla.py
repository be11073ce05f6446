"""What TensorFlow's bridge to XLA makes, and how it is read, still means what it did."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf2
from google.protobuf.message import DecodeError

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._private.tensorflow import (
    BridgeError,
    eager_mode,
    function_hlo,
    hlo_module,
    xla_custom_call,
    xla_element_types,
)
from tests.runtimes.cluster.processes import Processes

MAKE_HLO = """
import json
import tensorflow as tf
import mtf_gradsync
from mtf_gradsync.runtimes._private.tensorflow import function_hlo, hlo_module, xla_element_types

variable = tf.Variable([10.0, 20.0])

def body(x, y):
    variable.assign_add(x)
    return x - y, tf.reduce_sum(variable)

spec = tf.TensorSpec([2], tf.float32)
wrapped = tf.compat.v1.wrap_function(body, [spec, spec])
module = hlo_module(function_hlo(wrapped, [spec, spec]))
program = module.host_program_shape
names = {number: name for name, number in xla_element_types().items()}
entry = next(c for c in module.computations if c.id == module.entry_computation_id)
print(json.dumps({
    "parameters": [[names[s.element_type], list(s.dimensions)] for s in program.parameters],
    "results": [
        [names[s.element_type], list(s.dimensions)] for s in program.result.tuple_shapes
    ],
    "aliases": [
        [list(e.output_shape_index), e.parameter_number]
        for e in module.input_output_alias.entries
    ],
    "opcodes": sorted({i.opcode for c in module.computations for i in c.instructions}),
}))
"""


def test_the_program_of_a_function():
    with Processes() as processes:
        made = json.loads(processes.wait(processes.fork("-c", MAKE_HLO)).splitlines()[-1])
    # Arguments, then what is captured; results, then new values of variables.
    assert made["parameters"] == [["F32", [2]]] * 3
    assert made["results"] == [["F32", [2]], ["F32", []], ["F32", [2]]]
    assert made["aliases"] == [[[2], 2]]
    assert {"add", "subtract", "reduce"} <= set(made["opcodes"])


def test_a_custom_call_goes_through_the_bridge_and_what_has_no_kernel_is_named():
    """In a process that has switched TensorFlow 2's behaviour off."""

    def body(x):
        return xla_custom_call(x, "some_target", "some settings", [3], "some_name")

    with eager_mode():
        assert tf2.executing_eagerly()
        specs = [tf2.TensorSpec([2], tf2.float32)]
        module = hlo_module(function_hlo(tf.wrap_function(body, specs), specs))
        (call,) = [
            i for c in module.computations for i in c.instructions if i.opcode == "custom-call"
        ]
        assert call.custom_call_target == "some_target"
        assert call.backend_config == b"some settings"
        assert call.metadata.op_name.startswith("some_name")
        assert list(call.shape.dimensions) == [3]
        text = tf.wrap_function(lambda x: tf.strings.as_string(x), specs)
        with pytest.raises(BridgeError, match="AsString"):
            function_hlo(text, specs)
    assert not tf2.executing_eagerly()


def test_a_module_is_written_and_read():
    module = hlo_module(b"")
    computation = module.computations.add(name="main", id=7)
    module.entry_computation_id = 7
    instruction = computation.instructions.add(name="sum", opcode="all-reduce", id=8)
    instruction.shape.element_type = xla_element_types()["F32"]
    instruction.shape.dimensions.extend([2, 3])
    instruction.replica_groups.add(replica_ids=[0, 1])
    read = hlo_module(module.SerializeToString())
    assert read == module
    assert type(read).__name__ == "HloModuleProto"
    with pytest.raises(DecodeError):
        hlo_module(module.SerializeToString()[:-1])


def test_element_types_have_xla_s_numbers():
    # They are written into programs, so that they never change.
    numbers = xla_element_types()
    assert {
        name: numbers[name] for name in ("PRED", "S32", "S64", "F16", "F32", "F64", "BF16")
    } == {
        "PRED": 1,
        "S32": 4,
        "S64": 5,
        "F16": 10,
        "F32": 11,
        "F64": 12,
        "BF16": 16,
    }
