"""What is used of TensorFlow without a public name still means what it did."""

from __future__ import annotations

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import trace_function


def types(operations):
    return [op.type for op in operations]


def test_a_traced_function_adds_nothing_to_the_graph(fresh_graph):
    assert not tf.control_flow_v2_enabled()
    spec = tf.TensorSpec([2, None], tf.float32)
    traced = trace_function(lambda x, y: -(x + y), [spec, spec])
    assert fresh_graph.get_operations() == []
    assert types(traced.operations) == ["Placeholder", "Placeholder", "AddV2", "Neg"]
    assert [x.op for x in traced.inputs] == traced.operations[:2]
    assert traced.inputs[0].shape.as_list() == [2, None]
    assert traced.captures == []
    assert [x.op for x in traced.outputs] == traced.operations[-1:]


def test_a_traced_function_may_use_tensors_of_the_graph(fresh_graph):
    outside = tf.constant([1.0, 2.0])
    with tf.control_dependencies([tf.no_op()]), tf.device("/cpu:0"):
        before = fresh_graph.get_operations()
        traced = trace_function(lambda x: (x * outside, [outside]), [tf.TensorSpec([2])])
    assert fresh_graph.get_operations() == before
    ((captured, placeholder),) = traced.captures
    assert captured is outside
    product, passed_on = traced.outputs
    assert product.op.inputs[1] is placeholder
    assert passed_on is placeholder
    assert placeholder.shape.as_list() == [2]
    assert placeholder.op in traced.operations


def test_a_traced_function_in_a_branch_stands_outside_of_it(fresh_graph):
    outside = tf.constant(2.0)
    traces = []

    def branch():
        before = fresh_graph.get_operations()
        traces.append(trace_function(lambda x: x * outside, [outside]))
        assert fresh_graph.get_operations() == before
        return tf.constant(1.0)

    tf.cond(tf.constant(True), branch, lambda: tf.constant(0.0))
    assert [types(t.operations) for t in traces] == [["Placeholder", "Placeholder", "Mul"]]


def test_a_traced_function_may_return_an_argument_and_a_number():
    traced = trace_function(lambda x: [x, 3.0], [tf.TensorSpec([])])
    assert traced.outputs[0] is traced.inputs[0]
    assert traced.outputs[1].op.type == "Const"


def test_traced_conditionals_are_functions():
    traced = trace_function(
        lambda p: tf.cond(p, lambda: 1.0, lambda: 2.0), [tf.TensorSpec([], tf.bool)]
    )
    assert {"If", "StatelessIf"} & set(types(traced.operations))
