"""What is used of TensorFlow without a public name still means what it did."""

from __future__ import annotations

import numpy as np
import pytest
from tensorflow.python.ops import variable_scope

from mtf_gradsync import simd
from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import (
    advance_step_after,
    checkpoint_initializers,
    collective_sum,
    control_flow_context,
    control_flow_v1,
    create_slots,
    cross_replica_gather,
    cross_replica_scatter,
    forget_closed_scopes,
    hyperparameters,
    in_loop_or_branch,
    is_in_loop,
    local_devices,
    moving_average_settings,
    number_of_tpu_shards,
    replace_capture,
    root_scope,
    set_attr,
    trace_function,
    write_to_new_memory,
)
from mtf_gradsync.runtimes._private.tensorflow import (
    advance_step_after_reads,
    initializer_of,
    session_interface,
    set_initializer,
    variables_of_saver,
)
from mtf_gradsync.tools._private.tensorflow import add_saving_listeners, summary_writers


def run(fetches, feeds=None, num_devices=1):
    config = tf.ConfigProto(device_count={"CPU": num_devices})
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Session(config=config) as session:
        return session.run(fetches, feeds)


def types(operations):
    return [op.type for op in operations]


def test_attributes_are_set_in_the_graph(fresh_graph):
    operation = tf.identity(tf.constant(1.0)).op
    set_attr(operation, "_ours", tf.AttrValue(i=7))
    assert operation.get_attr("_ours") == 7
    (node,) = [n for n in fresh_graph.as_graph_def().node if n.name == operation.name]
    assert node.attr["_ours"].i == 7
    set_attr(operation, "_ours", tf.AttrValue(i=8))
    assert operation.get_attr("_ours") == 8


def test_names_in_the_root_scope_are_full_names(fresh_graph):
    with tf.variable_scope("model"):
        with root_scope():
            made = tf.get_variable("step", [])
        with tf.variable_scope(tf.get_variable_scope(), reuse=True), root_scope():
            again = tf.get_variable("step", [])
    assert made.op.name == "step"
    assert again is made


def test_scopes_are_numbered_as_before_once_closed_ones_are_forgotten(fresh_graph):
    def names(forget):
        found = []
        with tf.Graph().as_default():
            for _ in range(2):
                with tf.variable_scope("model"), tf.variable_scope(None, default_name="layer") as x:
                    found.append(x.name)
                with tf.variable_scope(None, default_name="layer") as x:
                    found.append(x.name)
                    if forget:
                        forget_closed_scopes()
                    with tf.variable_scope(None, default_name="inner") as x:
                        found.append(x.name)
            counts = variable_scope.get_variable_scope_store().variable_scopes_count
            return found, list(counts)

    expected, kept = names(forget=False)
    found, left = names(forget=True)
    assert found == expected == ["model/layer", "layer", "layer/inner", *expected[3:]]
    assert expected[3:] == ["model/layer", "layer_1", "layer_1/inner"]
    assert "model/layer" in kept
    assert "layer/inner" not in left


def test_branches_and_loops_have_contexts_of_their_own(fresh_graph):
    seen, in_loop = {}, {}

    def look(name, result):
        seen[name], in_loop[name] = control_flow_context(fresh_graph), is_in_loop(fresh_graph)
        made = result()
        assert is_in_loop(made.op) == in_loop[name] or name == "branch"
        return made

    def a_loop():
        return tf.while_loop(
            lambda n: n < 3, lambda n: look("loop in branch", lambda: n + 1), [tf.constant(0)]
        )

    tf.cond(
        tf.placeholder(tf.bool, []),
        lambda: look("branch", a_loop),
        lambda: look("other branch", lambda: tf.constant(0)),
    )
    assert control_flow_context(fresh_graph) is None
    assert all(seen.values())
    assert len({id(context) for context in seen.values()}) == 3
    assert seen["loop in branch"].outer_context is seen["branch"]
    assert [name for name, inside in in_loop.items() if inside] == ["loop in branch"]


def test_a_program_is_no_loop_branch_or_function(fresh_graph):
    found = {}

    def look(name):
        found[name] = in_loop_or_branch(tf.get_default_graph())
        return tf.constant(0)

    with simd.tpu_program("all:2", "batch:all"):
        look("program")
        tf.cond(tf.constant(True), lambda: look("branch"), lambda: look("branch"))
        tf.while_loop(lambda n: n < 3, lambda n: n + look("loop"), [tf.constant(0)])
    tf.function(lambda: look("function"), autograph=False)()
    assert found == {"program": False, "branch": True, "loop": True, "function": True}
    assert not in_loop_or_branch(fresh_graph)


def test_a_function_takes_what_stands_in_for_a_capture():
    replaced, captured = tf.constant([1.0]), tf.constant([2.0])
    offered = []

    def stand_in(tensor):
        offered.append(tensor)
        return tf.constant([10.0]) if tensor is replaced else None

    def body(argument):
        replace_capture(tf.get_default_graph(), stand_in)
        return argument + replaced + captured + tf.constant([4.0])

    result = tf.function(body, autograph=False)(tf.constant([100.0]))
    assert all(any(x is y for y in (replaced, captured)) for x in offered)
    assert [x for x in result.op.inputs if x is replaced] == []
    assert len([x for x in result.op.inputs if x is captured]) == 1
    np.testing.assert_array_equal(run(result), [116.0])


def test_control_flow_v1_inside_a_function_leaves_the_switch_as_it_was():
    def body(x):
        with control_flow_v1():
            return x + 1

    tf.function(body, autograph=False)(tf.constant(1.0))
    assert not tf.control_flow_v2_enabled()


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


def sum_whose_inputs_are_held(make_sum):
    """A sum of 1, 1e8 and -1e8, where only the memory of the last is free."""
    fed = tf.placeholder(tf.float32, [3])
    slices = [fed[i : i + 1] * 1.0 for i in range(3)]
    total = make_sum(slices)
    with tf.control_dependencies([total]):
        holders = [tf.identity(x) for x in slices[:2]]
    return run([tf.identity(total), holders], {fed: [1.0, 1e8, -1e8]})[0][0]


def test_a_sum_in_memory_of_its_own_keeps_its_order():
    def marked(slices):
        total = tf.add_n(slices)
        write_to_new_memory(total.op)
        return total

    assert sum_whose_inputs_are_held(marked) == 0.0
    assert sum_whose_inputs_are_held(tf.add_n) == 1.0


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.int32, tf.int64])
def test_collectives_sum(dtype):
    sums = []
    for member in range(2):
        with tf.device(f"/device:CPU:{member}"):
            sums.append(collective_sum(tf.constant([1, 10 * (member + 1)], dtype), 2, 1, 11, 60.0))
    for result in run(sums, num_devices=2):
        np.testing.assert_array_equal(result, [2, 30])


def test_collectives_give_up_after_the_timeout():
    with tf.device("/device:CPU:0"):
        alone = collective_sum(tf.constant([1.0]), 2, 2, 12, 1.0)
    with pytest.raises(tf.errors.DeadlineExceededError):
        run(alone, num_devices=2)


def test_parts_of_sums_and_rows_of_all_cores():
    """A core gets the part at its place in its group, and rows come in the group's order."""
    values, groups = np.arange(24, dtype="f").reshape(4, 2, 3), [[2, 0], [1, 3]]
    sent = [tf.constant(value) for value in values]
    with simd.tpu_program("all:4", "") as program:
        part = cross_replica_scatter(program.per_replica(sent), groups, 0)
        rows = cross_replica_gather(part, groups, 0)
        columns = cross_replica_gather(part, groups, 1)
    assert part.op.type == "XlaReduceScatter"
    assert (part.shape.as_list(), rows.shape.as_list()) == ([1, 3], [2, 3])
    with program.session() as session:
        parts, wholes, beside = session.run([part, rows, columns], per_replica=True)
    for group in groups:
        total = values[group].sum(0)
        for place, core in enumerate(group):
            np.testing.assert_array_equal(parts[core], total[place : place + 1])
            np.testing.assert_array_equal(wholes[core], total)
            np.testing.assert_array_equal(beside[core], total.reshape(1, -1))


def test_devices_say_their_links():
    (device,) = [d for d in local_devices() if d.name.endswith("CPU:0")]
    assert device.device_type == "CPU"
    assert list(device.locality.links.link) == []
    assert isinstance(device.physical_device_desc, str)


def test_moving_averages_say_how_they_were_made():
    average = tf.train.ExponentialMovingAverage
    assert moving_average_settings(average(0.9)) == (0.9, None, False)
    assert moving_average_settings(average(0.9, 7)) == (0.9, 7, False)
    assert moving_average_settings(average(0.5, zero_debias=True)) == (0.5, None, True)


def test_initializers_are_given_back_whoever_initializes_from_a_checkpoint(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        v = tf.get_variable("v", [2], initializer=tf.zeros_initializer())
        session.run(v.assign([1.0, 2.0]))
        path = tf.train.Saver([v]).save(session, str(tmp_path / "model.ckpt"))
        own = initializer_of(v)
        for initialize in (
            *(module.init_from_checkpoint for module in checkpoint_initializers()),
            lambda path, names: tf.train.warm_start(path, [v]),
        ):
            initialize(path, {"v": "v"})
            assert initializer_of(v)[0] is not own[0]
            session.run(v.initializer)
            assert session.run([v, v.initial_value])[1].tolist() == [1.0, 2.0]
            set_initializer(v, own)
            session.run(v.initializer)
            assert session.run([v, v.initial_value])[1].tolist() == [0.0, 0.0]


def test_hyperparameters_are_what_optimizers_were_made_with():
    train = tf.train
    made = {
        train.GradientDescentOptimizer(0.1): {"learning_rate": 0.1},
        train.MomentumOptimizer(lambda: 0.1, 0.2, use_nesterov=True): {
            "learning_rate": 0.1,
            "momentum": 0.2,
            "use_nesterov": True,
        },
        train.AdagradOptimizer(0.1, 0.3): {"learning_rate": 0.1, "initial_accumulator_value": 0.3},
        train.AdamOptimizer(0.1, 0.2, lambda: 0.3, 0.4): {
            "learning_rate": 0.1,
            "beta1": 0.2,
            "beta2": 0.3,
            "epsilon": 0.4,
        },
        train.RMSPropOptimizer(0.1, 0.2, 0.3, 0.4, centered=True): {
            "learning_rate": 0.1,
            "decay": 0.2,
            "momentum": 0.3,
            "epsilon": 0.4,
            "centered": True,
        },
        train.AdadeltaOptimizer(0.1, 0.2, 0.3): {"learning_rate": 0.1, "rho": 0.2, "epsilon": 0.3},
        train.FtrlOptimizer(
            0.1, -0.2, 0.3, 0.4, 0.5, False, "F", "a", "b", 0.6, beta=0.7
        ): {
            "learning_rate": 0.1,
            "learning_rate_power": -0.2,
            "initial_accumulator_value": 0.3,
            "l1_regularization_strength": 0.4,
            "l2_regularization_strength": 0.5,
            "l2_shrinkage_regularization_strength": 0.6,
            "beta": 0.7,
            "accum_name": "a",
            "linear_name": "b",
        },
    }  # fmt: skip
    for optimizer, values in made.items():
        assert hyperparameters(optimizer) == values
    assert hyperparameters(train.FtrlOptimizer(0.1))["beta"] == 0.0


def test_slots_are_made_without_gradients_and_only_once():
    w = tf.get_variable("w", [3], use_resource=True)
    adam = tf.train.AdamOptimizer(0.1)
    wrapper = tf.tpu.CrossShardOptimizer(adam)
    create_slots(wrapper, [w])
    names = ["w", "beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]
    assert sorted(v.op.name for v in tf.global_variables()) == sorted(names)
    with tf.name_scope("later"):
        adam.apply_gradients([(tf.ones([3]), w)])
    assert len(tf.global_variables()) == 5


def test_the_number_of_tpu_shards_is_known_inside_a_program_only():
    assert number_of_tpu_shards() is None
    with simd.tpu_program("all:4", ""):
        assert number_of_tpu_shards() == 4
    assert number_of_tpu_shards() is None


def test_savers_take_sessions_of_the_interface(tmp_path):
    class Session(session_interface()):
        graph, sess_str = tf.get_default_graph(), ""

        def run(self, fetches, feed_dict=None, options=None, run_metadata=None):
            ((name, path),) = feed_dict.items()
            return f"{path} by {name}"

    tf.get_variable("v", [])
    saver = tf.train.Saver()
    path = saver.save(Session(), str(tmp_path / "saved"), write_meta_graph=False, write_state=False)
    assert path == f"{tmp_path / 'saved'} by {saver.saver_def.filename_tensor_name}"


def test_writers_of_summaries_are_known_to_their_graph(fresh_graph, tmp_path):
    assert summary_writers(fresh_graph) == []
    with tf.compat.v2.summary.create_file_writer(str(tmp_path)).as_default():
        (opened,) = summary_writers(fresh_graph)
    flush = tf.raw_ops.FlushSummaryWriter(writer=opened.inputs[0])
    with tf.Session() as session:
        session.run(opened)
        session.run(flush)
    assert list(tmp_path.glob("events*"))


def test_listeners_are_added_to_a_hook(tmp_path):
    class Listener(tf.train.CheckpointSaverListener):
        saved = ()

        def before_save(self, session, global_step_value):
            self.saved += (global_step_value,)

    step = tf.train.get_or_create_global_step()
    listener = Listener()
    hook = tf.train.CheckpointSaverHook(str(tmp_path), save_steps=1)
    add_saving_listeners(hook, [listener])
    advance = step.assign_add(1)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        session.run(advance)
    assert listener.saved == (0, 1)


def test_the_step_is_advanced_after_it_was_read(fresh_graph):
    """Reads by hooks and by the model have the step before; one that waits has the step after."""
    step = tf.train.get_or_create_global_step()
    plain, in_model = step.read_value(), tf.identity(step)
    advance = tf.assign_add(step, 1)
    with tf.control_dependencies([advance]):
        after = step.read_value()
    in_branch = tf.cond(tf.constant(True), step.read_value, lambda: tf.constant(-1, tf.int64))
    for _ in range(2):
        advance_step_after_reads(fresh_graph)
    hook = tf.train.StepCounterHook(1)
    hook.begin()
    of_hook = hook.before_run(None).fetches
    (increment,) = [op for op in step.handle.consumers() if op.type == "AssignAddVariableOp"]
    assert of_hook.op in increment.control_inputs
    assert len(increment.control_inputs) == len(set(increment.control_inputs))
    assert after.op not in increment.control_inputs
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for number in range(100):
            found = session.run([plain, in_model, of_hook, after, in_branch, advance])
            assert found[:4] == [number, number, number, number + 1]


def test_increments_that_come_later_wait_and_those_in_loops_do_not(fresh_graph):
    """For what random numbers draw from, and for hooks: one mechanism, in any order."""
    step = tf.train.get_or_create_global_step()
    drawn, another = step.read_value(), step.read_value()
    in_loop = tf.while_loop(
        lambda n: n < 3,
        lambda n: tf.identity(n + 1 + 0 * tf.cast(step.assign_add(1), tf.int32)),
        [tf.constant(0)],
    )
    for read in (drawn, another, drawn):
        advance_step_after(step, [read.op])
    advance_step_after_reads(fresh_graph)
    later = step.assign_add(1)
    waited_for = walk([later.op], lambda op: [*(x.op for x in op.inputs), *op.control_inputs])
    assert {drawn.op, another.op} < set(waited_for)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for number in range(50):
            assert session.run([drawn, another, later])[:2] == [number, number]
        assert session.run([in_loop, drawn])[0] == 3
        assert session.run(step) == 53


def test_the_variables_of_a_saver():
    with tf.Graph().as_default():
        a, b = (tf.get_variable(name, []) for name in "ab")
        assert variables_of_saver(tf.train.Saver([a])) == {"a"}
        assert variables_of_saver(tf.train.Saver({"other": b})) == {"b"}
        assert variables_of_saver(tf.train.Saver()) == {"a", "b"}
        assert variables_of_saver(tf.train.Saver(defer_build=True)) is None
