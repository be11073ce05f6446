"""Variables of wrappers' state: how they are made, how they begin, how other runs' are read.

Counters and sums begin at zero. A derived variable, such as a moving average, begins with the value
that its source variable has when training begins. Its initial value is a mark: NaNs of a certain
bit pattern, which no arithmetic makes. Before every training, Mesh-TF copies masters (values as in
checkpoints) to slices. If a derived variable's master has the mark, the derived variable's slices
are copied from the master of the source variable, so that training steps never see the mark. When
slices are copied back to masters, the values of the slices replace the mark.
"""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any, Callable, Collection, Iterable, Mapping, NamedTuple

import gin
import numpy as np

from mtf_gradsync._common import check_flag, is_number, some_of
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import master_of, set_copy_to_slices
from mtf_gradsync._private.tensorflow import root_scope
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.step.plan import PlanExtension, StepPlan

# The last part of an accumulator's name.
ACCUMULATOR = "gradient_accumulator"
# The last part of the name of a variable that has a value for each island.
ISLAND = "island"
# Collections of a tf graph: its `StateNote`s, and counters of sums that it does not keep, although
# wrappers with other arguments would: pairs of the counter's name and a sentence for an error. If
# the counter is greater than 0 in a checkpoint, the sums in it would be lost, so that reading the
# checkpoint raises an error. The collections are not exported, because their keys are no strings.
STATE_COLLECTION = ("mtf_gradsync state",)
SUMS_NOT_KEPT = ("mtf_gradsync sums not kept",)
# The collection of a tf graph's `SlotNote`s.
SLOTS_COLLECTION = ("mtf_gradsync slots",)
#: The collection of variables that nothing reads, so that they need not be initialized.
STAND_INS = ("mtf_gradsync stand-ins",)

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_./-]*\Z")


def check_name(name: Any) -> str:
    """Returns the argument `name`. Raises ValueError if it cannot be part of a variable's name."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"name must be of letters, digits and any of . _ / -, got {name!r}.")
    return name


class Ring(NamedTuple):
    """Two variables that keep the last `size` values of a series; each new one replaces the oldest.

    Attributes:
      values: the name of the variable with the values, `[size]`.
      num_values: the name of the variable with the number of values written.
      size: how many values are kept.
    """

    values: str
    num_values: str
    size: int


class StateNote(NamedTuple):
    """A note on how a wrapper's variable is read from another run's checkpoint.

    In the attributes, "the variable" is the variable that the note is about.

    Attributes:
      name: the variable's name.
      num_shard_dims: how many of the variable's dims number shards, after the dims that number
        islands; 0 if shards share the variable.
      num_island_dims: how many of the variable's first dims number islands.
      held: the name of another variable whose values on all islands the variable stores; None if
        it stores its own values.
      is_share: whether each shard's value is 1/num_shards of what the shard would have by itself,
        as a shard's term in the gradient of a mean over all shards is. False for sums with weights.
      is_total: whether the values of islands have to be added up to get the value for the whole
        batch.
      is_mean: whether the mean of the shards' values is kept if the number of shards changes, and
        not their sum.
      mean_weight: the name of another variable, with the weights of islands. If the number of
        islands changes, islands begin with the mean by these weights; None for equal weights.
      one_shape: whether the shapes in a checkpoint and in the graph, without the dims of islands,
        must be equal.
      fill: the value that every shard gets if the checkpoint has another number of shards: a
        number, or the name of a scalar variable with the value. None for sums, which keep their
        total.
      start: the value that the variable gets if the checkpoint does not have it: a number, or the
        name of another variable with the value, which is a scalar or of the same shape. None if
        only the program knows the value.
      follows: the name of another variable, or None. If the checkpoint lacks that other variable,
        the variable begins at zero.
      counter: the name of another variable, if the variable is a sum: the counter of additions to
        the sum. If a checkpoint lacks the counter, the sum in the checkpoint belongs to another
        wrapper and is not used. None for variables that are no such sum.
      weight: the name of another variable, if the variable is a sum of gradients: the total weight
        of these gradients. None if they have no weights.
      ring: the `Ring` of last values to which the variable belongs, or None. If the size of the
        ring changes, the newest values are kept. If the number of islands changes, no values are
        kept. If the variable is neither of the ring's two variables, it begins at zero in both
        cases.
    """

    name: str
    num_shard_dims: int = 0
    num_island_dims: int = 0
    held: str | None = None
    is_share: bool = False
    is_total: bool = False
    is_mean: bool = False
    mean_weight: str | None = None
    one_shape: bool = False
    fill: float | str | None = None
    start: float | str | None = 0
    follows: str | None = None
    counter: str | None = None
    weight: str | None = None
    ring: Ring | None = None


class SlotNote(NamedTuple):
    """A note on a slot of the innermost optimizers, for the reading of checkpoints.

    Attributes:
      name: the slot's name.
      siblings: the names of the slots that belong together with it: those of the same variable,
        itself included. If a checkpoint has one of them, none of the others may begin at its
        initial value.
    """

    name: str
    siblings: frozenset[str]


def note_state(variable: mtf.Variable, note: StateNote | None = None, **how: Any) -> None:
    """Records, in the default graph, how a variable is read from checkpoints of other runs.

    The fields of the note (`StateNote`) are given by `note`, or one by one as keyword arguments,
    `how`. The note gets the name of `variable`.
    """
    note = note or StateNote(variable.name, **how)
    tf.add_to_collection(STATE_COLLECTION, note._replace(name=variable.name))


class UncheckpointedVariable(mtf.Variable):
    """A mesh variable without a master copy: it is in no checkpoint, and begins with zeros.

    Mesh-TF keeps a master copy of each variable on the host. For a local accumulator the master
    would be as large as the slices of all shards together. On a mesh of one processor the master is
    the only copy, and is kept as a local variable.
    """

    _master: Any

    def __init__(self, mesh: mtf.Mesh, name: str, shape: mtf.Shape, dtype: tf.DType):
        # Mesh-TF 0.1.21 makes the master in its constructor; a scalar stands in for it.
        self._whole_shape = shape.to_integer_list
        self._alone = False
        super().__init__(
            mesh,
            name,
            mtf.Shape([]),
            without_autostack(dtype),
            tf.zeros_initializer(),
            False,
            collections=[STAND_INS],
        )
        self._outputs = [mtf.Tensor(self, shape, dtype)]
        self._stand_in = self._master

    def lower(self, lowering: mtf.Lowering) -> None:
        self._alone = lowering.mesh_impl(self).size == 1
        if self._alone and not self._whole_shape:
            tf.add_to_collection(tf.GraphKeys.LOCAL_VARIABLES, self._stand_in)
        if self._alone and self._whole_shape:
            with tf.device(self._stand_in.device), tf.control_dependencies(None):
                self._master = tf.get_variable(
                    self.name + "_whole",
                    self._whole_shape,
                    self.master_dtype,
                    tf.zeros_initializer(),
                    trainable=False,
                    collections=[tf.GraphKeys.LOCAL_VARIABLES],
                )
        super().lower(lowering)

    def get_master(self) -> Any:
        """Returns zeros, as slices begin with; on a mesh of one processor the variable itself."""
        if self._alone:
            return self._master
        with tf.device(self._stand_in.device):
            return tf.zeros(self._whole_shape, self.master_dtype)

    def assign_to_master(self, val: tf.Tensor) -> tf.Operation:
        """Does nothing, because there is no master: the slices are the only copy."""
        del val
        return tf.no_op()


def without_autostack(dtype: Any, activation_dtype: tf.DType | None = None) -> mtf.VariableDType:
    """Returns a dtype for a variable that Mesh-TF's autostack must leave alone.

    Autostack joins several variables into one, which needs a master. Autostack (of Mesh-TF 0.1.21)
    only joins variables whose dtypes have equal attributes. The returned object has an attribute
    that no other dtype has, so that its variable is not joined.

    Args:
      dtype: a `mtf.VariableDType`, or the dtype of master and slices.
      activation_dtype: the dtype of the value; None for `dtype`.
    """
    is_one = not isinstance(dtype, mtf.VariableDType)
    given = mtf.VariableDType(dtype, dtype, activation_dtype) if is_one else dtype
    result = copy.copy(given)
    result.unstacked = id(result)
    return result


def scalar_state(
    mesh: mtf.Mesh,
    name: str,
    dtype: tf.DType = tf.int32,
    checkpointed: bool = True,
    stacked: bool = True,
    start: float | str = 0,
) -> mtf.Variable:
    """Returns a scalar of a wrapper's state, made on the first call; it is not trained.

    Args:
      mesh: the mesh.
      name: the scalar's full name, the same in any variable scope and in checkpoints.
      dtype: the scalar's dtype.
      checkpointed: whether savers of global variables write it; if not, it is zero again in every
        new session.
      stacked: whether Mesh-TF's autostack may join the scalar with other variables into one.
      start: a number, the scalar's first value. Or the name of a variable: if a checkpoint does not
        have the scalar, it begins with that variable's value in the checkpoint.

    Raises:
      TypeError: mesh is no mesh, dtype no dtype of numbers, or start neither a number nor a name.
      ValueError: name cannot be a variable's, the graph has another variable of that name, dtype
        does not hold start, or start is not 0 although checkpointed is False.
    """
    if not isinstance(mesh, mtf.Mesh):
        raise TypeError(f"mesh must be an mtf.Mesh, such as that of a variable, got {mesh!r}.")
    check_name(name)
    try:
        dtype = tf.as_dtype(dtype).base_dtype
    except TypeError:
        raise TypeError(f"dtype must be a dtype such as tf.int32, got {dtype!r}.") from None
    if not (dtype.is_integer or dtype.is_floating):
        raise TypeError(f"dtype must be one of numbers, such as tf.int32, got {dtype!r}.")
    checkpointed, stacked = check_flag("checkpointed", checkpointed), check_flag("stacked", stacked)
    if not isinstance(start, str):
        if not is_number(start):
            raise TypeError(f"start must be a number or the name of a variable, got {start!r}.")
        if dtype.is_integer and (not dtype.min <= start <= dtype.max or start % 1):
            raise ValueError(f"start must be a number that {dtype.name} holds, got {start!r}.")
        if start and not checkpointed:
            raise ValueError(f"start must be 0 with checkpointed=False, got {start!r}.")
    return named_state(mesh, name, None, dtype, checkpointed, stacked, start=start)


def named_state(
    mesh: mtf.Mesh,
    name: str,
    shape: mtf.Shape | None = None,
    dtype: tf.DType = tf.int32,
    checkpointed: bool = True,
    stacked: bool = False,
    start: float | str = 0,
    in_scope: bool = False,
    **note: Any,
) -> mtf.Variable:
    """Returns a variable of a wrapper's state, made on the first call; it is not trained.

    Args:
      mesh: the mesh.
      name: the variable's full name, so that code in any variable scope finds the same variable.
      shape: the variable's shape; None for a scalar.
      dtype: the dtype of the variable's master, slices and activations.
      checkpointed: whether savers of global variables write it. If not, it is zero again in
        every new session and has no master copy on the host.
      stacked: whether Mesh-TF's autostack may join the variable with others into one.
      start: a number, the variable's first value, which it also gets from a checkpoint that does
        not have it. Or the name of another variable: the first value is then zero, and after a
        checkpoint that does not have the variable it has that other variable's value.
      in_scope: whether `name` is not a full name, but a name in the current variable scope.
      **note: other fields of `StateNote`.
    """
    shape = mtf.Shape([]) if shape is None else shape
    with contextlib.nullcontext() if in_scope else root_scope():
        if not checkpointed:
            return UncheckpointedVariable(mesh, name, shape, dtype)
        is_zero = isinstance(start, str) or not start
        result = mtf.get_variable(
            mesh,
            name,
            shape,
            dtype if stacked else without_autostack(dtype),
            initializer=tf.zeros_initializer() if is_zero else tf.constant_initializer(start),
            trainable=False,
        ).operation
    if not isinstance(result, mtf.StackedVariable) and (
        result.shape != shape or result.slice_dtype != dtype
    ):
        raise ValueError(
            f"The graph has a variable {result.name!r} already, of shape "
            f"{result.shape.to_string} and dtype {result.slice_dtype.name}, in place of "
            f"{shape.to_string} and {dtype.name}: give one of the two another name."
        )
    note_state(result, start=start, **note)
    return result


@gin.configurable(module="mtf_gradsync", denylist=["mesh"])
def get_update_step(mesh: mtf.Mesh, name: str = "GradientAccumulationOptimizer") -> mtf.Tensor:
    """Returns the number of updates made so far, for schedules of the inner optimizer.

    The number is the value of the variable `<name>/update_step`. A wrapper of that name uses this
    variable as its counter, even if the wrapper is made later or in another variable scope. If no
    wrapper has that name, the first step that a wrapper builds in the graph advances the counter.
    Updates of the innermost optimizer are counted, not steps that only accumulate or are skipped.

    To give this number to all schedules of `train`, write
    `train.run.schedule_step = @get_update_step` in the gin file.

    Call `get_update_step` before `apply_grads`. If nothing advances the counter in a graph that
    trains, lowering the graph raises ValueError.

    Args:
      mesh: the mesh that is trained on.
      name: name of the wrapper, a prefix of the counter's.

    Returns:
      An int32 mtf scalar.

    Raises:
      TypeError: mesh is no mesh.
      ValueError: name cannot be a wrapper's, or the graph has another variable of that name.
    """
    return on_mesh(update_counter(mesh, name).value, mesh)


def update_counter(mesh: mtf.Mesh, name: str) -> mtf.Variable:
    """Returns the counter of updates `<name>/update_step`, a variable; the first call makes it.

    If the graph has the counter already, the counter may be on another mesh than `mesh`. The
    wrapper `name` advances the counter. If no wrapper has this name, the first step that a wrapper
    builds advances it. Lowering the graph raises an error if nothing advances the counter
    (`UpdateCounters.begin`).
    """
    # In a run without the wrapper every step was an update.
    counter = scalar_state(mesh, f"{name}/update_step", start="global_step")
    plan = StepPlan.of(mesh.graph)
    counters = plan.extension(UpdateCounters)
    if counter not in counters.wanted:
        counters.wanted += (counter,)
    plan.adopt()  # so that the counter is checked in a graph without wrappers, too
    return counter


class UpdateCounters(PlanExtension):
    """The counters of updates in a graph.

    Attributes:
      wanted: the counters that a program or a wrapper has asked for.
    """

    wanted: tuple[mtf.Variable, ...] = ()

    def advances(self, graph: mtf.Graph, meshes: Collection[mtf.Mesh]) -> list[mtf.Operation]:
        """Makes assignments that add one to counters on `meshes`, if nothing else advances these.

        The last operations of a step call this method. The counters are those in `wanted`. Only
        assignments that `graph` has now are looked at.
        """
        written = assigned_variables(graph.operations)
        free = [v for v in self.wanted if v.name not in written and v.mesh in meshes]
        return [mtf.assign(v, v.value + 1) for v in free]

    def begin(self, lowering: mtf.Lowering) -> None:
        """Raises ValueError if nothing advances a wanted counter in a graph that trains.

        The plan calls this method when the graph is lowered.
        """
        written = assigned_variables(lowering.graph.operations)
        stay = [v.name for v in self.wanted if v.name not in written]
        if stay and any(v.trainable for v in written.values()):
            raise ValueError(
                f"{some_of(stay)} of get_update_step would stay as it is, since nothing advances "
                "it: call get_update_step before gradients are applied, by an optimizer of this "
                "package, such as gs.CrossShardOptimizer(opt), or advance it by mtf.assign."
            )


def assigned_variables(operations: Iterable[mtf.Operation]) -> dict[str, mtf.Variable]:
    """Returns the variables that operations assign, by name.

    If Mesh-TF's autostack has joined variables into one, that one is in the result under the name
    of each of them.
    """
    variables = {v for op in operations if isinstance(op, mtf.Assign) for v in op.variables}
    return {name: v for v in variables for name in getattr(v, "original_names", [v.name])}


# Beginnings: the first values of state in a new run.

# The collection of a tf graph's `Beginning`s. It is not exported, as its key is not a string.
_BEGINNINGS = ("mtf_gradsync beginnings",)
# The collection of names of derived variables, lowered or not.
_DERIVED = ("mtf_gradsync derived variables",)
# The bits of the mark as a signed integer, by dtype. NaNs of arithmetic have other last bits.
_MARKS = {
    tf.bfloat16: (tf.int16, 0x7FE5),
    tf.float16: (tf.int16, 0x7F35),
    tf.float32: (tf.int32, 0x7FE5B3A1),
    tf.float64: (tf.int64, 0x7FFCB3A1B3A1B3A1),
}


class Beginning(NamedTuple):
    """The record of a derived variable in a tf graph.

    Attributes:
      name: the name of the derived variable.
      source_name: the name of the source variable.
      value: the value that the derived variable's slices get: that of its own master, or of the
        source variable.
      source: the value of the source variable's master, in the shape and dtype of `value`.
      dtype: the dtype of the source variable's slices.
    """

    name: str
    source_name: str
    value: tf.Tensor
    source: tf.Tensor
    dtype: tf.DType


class DerivedVariable(mtf.Variable):
    """A variable that begins with another variable's value; made by `derived_variable`."""

    _source: mtf.Variable
    _own_master: Callable[[], Any]
    _is_alone = False

    def get_master(self) -> Any:
        """Returns the tensor from which slices are copied; on one processor the master itself.

        The tensor has the master's value. But if the master still has the mark (the initial value
        of all derived variables, see `is_marked`), the tensor has the value of the source variable.
        """
        return self._own_master() if self._is_alone else self._beginning().value

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        self._is_alone = mesh_impl.size == 1
        super().lower(lowering)
        if not self._is_alone:
            return
        laid_out = lowering.variables[self]
        with mtf.utils.outside_all_rewrites():
            value = self._beginning().value
            whole = mesh_impl.LaidOutTensor([value]).all_slices
            set_copy_to_slices(laid_out, laid_out.assign_to_slices(mtf.assign_slice, whole))

    def _beginning(self) -> Beginning:
        with tf.device(self.master_device), tf.name_scope("begins"):
            master = tf.convert_to_tensor(self._own_master())
            as_integer, mark = _MARKS[master.dtype]
            first = tf.bitcast(tf.reshape(master, [-1])[:1], as_integer)
            is_new = tf.reduce_all(tf.equal(first, tf.constant(mark, as_integer)))
            source = tf.cast(tf.convert_to_tensor(self._source.get_master()), master.dtype)
            source = tf.broadcast_to(source, master.shape)
            value = tf.where_v2(is_new, source, master)
        found = Beginning(self.name, self._source.name, value, source, self._source.slice_dtype)
        tf.add_to_collection(_BEGINNINGS, found)
        return found


def derived_variable(
    source: mtf.Variable, make: Callable[[Callable[..., Any]], mtf.Variable]
) -> mtf.Variable:
    """Makes a variable that begins with the value that `source` has when training begins.

    Args:
      source: the source variable, whose dimensions are the last dimensions of the new variable.
      make: a function that is called with an initializer. It makes the new variable with this
        initializer, or finds the variable if the graph has it already.

    Returns:
      The new variable. If it is not of floating point, it begins with the initial value of `source`
      instead.
    """

    def initial(shape: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
        if dtype in _MARKS:
            as_integer, mark = _MARKS[dtype]
            return tf.bitcast(tf.fill(shape, tf.constant(mark, as_integer)), dtype)
        return tf.broadcast_to(tf.cast(master_of(source).initial_value, dtype), shape)

    variable = make(initial)
    if isinstance(variable, DerivedVariable) or variable.master_dtype not in _MARKS:
        return variable
    variable._own_master, variable._source = variable.get_master, source
    vars(variable).pop("get_master", None)
    variable.__class__ = DerivedVariable
    tf.add_to_collection(_DERIVED, variable.name)
    return variable


class Beginnings:
    """A graph's derived variables, for sessions that set variables before the first step.

    Attributes:
      are_equal: for each derived variable, by name, a boolean scalar: whether its master has the
        value of its source variable's master. If the scalar is true, and no step was made, the
        derived variable can begin anew with the value to which a session sets the source variable.
    """

    def __init__(self, graph: tf.Graph):
        """Makes the tensors in `are_equal`, in `graph`.

        `graph` is the default tf graph, with derived variables. Its mtf graph must be lowered
        already.
        """
        self._found: dict[str, Beginning] = {x.name: x for x in graph.get_collection(_BEGINNINGS)}
        self.are_equal: dict[str, tf.Tensor] = {}
        for one in self._found.values():
            # Masters may be wider than slices, and lose bits when these are copied back.
            pair = (tf.cast(x, one.dtype) for x in (one.value, one.source))
            self.are_equal[one.name] = tf.reduce_all(tf.equal(*pair))

    def marks(self, are_equal: Mapping[str, Any], written: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns the values that make derived variables begin anew, for their masters.

        A derived variable begins anew on two conditions. Its source variable is among the variables
        that a session sets (`written` has their names). And the derived variable and its source had
        equal values before (`are_equal` has, by name, the fetched values of the attribute
        `are_equal`). The result has an array for each of these derived variables, by name: the
        mark, which is to be written into its master. The derived variable then begins with the new
        value of its source variable.
        """
        written = set(written)
        return {
            name: self._mark(self._found[name].value)
            for name, is_equal in are_equal.items()
            if is_equal and self._found[name].source_name in written
        }

    def _mark(self, value: tf.Tensor) -> np.ndarray:
        as_integer, mark = _MARKS[value.dtype]
        bits = np.full(value.shape.as_list(), mark, as_integer.as_numpy_dtype)
        return bits.view(value.dtype.as_numpy_dtype).reshape(value.shape.as_list())


def is_marked(value: np.ndarray) -> bool:
    """Returns whether a derived variable's value in a checkpoint is still the mark.

    A derived variable begins with the value of another variable when training begins. Until then
    its value is the mark: NaNs of a certain bit pattern.
    """
    dtype = tf.as_dtype(value.dtype)
    if dtype not in _MARKS or not value.size:
        return False
    as_integer, mark = _MARKS[dtype]
    return value.reshape(-1)[:1].view(as_integer.as_numpy_dtype)[0] == mark


def begin_anew(graph: tf.Graph) -> set[str]:
    """Returns the names of wrappers' variables that a new run never takes from another run.

    `graph` is the tf graph of the new run. Slots of the inner optimizer, and counters that belong
    to slots, are not among the returned names: a new run may take these from another run.
    """
    notes: Iterable[StateNote] = graph.get_collection(STATE_COLLECTION)
    derived = graph.get_collection(_DERIVED)
    own = (note.name for note in notes if note.start is not None and note.follows is None)
    return {*derived, *own}
