"""A saver that restores checkpoints of other runs, and errors of plain savers about these."""

from __future__ import annotations

import os
import tempfile
import uuid
from typing import Any

from mtf_gradsync._common import some_of
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import patch
from mtf_gradsync._private.tensorflow import advance_step_after_reads, variables_of_saver
from mtf_gradsync.optimizers.state.checkpoints import Saved, adapt_checkpoint
from mtf_gradsync.optimizers.state.variables import STATE_COLLECTION, SUMS_NOT_KEPT
from mtf_gradsync.step import StepPlan

_RESTORE_ADAPTED = (
    "Restore it by gs.ReshardingSaver(...), or restore what gs.adapt_checkpoint(path, directory) "
    "returns."
)


class ReshardingSaver(tf.train.Saver):
    """A `tf.train.Saver` that also restores checkpoints of other runs.

    Such runs may have another number of shards, or no wrapper; see `adapt_checkpoint`. To restore
    such a checkpoint the saver writes an adapted copy and deletes it afterwards. The copy is in a
    directory for temporary files, or next to the checkpoint if another machine restores it.
    `restore` raises ValueError if sums of gradients in a checkpoint would be lost.
    """

    _checks_sums = True

    def restore(self, sess: Any, save_path: str) -> None:
        # The parent raises the error for a path that is not a checkpoint.
        if not _is_checkpoint(save_path) or not Saved(save_path, sess.graph).changes:
            super().restore(sess, save_path)
            return
        is_elsewhere = "://" in str(save_path) or bool(getattr(sess, "sess_str", ""))
        directory = (
            os.path.join(os.path.dirname(save_path), f".adapted-{uuid.uuid4().hex}")
            if is_elsewhere
            else tempfile.mkdtemp()
        )
        try:
            with sess.graph.as_default():
                adapted = adapt_checkpoint(save_path, directory, not self._checks_sums)
            super().restore(sess, adapted)
        finally:
            if tf.io.gfile.exists(directory):
                tf.io.gfile.rmtree(directory)


def _is_checkpoint(path: str) -> bool:
    # As `tf.train.checkpoint_exists`, which warns that it is deprecated.
    return bool(path) and any(tf.io.gfile.exists(name) for name in (f"{path}.index", path))


def check_what_savers_restore() -> None:
    """Makes TensorFlow's savers raise errors that name a remedy if wrappers' state does not fit.

    A saver then raises ValueError if sums of gradients in the checkpoint would be lost, or if state
    of other islands or shards would be restored as it is. It raises a NotFoundError of this
    package, in place of TensorFlow's, if the checkpoint lacks state of a wrapper.
    """

    def check_and_restore(restore: Any) -> Any:
        def restore_checked(self: tf.train.Saver, sess: Any, save_path: str) -> None:
            graph = getattr(sess, "graph", None)  # None where TensorFlow is eager
            if graph is None or not _is_checkpoint(save_path):
                restore(self, sess, save_path)
                return
            has_state = graph.get_collection(STATE_COLLECTION)
            if not has_state and not graph.get_collection(SUMS_NOT_KEPT):
                restore(self, sess, save_path)
                return
            saved = Saved(save_path, graph)
            if getattr(self, "_checks_sums", True):
                saved.check_sums_kept()
            found = saved.changes if has_state else {}
            own = variables_of_saver(self)
            alike = [n for n, c in found.items() if c.looks_alike and (own is None or n in own)]
            if alike:
                raise ValueError(
                    f"The checkpoint {save_path} has {some_of(alike)} of other islands or shards, "
                    "of another window of skip_spikes, or with weights where this graph has none "
                    "(or the other way round): taken as they are, they would be wrong here. "
                    f"{_RESTORE_ADAPTED}"
                )
            try:
                restore(self, sess, save_path)
            except tf.errors.NotFoundError as error:
                missing = [name for name, c in found.items() if c.saved_name != name]
                if not missing:
                    raise
                text = (
                    f"The checkpoint {save_path} does not have {some_of(missing)}: it is of a run "
                    "without this wrapper, or whose wrapper had other arguments "
                    f"(backward_passes_per_step=1, say). {_RESTORE_ADAPTED}"
                )
                raise tf.errors.NotFoundError(None, None, text) from error

        return restore_checked

    patch(tf.train.Saver, "restore", check_and_restore)


def restore_in_pipelines() -> None:
    """Makes Mesh-TF's training programs restore checkpoints of other runs by `ReshardingSaver`.

    Such a program makes a plain saver and adds it to the collection of savers, or leaves this to
    the session. Masters are copied to slices after the saver has restored them; this copy is where
    plain savers are replaced, if the graph has wrappers' state. Such programs also advance the
    global step while others read it: the increment is made to wait for the reads.
    """

    def adapt_and_copy(copy: Any) -> Any:
        def copy_masters_to_slices(self: mtf.Lowering) -> tf.Operation:
            graph, plan = tf.get_default_graph(), StepPlan.of_graph(self.graph)
            is_ours = graph.get_collection(STATE_COLLECTION) or (plan and plan.has_lowered(self))
            if type(self) is not mtf.Lowering or not is_ours:
                return copy(self)
            savers = tf.get_collection(tf.GraphKeys.SAVERS)
            for saver in savers:
                # Not savers of other classes, which may restore in their own way.
                if type(saver) is tf.train.Saver:
                    saver.__class__ = ReshardingSaver
            if graph.get_name_scope().endswith("mtf_restore_hook"):
                advance_step_after_reads(graph)
                if not savers:
                    # A session would make this saver a moment later.
                    saver = ReshardingSaver(sharded=True, allow_empty=True, defer_build=True)
                    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
            with tf.control_dependencies(_checks_of_shapes()):
                return copy(self)

        return copy_masters_to_slices

    patch(mtf.Lowering, "copy_masters_to_slices", adapt_and_copy)


def _checks_of_shapes() -> list[tf.Operation]:
    """Returns operations that fail if a plain saver has restored sums of another mesh.

    Such sums have another shape, and TensorFlow does not compare the shapes of resource variables.
    """
    graph = tf.get_default_graph()
    notes = graph.get_collection(STATE_COLLECTION)
    dims = {note.name: (note.num_shard_dims, note.num_island_dims, note.held) for note in notes}
    checks = []
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        handle = getattr(variable, "handle", None)  # Ref variables have none.
        is_resource = handle is not None and handle.dtype == tf.resource
        if is_resource and any(dims.get(variable.op.name, ())):
            with tf.device(variable.device):
                shape = tf.raw_ops.VariableShape(input=handle)
                fits = tf.reduce_all(tf.equal(shape, variable.shape.as_list()))
                message = (
                    f"{variable.op.name} was restored from a checkpoint of another mesh by a plain "
                    "tf.train.Saver: use gs.ReshardingSaver(...), which reshards it. Shapes in the "
                    "checkpoint and here:"
                )
                checks.append(tf.Assert(fits, [message, shape, variable.shape.as_list()]))
    return checks
