"""Each change of Mesh-TensorFlow's functions is made once, whoever has changed them before."""

import functools
import inspect
import textwrap

import pytest

from mtf_gradsync._private import patches
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.slots import check_bare_optimizers
from mtf_gradsync.step.plan import StandIn
from mtf_gradsync.step.writes import complete_graph, finish_lowering
from tests.runtimes.cluster.processes import Processes


def around_lowering():
    patches.call_around_lowering(complete_graph, finish_lowering)


# What `import mtf_gradsync` calls, by the functions that it changes.
CHANGES = {
    (mtf.Lowering, "__init__"): around_lowering,
    (mtf.Graph, "rewrite_stack_variables"): around_lowering,
    (mtf.Graph, "combine_assignments"): lambda: patches.exclude_from_combining(StandIn),
    (mtf.optimize.Optimizer, "apply_grads"): check_bare_optimizers,
    **{(owner, name): patches.patch_libraries for owner, name, _ in patches._REPLACED},
}


def with_word(word):
    def say(function):
        return [word, *function()]

    say.__qualname__ = f"with_{word}"
    return say


def foreign(function):
    return functools.wraps(function)(lambda *args: ["foreign", *function(*args)])


def test_a_patch_is_made_once_around_or_inside_of_foreign_decorators():
    class Owner:
        say = staticmethod(lambda: ["original"])

    ours, others = with_word("ours"), with_word("others")
    Owner.say = staticmethod(foreign(Owner.say))
    for _ in range(2):
        patches.patch(Owner, "say", ours)
    assert Owner.say() == ["ours", "foreign", "original"]
    patches.patch(Owner, "say", others)
    Owner.say = staticmethod(foreign(Owner.say))
    for say in (ours, others):
        patches.patch(Owner, "say", say)
    assert Owner.say() == ["foreign", "others", "ours", "foreign", "original"]


@pytest.mark.parametrize(("owner", "name"), CHANGES, ids=lambda x: getattr(x, "__name__", x))
def test_no_change_is_skipped_because_another_library_was_there_first(owner, name, monkeypatch):
    theirs = foreign(inspect.unwrap(getattr(owner, name)))
    monkeypatch.setattr(owner, name, theirs)
    CHANGES[owner, name]()
    ours = getattr(owner, name)
    assert ours is not theirs
    CHANGES[owner, name]()
    assert getattr(owner, name) is ours


def test_savers_keep_summaries_of_a_mesh(tmp_path, caplog):
    with tf.Graph().as_default():
        tf.get_variable("v", [])
        with tf.name_scope("scope"):
            key = mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY
            tf.add_to_collection(key, ("loss", tf.constant(1.0, name="loss")))
        path = str(tmp_path / "model.meta")
        tf.train.Saver().export_meta_graph(path)
        tf.train.export_meta_graph(str(tmp_path / "none.meta"), export_scope="other")
    assert "Issue encountered" not in caplog.text
    for scope in ("", "again"):
        with tf.Graph().as_default() as graph:
            tf.train.import_meta_graph(path, import_scope=scope or None)
            ((name, tensor),) = tf.get_collection(key)
            assert (name, tensor.name) == ("loss", f"{scope}/scope/loss:0".lstrip("/"))
            assert tensor.graph is graph


def test_programs_may_have_arguments_that_absl_does_not_know():
    with Processes() as processes:
        program = textwrap.dedent(ARGPARSE)
        printed = processes.wait(processes.fork("-c", program, "--steps=3", "--fold_xy"))
    assert printed.split() == ["3", "True", "2", "False", "1"]


# The third number is the default; the last one is set as absl's programs do.
ARGPARSE = """
    import argparse
    import mtf_gradsync
    import mesh_tensorflow as mtf
    from absl import flags

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--fold_xy", action="store_true")
    read = mtf.simd_mesh_impl.FLAGS
    mtf.simd_mesh_impl.auto_logical_to_physical_tpu([4], [2, 2, 1])
    print(parser.parse_args().steps, read.fold_xy, read.logical_cores_per_chip)
    print(flags.FLAGS.is_parsed())
    flags.FLAGS.mark_as_parsed()
    read.logical_cores_per_chip = 1
    print(flags.FLAGS.logical_cores_per_chip)
"""
