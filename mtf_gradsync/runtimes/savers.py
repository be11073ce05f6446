"""Savers that restore checkpoints of other runs, and errors of plain savers about such checkpoints.

Once `mtf_gradsync` is imported, three functions of this module are called in place of functions of
TensorFlow and Mesh-TensorFlow: `restore_checked`, `copy_masters_to_slices` and
`init_from_checkpoint`. The first argument of each is the original function.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from typing import Any, Callable

from mtf_gradsync.extension import (
    STATE_COLLECTION,
    SUMS_NOT_KEPT,
    StepPlan,
    begin_anew,
    mtf,
    some_of,
    tf,
)
from mtf_gradsync.runtimes._private.tensorflow import (
    advance_step_after_reads,
    initializer_of,
    set_initializer,
    variables_of_saver,
)
from mtf_gradsync.runtimes.checkpoints import SavedCheckpoint, adapt_checkpoint

_logger = logging.getLogger(__name__)
_RESTORE_ADAPTED = (
    "Restore it by gs.ReshardingSaver(...), or restore what gs.adapt_checkpoint(path, directory) "
    "returns."
)


class ReshardingSaver(tf.train.Saver):
    """A `tf.train.Saver` that also restores checkpoints of other runs.

    The other run may have another number of shards, or no wrapper; see `adapt_checkpoint`. To
    restore such a run's checkpoint, the saver writes an adapted copy of the checkpoint and deletes
    the copy afterwards. The copy is in a directory for temporary files, or next to the checkpoint
    if another machine restores it. `restore` raises ValueError if sums of gradients in a checkpoint
    would be lost.
    """

    _checks_sums = True

    def restore(self, sess: Any, save_path: str) -> None:
        # The parent raises the error for a path that is not a checkpoint.
        if not _is_checkpoint(save_path) or not SavedCheckpoint(save_path, sess.graph).changes:
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


def restore_checked(
    restore: Callable[..., None], self: tf.train.Saver, sess: Any, save_path: str
) -> None:
    """Restores as `tf.train.Saver` does; errors name a remedy if wrappers' state does not fit.

    This function is called in place of `tf.train.Saver.restore`. `restore` is TensorFlow's
    function, and `self` is the saver. `sess` is the session into which the checkpoint with the path
    `save_path` is restored.

    Raises:
      ValueError: when sums of gradients in the checkpoint would be lost, or when state of other
        islands or shards would be restored as it is.
      NotFoundError: when the checkpoint lacks a variable. If it lacks state of a wrapper, the error
        has this package's text in place of TensorFlow's.
    """
    graph = getattr(sess, "graph", None)  # None where TensorFlow is eager
    if graph is None or not _is_checkpoint(save_path):
        restore(self, sess, save_path)
        return
    has_state = graph.get_collection(STATE_COLLECTION)
    if not has_state and not graph.get_collection(SUMS_NOT_KEPT):
        restore(self, sess, save_path)
        return
    saved = SavedCheckpoint(save_path, graph)
    if getattr(self, "_checks_sums", True):
        saved.check_sums_kept()
    found = saved.changes if has_state else {}
    own = variables_of_saver(self)
    alike = [n for n, c in found.items() if c.looks_alike and (own is None or n in own)]
    if alike:
        raise ValueError(
            f"The checkpoint {save_path} has {some_of(alike)} of other islands or shards, of "
            "another window of skip_spikes, or with weights where this graph has none (or without "
            "weights where it has some): in this graph, the values as they are would be wrong. "
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
            "without this wrapper, or its wrapper had other arguments "
            f"(backward_passes_per_step=1, say). {_RESTORE_ADAPTED}"
        )
        raise tf.errors.NotFoundError(None, None, text) from error


def copy_masters_to_slices(
    copy: Callable[[mtf.Lowering], tf.Operation], self: mtf.Lowering
) -> tf.Operation:
    """Returns the operation that copies masters to slices; makes savers `ReshardingSaver`s.

    This function is called in place of Mesh-TF's `Lowering.copy_masters_to_slices`. Its argument
    `copy` is Mesh-TF's function, and `self` is the lowering. Mesh-TF's training programs call
    `copy_masters_to_slices` after they have made a plain saver, or have left the making of a saver
    to the session. If the graph has state of wrappers, this function turns plain savers of the
    graph into `ReshardingSaver`s. Mesh-TF's programs also advance the global step while other
    operations read it. This function makes the increment wait for these reads.
    """
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


def _checks_of_shapes() -> list[tf.Operation]:
    """Returns operations that fail if a plain saver has restored wrappers' state of another mesh.

    The state of wrappers, accumulated sums for example, has another shape on another mesh.
    TensorFlow does not compare the shapes of resource variables when it restores the variables.
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
                    "checkpoint and in the graph:"
                )
                data = [message, shape, variable.shape.as_list()]
                # Not `tf.Assert`: with control flow v2 its branches are functions, which XLA
                # sessions would add to TensorFlow's context twice.
                checks.append(tf.raw_ops.Assert(condition=fits, data=data))
    return checks


def init_from_checkpoint(initialize: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Initializes variables from a checkpoint; wrappers' state keeps its own initial values.

    This function is called in place of TensorFlow's `init_from_checkpoint`, which users and
    `tf.train.warm_start` call. `initialize` is TensorFlow's function. `args` and `kwargs` are what
    the caller gave to it: the checkpoint, and an assignment map, which says which variables begin
    with which values of the checkpoint. A warning names the variables of wrappers that the
    checkpoint would have initialized.
    """
    anew = begin_anew(tf.get_default_graph())
    variables = [v for v in tf.global_variables() if v.op.name in anew] if anew else []
    before = [initializer_of(v) for v in variables]
    initialize(*args, **kwargs)
    kept = []
    for variable, own in zip(variables, before):
        if initializer_of(variable)[0] is not own[0]:
            set_initializer(variable, own)
            kept.append(variable.op.name)
    if kept:
        _logger.warning(
            "%s: sums, counts and averages of wrappers do not begin as in a checkpoint of "
            "another run, but as in every new run. To go on with that run, restore the "
            "checkpoint by a tf.train.Saver.",
            some_of(kept),
        )
