"""Writes and reads checkpoints, in Mesh-TensorFlow's format and under its names."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Collection, Iterable, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import (
    ISLAND,
    STATE_COLLECTION,
    begin_anew,
    close_to,
    mtf,
    owner_of,
    some_of,
    tf,
)
from mtf_gradsync.runtimes._common import ACCEPT_FLAG, ConfigError, TrainingError, first_line
from mtf_gradsync.runtimes._private.tensorflow import session_interface, set_initializer
from mtf_gradsync.runtimes.checkpoints import SavedCheckpoint
from mtf_gradsync.runtimes.savers import ReshardingSaver
from mtf_gradsync.runtimes.starting import (
    STATE_FILE,
    UNREADABLE,
    add_to_manifest,
    checkpoint_files,
    find_damage,
    remove_from_manifest,
    remove_leftovers,
)

# Lines beyond this number are counted, not listed.
_MAX_LISTED = 40
# Variables of another shape that an error names: if one size differs, most variables differ.
_MAX_UNFIT = 3
_logger = logging.getLogger(__name__)


class Differences(NamedTuple):
    """The differences between the variables of a checkpoint and those of a graph.

    `dropped` are the names that only the checkpoint has, and `new` the names that only the graph
    has. Of the names in `new`, `adapted` are those that a wrapper derives from other values of the
    checkpoint, and `slots` are slots that begin as in a new run. `unfit` are sentences about
    variables that both have, but that cannot be restored.
    """

    dropped: tuple[str, ...]  # names that only the checkpoint has
    new: tuple[str, ...]  # names that only the graph has
    adapted: tuple[str, ...]  # names in `new` that a wrapper derives from other values
    slots: tuple[str, ...]  # names in `new` of slots that begin as in a new run in every saver
    unfit: tuple[str, ...]  # sentences about variables in both that cannot be restored


def differences(path: str, variables: Sequence[Any]) -> Differences:
    """Returns how the checkpoint `path` differs from variables of the default graph.

    `variables` are the tf variables that are compared. A wrapper's state for another number of
    shards or islands is no difference, because savers convert such state when they restore it.
    Raises a ConfigError if the checkpoint cannot be read.
    """
    try:
        saved = SavedCheckpoint(path)
    except UNREADABLE as error:
        raise ConfigError(f"The checkpoint {path} cannot be read: {first_line(error)}") from error
    new, unfit, used = [], [], {variable.op.name for variable in variables}
    for variable in variables:
        name, change = variable.op.name, saved.changes.get(variable.op.name)
        if change is not None and change.saved_name is not None:
            used.add(change.saved_name)
            if not change.fits:
                there, here = list(change.saved_shape), list(change.shape)
                unfit.append(
                    f"{name} has the shape {there} in the checkpoint and {here} in the graph"
                )
        elif name not in saved.shapes or change is not None:
            new.append(name)
        elif unlike := saved.describe_difference(variable):
            unfit.append(unlike)
    return Differences(
        dropped=tuple(sorted(set(saved.shapes) - used)),
        new=tuple(sorted(new)),
        adapted=tuple(
            n for n in sorted(new) if n in saved.changes and n not in saved.restarted_slots
        ),
        slots=tuple(name for name in sorted(new) if name in saved.restarted_slots),
        unfit=tuple(unfit),
    )


def initialize_from(init_checkpoint: str, variables: Sequence[Any]) -> str:
    """Replaces variables' initial values by a checkpoint's, if shapes and types agree.

    Variables that the checkpoint lacks, or has in another shape or type, and the state of wrappers
    keep their own initial values. Returns text for the log that names the variables whose initial
    values are replaced, and the variables that keep their own. `init_checkpoint` may be a
    directory, which stands for the newest checkpoint in it. Raises a ConfigError if the checkpoint
    is damaged or missing, or has no value for any of the variables.
    """
    try:
        path = init_checkpoint
        if os.path.isdir(path):
            path = tf.train.latest_checkpoint(path) or path
        saved = SavedCheckpoint(path)
    except UNREADABLE as error:
        raise ConfigError(
            f"train.run.init_checkpoint = {init_checkpoint!r} is not a checkpoint: "
            f"{first_line(error)}"
        ) from error
    damage = find_damage(path, of_a_run=False)
    if damage:
        raise ConfigError(f"train.run.init_checkpoint: {path} is damaged: {damage}")
    anew = begin_anew(tf.get_default_graph())
    begun = [v.op.name for v in variables if v.op.name in anew]
    variables = [v for v in variables if v.op.name not in anew]
    there = {
        v.op.name: (v, saved.describe_difference(v)) for v in variables if v.op.name in saved.shapes
    }
    chosen = {name: variable for name, (variable, unlike) in there.items() if not unlike}
    unlike = [sentence for _, sentence in there.values() if sentence]
    here = {v.op.name for v in variables}
    if not chosen:
        raise _error(
            f"train.run.init_checkpoint = {init_checkpoint!r} has no variable of this model; it "
            f"has {some_of(sorted(saved.shapes))}",
            *_listed(unlike),
        )
    tf.train.init_from_checkpoint(path, chosen)
    trained = [v.op.name for v in tf.trainable_variables()]
    counted = _initialize_counts(saved, chosen)
    unused = set(saved.shapes).difference(here, begun)
    lacking = []
    for name in sorted(here.difference(saved.shapes, counted)):
        close = close_to(name, unused, 1)
        lacking.append(f"{name} (it has {close[0]})" if close else name)
    lines = [
        f"{len(chosen)} variables begin as in {init_checkpoint}",
        *_summary_lines(chosen, trained),
    ]
    if counted:
        lines += ["the checkpoint does not have these, which begin with its number of updates:"]
        lines += _summary_lines(counted, trained)
    if begun:
        lines += ["state of wrappers begins anew:", *_summary_lines(begun, trained)]
    if unlike:
        lines += ["these do not, and keep their own initial values:", *_listed(unlike)]
    if lacking:
        lines += [
            "the checkpoint does not have these, which keep their initial values:",
            *_listed(lacking),
        ]
    return "\n".join(lines)


def _initialize_counts(saved: SavedCheckpoint, chosen: Collection[str]) -> list[str]:
    """Sets initial values of counters of updates that the checkpoint `saved` does not have.

    The initial value is the number of updates that the checkpoint's run had made. Only counters
    that belong to slots in `chosen` are set; `chosen` has the names of the variables that begin as
    in the checkpoint. Returns the names of the counters that were set.
    """
    found = []
    for variable in tf.global_variables():
        change = saved.changes.get(variable.op.name)
        slot = None if change is None or change.saved_name else change.note.follows
        if slot and not {slot, f"{slot}/{ISLAND}"}.isdisjoint(chosen):
            value = tf.constant(saved.value(variable.op.name))
            set_initializer(variable, (tf.assign(variable, value).op, value))
            found.append(variable.op.name)
    return found


def _summary_lines(names: Iterable[str], trained: Sequence[str]) -> list[str]:
    """Returns lines for the log that sum up which variables are among `names`.

    The lines give the number of trained variables and the number of slots of each kind, and name
    all other variables. `trained` are the names of all trained variables.
    """
    groups: dict[str, int] = {}
    own = [name for name in names if name in trained]
    for name in sorted(set(names) - set(own)):
        owner = owner_of(name, trained)
        group = f"{name[len(owner) :].lstrip('/_')} of" if owner else name
        groups[group] = groups.get(group, 0) + 1
    lines = [f"{len(own)} that are trained"] if own else []
    for group, count in groups.items():
        lines.append(f"{group} {count} variables" if group.endswith(" of") else group)
    return _listed(lines)


def check_configuration(
    path: str, variables: Sequence[Any], accept: bool, changed: Sequence[str] = ()
) -> Differences:
    """Returns how a checkpoint and a graph differ; raises a ConfigError if that is not accepted.

    Args:
      path: the checkpoint.
      variables: the tf variables of the default graph that are to be restored.
      accept: whether the checkpoint and the graph may each have variables that the other lacks.
        Shapes and types may never differ.
      changed: lines about settings that differ from the settings of the run that made the
        checkpoint. The error quotes these lines.
    """
    found = differences(path, variables)
    parts = _lines(found)
    if found.unfit:
        names = "\n".join(found.unfit)
        _logger.info("Variables that differ from those of %s:\n%s", path, names)
        settings = ["these settings differ:", *_listed(changed)] if changed else []
        raise _error(
            f"The checkpoint {path} was made by another model or optimizer than this config "
            f"describes: {len(found.unfit)} of {len(variables)} variables have another shape or "
            "type",
            *settings,
            "for example:" if len(found.unfit) > _MAX_UNFIT else "they are:",
            *(f"  {line}" for line in found.unfit[:_MAX_UNFIT]),
            *parts,
            "Nothing was changed. Use the config that made the checkpoint, or another --model_dir. "
            "(--verbosity=info names all variables.)",
        )
    if parts and not accept:
        raise _error(
            f"The checkpoint {path} was made by another configuration than this one:",
            *parts,
            f"Nothing was changed. With {ACCEPT_FLAG} the run goes on in spite of these "
            "differences. Otherwise, use the config that made the checkpoint, or another "
            "--model_dir.",
        )
    return found


def check_has_variables(path: str, variables: Sequence[Any], model_dir: str) -> None:
    """Raises a ConfigError if the checkpoint `path` does not have all of `variables`.

    The error is also raised if the checkpoint has a variable in another shape or dtype. The
    checkpoint may lack state that wrappers derive from other values of the checkpoint, and slots
    that begin anew. `model_dir` is the run's directory, which the error names.
    """
    found = differences(path, variables)
    made = {*found.adapted, *found.slots}
    missing = [f"{name} is not in the checkpoint" for name in found.new if name not in made]
    if missing or found.unfit:
        raise _error(
            f"The checkpoint {path} was made by another model than this config describes:",
            *_listed([*missing, *found.unfit]),
            f"Use the config that made the checkpoint, or another model_dir than {model_dir}.",
        )


def describe_differences(found: Differences) -> str:
    """Returns differences between a checkpoint and a graph as text; "" if there are none.

    `found` are the differences. The text, which is for the log, lists variables that only the
    checkpoint or only the graph has.
    """
    return "\n".join(_lines(found))


def _error(*lines: str) -> ConfigError:
    return ConfigError("\n".join(lines))


def _lines(found: Differences) -> list[str]:
    begins = [name for name in found.new if name not in found.adapted]
    lines = []
    if found.dropped:
        lines += ["this config does not have these of the checkpoint (dropped, if accepted):"]
        lines += _listed(found.dropped)
    if begins:
        lines += ["the checkpoint does not have these (they begin as in a new run, if accepted):"]
        lines += _listed(begins)
    if found.adapted:
        lines += [
            "the checkpoint does not have these of a wrapper (they begin from the checkpoint's "
            "steps and variables, if accepted):"
        ]
        lines += _listed(found.adapted)
    return lines


def _listed(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MAX_LISTED
    listed = [f"  {line}" for line in lines[:_MAX_LISTED]]
    return [*listed, f"  and {more} more"] if more > 0 else listed


class _ValuesToSave(session_interface()):  # type: ignore[misc]  # found when it is called
    """A copy of all values that a checkpoint will have; give it to a saver in place of a session.

    The saver's `save(this object, path)` then writes these values, even if the variables have
    changed since they were read.
    """

    def __init__(self, sess: Any, saver_def: Any):
        """Reads the variables' values in one run of the session `sess`.

        `saver_def` is the SaverDef of the saver, which says which variables are read.
        """
        last = sess.graph.get_tensor_by_name(saver_def.save_tensor_name).op
        (save,) = [op for op in (last, *last.control_inputs) if op.type == "SaveV2"]
        _, names, slices, *tensors = save.inputs
        self._filename = saver_def.filename_tensor_name
        # These are copies: later steps do not write to them.
        names, slices, values = sess.run([names, slices, tensors])
        with tf.Graph().as_default() as graph:
            self._prefix = tf.placeholder(tf.string, [])
            inputs = [tf.placeholder(x.dtype, x.shape) for x in tensors]
            self._write = tf.raw_ops.SaveV2(
                prefix=self._prefix, tensor_names=names, shape_and_slices=slices, tensors=inputs
            )
        self._values = dict(zip(inputs, values))
        self._session = tf.Session(graph=graph, config=tf.ConfigProto(device_count={"GPU": 0}))

    @property
    def graph(self) -> tf.Graph:
        """The graph of the operation that writes."""
        return self._session.graph

    def run(self, fetches: Any, feed_dict: Any = None, *unused: Any, **unused_named: Any) -> str:
        """Writes the values to a checkpoint, and returns the checkpoint's path.

        The saver calls this method as it would call ``run`` of a session. `feed_dict` feeds the
        path of the checkpoint to the saver's graph. The other arguments are not used.
        """
        prefix = feed_dict[self._filename]
        self._session.run(self._write, {self._prefix: prefix, **self._values})
        return prefix

    def close(self) -> None:
        """Frees the values."""
        self._session.close()
        self._values = {}


class RunSaver(ReshardingSaver):
    """A Saver of a run's checkpoints, by default of all global variables of a graph.

    Before this saver writes a checkpoint, it copies the variables' slices to the masters (whole
    variables). `lowering` is the lowering that has the slices; all variables of the lowering must
    exist. Without a lowering, the caller copies the slices. When `save` returns, the files are on
    the disk and listed in the directory's manifest.
    """

    def __init__(self, lowering: mtf.Lowering | None = None, **kwargs: Any):
        kwargs.setdefault("var_list", tf.global_variables())
        self._own = kwargs["var_list"]
        super().__init__(save_relative_paths=True, **kwargs)
        self._to_masters = lowering and lowering.copy_slices_to_masters()

    def save(
        self, sess: Any, save_path: str, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> str:
        """Writes a checkpoint, and returns its path.

        `sess` is the session with the values. `save_path` is the path of the checkpoint, to which
        "-" and `global_step` are added if `global_step` is given. `args` and `kwargs` are further
        arguments of `tf.train.Saver.save`, which this method overrides.
        """
        if self._to_masters and not isinstance(sess, _ValuesToSave):
            sess.run(self._to_masters)
        self._check_masters(sess, global_step)
        if "://" in save_path:  # where files are written in another way
            return super().save(sess, save_path, global_step, *args, **kwargs)
        remove_from_manifest(save_path if global_step is None else f"{save_path}-{global_step}")
        path = super().save(sess, save_path, global_step, *args, **kwargs)
        _flush_to_disk(path)
        add_to_manifest(path)
        return path

    def restore(self, sess: Any, save_path: str) -> None:
        """Restores the checkpoint with the path `save_path` into the session `sess`.

        Variables that hooks have added since this saver was made get their initial values. Raises a
        ConfigError that names each variable that the checkpoint lacks, or has in another shape or
        dtype.
        """
        with sess.graph.as_default():
            present = tf.global_variables()
        own = present if self._own is None else self._own
        if save_path and tf.train.checkpoint_exists(save_path):
            with sess.graph.as_default():
                check_has_variables(save_path, own, os.path.dirname(save_path))
        super().restore(sess, save_path)
        known = {v.op.name for v in own}
        added = [v.initializer for v in present if v.op.name not in known]
        if added:
            sess.run(added)

    def _check_masters(self, sess: Any, global_step: Any) -> None:
        """Raises an error if the masters' values must not be saved; called before each save.

        This class accepts all values; subclasses may refuse some. `sess` is the session with the
        values, and `global_step` is the step of the checkpoint, for errors.
        """


class TrainingSaver(RunSaver):
    """A RunSaver that refuses values from which a run could not go on: infinities and NaNs.

    If the argument `sums_may_be_bad` is True, sums of gradients are not checked, because the
    optimizer skips sums that are not finite.
    """

    _checks_sums = False

    def __init__(self, sums_may_be_bad: bool, lowering: mtf.Lowering | None = None, **kwargs: Any):
        super().__init__(lowering, **kwargs)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        names = {v.op.name for v in tf.trainable_variables()}
        if not sums_may_be_bad:
            # The next update contains what an accumulator holds.
            names.update(note.name for note in tf.get_collection(STATE_COLLECTION))
        variables = tf.global_variables()
        checked = [v for v in variables if v.op.name in names and v.dtype.is_floating]
        self._checked = [v.op.name for v in checked]
        with tf.name_scope("finite"):
            flags = [tf.reduce_all(tf.math.is_finite(v)) for v in checked]
            self._finite = tf.stack(flags).name if flags else None

    def save(
        self, sess: Any, save_path: str, global_step: Any = None, *args: Any, **kwargs: Any
    ) -> str:
        """Writes a checkpoint, and returns its path.

        `sess` is the session with the values. `save_path` is the path of the checkpoint, to which
        "-" and `global_step` are added if `global_step` is given. `args` and `kwargs` are further
        arguments of `tf.train.Saver.save`, which this method overrides.

        Raises a TrainingError if files cannot be written, or if a trained variable or a sum of
        gradients is not finite. The previous checkpoint is not changed by a save that fails.
        """
        try:
            return super().save(sess, save_path, global_step, *args, **kwargs)
        except (tf.errors.OpError, OSError, ValueError) as error:
            directory = os.path.dirname(save_path)
            # Leftover files take room on a disk that may be full.
            remove_leftovers(directory)
            raise TrainingError(
                f"The checkpoint of step {global_step} cannot be written to {directory}: "
                f"{first_line(error)}"
            ) from error

    def begin_save(self, sess: Any, save_path: str, global_step: int) -> Future[str]:
        """Reads a checkpoint's values now, and writes them to files while the program goes on.

        When this method returns, the session may make the next step: the checkpoint gets the values
        that were read before. Only one checkpoint at a time may be written by `begin_save`.

        Args:
          sess: the session. If this saver has no lowering, the masters have to be up to date.
          save_path: the path of the checkpoint, to which "-" and `global_step` are added.
          global_step: the step of the checkpoint.

        Returns:
          A future with the result or the error of `save`.

        Raises:
          TrainingError: when a trained variable or a sum of gradients is not finite.
        """
        if self._to_masters:
            sess.run(self._to_masters)
        self._check_masters(sess, global_step)
        taken = _ValuesToSave(sess, self.saver_def)
        return self._writer.submit(self._write_values, taken, save_path, global_step)

    def _write_values(self, taken: _ValuesToSave, save_path: str, global_step: int) -> str:
        try:
            return self.save(taken, save_path, global_step, write_meta_graph=False)
        finally:
            taken.close()

    def _check_masters(self, sess: Any, global_step: Any) -> None:
        if isinstance(sess, _ValuesToSave):
            return  # the values were checked when they were read
        if not self._finite:
            return
        # By name: a SIMD program's session runs a graph of its own.
        finite = np.asarray(sess.run(self._finite))
        if not finite.all():
            bad = [name for name, ok in zip(self._checked, finite) if not ok]
            raise TrainingError(
                f"{some_of(bad)} hold numbers that are not finite, after step "
                f"{global_step}; no checkpoint of this step was written"
            )


def _flush_to_disk(path: str) -> None:
    """Waits until the checkpoint `path` is on the disk, so that it survives a power failure."""
    directory = os.path.dirname(path) or "."
    state = os.path.join(directory, STATE_FILE)
    for file in (*map(os.fspath, checkpoint_files(path)), state, directory):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
