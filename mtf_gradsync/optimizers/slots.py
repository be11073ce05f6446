"""The state of a step's optimizers: variables of their own, slots, and who owns these."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any, Collection, Iterator, NamedTuple, Sequence

from mtf_gradsync._common import check_flag, counted, is_number, warn_of_unmatched, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import patterns_of
from mtf_gradsync._private.patches import patch
from mtf_gradsync.optimizers.restoring import note_state
from mtf_gradsync.session import root_scope
from mtf_gradsync.step import PartLowering, PlanPart, StepPlan

#: The collection of variables that nothing reads, so that they need not be initialized.
STAND_INS = ("mtf_gradsync stand-ins",)

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_./-]*\Z")


def check_name(name: Any) -> str:
    """Returns a name; raises ValueError if TensorFlow takes none such for a variable."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"name must be of letters, digits and any of . _ / -, got {name!r}.")
    return name


def check_mesh(mesh: Any) -> None:
    """Raises TypeError for anything but an mtf mesh."""
    if not isinstance(mesh, mtf.Mesh):
        raise TypeError(f"mesh must be an mtf.Mesh, such as that of a variable, got {mesh!r}.")


class UncheckpointedVariable(mtf.Variable):
    """A mesh variable without a master: zeros at the start of every session, in no checkpoint.

    Mesh-TF keeps a master copy of each variable on the host; a local accumulator's is as large as
    all shards' slices together. On a mesh of one processor the master is the only copy, and is
    kept as a local variable.
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
            unstacked(dtype),
            tf.zeros_initializer(),
            False,
            collections=[STAND_INS],
        )
        self._outputs = [mtf.Tensor(self, shape, dtype)]
        self._stand_in = self._master

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
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
        """Returns zeros to fill the slices with; on one processor the variable itself."""
        if self._alone:
            return self._master
        with tf.device(self._stand_in.device):
            return tf.zeros(self._whole_shape, self.master_dtype)

    def assign_to_master(self, val: tf.Tensor) -> tf.Operation:
        """Does nothing: the slices are the only copy."""
        del val
        return tf.no_op()


def unstacked(dtype: tf.DType, activation_dtype: tf.DType | None = None) -> mtf.VariableDType:
    """Returns dtypes with which Mesh-TF's autostack does not stack a variable.

    Stacked variables need masters; autostack (0.1.21) compares the attributes of dtypes. Without
    `activation_dtype`, a variable's value has the dtype of its master and slices.
    """
    return unstacked_as(mtf.VariableDType(dtype, dtype, activation_dtype))


def unstacked_as(dtype: mtf.VariableDType) -> mtf.VariableDType:
    """Returns the same dtypes, different from all others for autostack; see `unstacked`."""
    result = copy.copy(dtype)
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
    """Finds or makes a scalar of a wrapper's state, which is not trained.

    Args:
      mesh: the mesh.
      name: its full name, the same in any variable scope; by it checkpoints know the scalar.
      dtype: its dtype.
      checkpointed: whether savers of global variables write it; if not, it is zero again in every
        new session.
      stacked: whether Mesh-TF's autostack may put it into one variable with others.
      start: its first value; or the name of a variable in older checkpoints that has its value.

    Raises:
      TypeError: mesh is no mesh, dtype no dtype of numbers, or start neither a number nor a name.
      ValueError: name cannot be a variable's, the graph has another variable of that name, dtype
        does not hold start, or without checkpoints start is not 0.
    """
    check_mesh(mesh)
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
    return named_state(mesh, name, mtf.Shape([]), dtype, checkpointed, stacked, start=start)


def named_state(
    mesh: mtf.Mesh,
    name: str,
    shape: mtf.Shape,
    dtype: tf.DType = tf.int32,
    checkpointed: bool = True,
    stacked: bool = False,
    start: float | str = 0,
    in_scope: bool = False,
    **note: Any,
) -> mtf.Variable:
    """Finds or makes a variable of a wrapper's state, which is not trained.

    Args:
      mesh: the mesh.
      name: its full name, so that code in any variable scope finds the same variable.
      shape: its shape.
      dtype: its dtype, of master, slices and activations.
      checkpointed: whether savers of global variables write it. If not, it is zero again in
        every new session and has no master copy on the host.
      stacked: whether Mesh-TF's autostack may put it into one variable with others.
      start: its first value if that is a number, else zero; and its value after a checkpoint that
        does not have it, see `StateNote`.
      in_scope: whether `name` is a name in the current variable scope instead.
      **note: other fields of `StateNote`.
    """
    with contextlib.nullcontext() if in_scope else root_scope():
        if not checkpointed:
            return UncheckpointedVariable(mesh, name, shape, dtype)
        is_zero = isinstance(start, str) or not start
        result = mtf.get_variable(
            mesh,
            name,
            shape,
            dtype if stacked else unstacked(dtype),
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


class SlotBook:
    """Records slots of optimizers without `get_slot`, such as Mesh-TF's.

    A slot is a variable named after the one that it belongs to: "w/adam_m" and "w_slot_v" are the
    slots "adam_m" and "slot_v" of "w".
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[mtf.Variable, str], mtf.Variable] = {}
        self._variables: list[mtf.Variable] = []

    def record(
        self, created: Sequence[mtf.Variable], variables: Sequence[mtf.Variable], scope: str = ""
    ) -> None:
        """Adds the variables that an update of `variables` created in a variable scope."""
        owners = {v.name: v for v in variables}
        for variable in created:
            if variable in self._variables:
                continue
            self._variables.append(variable)
            name = _without_scope(variable.name, scope)
            owner = owner_of(name, owners)
            if owner is not None:
                slot = name[len(owner) :].lstrip("/_")
                self._slots[(owners[owner], slot)] = variable

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Forgets what was recorded when the block raises."""
        before = dict(self._slots), list(self._variables)
        try:
            yield
        except BaseException:
            self._slots, self._variables = before
            raise

    def get(self, variable: mtf.Variable, name: str) -> mtf.Variable | None:
        """The slot of a variable, or None."""
        return self._slots.get((variable, name))

    def names(self) -> list[str]:
        """Names of all slots, sorted."""
        return sorted({name for _, name in self._slots})

    def variables(self) -> list[mtf.Variable]:
        """Every variable that was recorded, slot or not, in the order of creation."""
        return list(self._variables)


_OF_ONE = (
    "Call apply_grads of each in a tf.variable_scope of its own, or use one optimizer for both"
)


class _Keeper(NamedTuple):
    """An optimizer that keeps a slot, and whether no wrapper is around it."""

    optimizer: Any
    is_bare: bool


class SlotOwners(PlanPart):
    """Which optimizer or wrapper keeps each slot of a graph.

    Slots are found by their names, so that two optimizers with one variable would share them.
    """

    def __init__(self) -> None:
        self._keepers: dict[mtf.Variable, _Keeper] = {}

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """See `PlanPart.begin`."""
        del lowering
        return PartLowering()

    def check(
        self,
        keeper: Any,
        slots: Sequence[mtf.Variable],
        variables: Sequence[mtf.Variable],
        cure: str = _OF_ONE,
        is_bare: bool = False,
    ) -> None:
        """Raises ValueError if another keeper has one of the slots of `variables` already.

        Where neither has a wrapper of this package around it, that is a warning.

        Args:
          keeper: the optimizer or wrapper that writes them.
          slots: the variables that it writes besides `variables`.
          variables: the variables that it updates.
          cure: for the error, what to do.
          is_bare: whether no wrapper is around the keeper.
        """
        owners = {v.name for v in variables}
        scope = tf.get_variable_scope().name
        for slot in slots:
            owner = owner_of(_without_scope(slot.name, scope), owners)
            other = self._keepers.get(slot)
            if owner is None or other is None or other.optimizer is keeper:
                continue
            text = (
                f"Two optimizers of one graph update {owner!r} and would share its slot "
                f"{slot.name!r}, which is found by its name, so that each would train on the "
                f"other's values. {cure}."
            )
            if not (is_bare and other.is_bare):
                raise ValueError(text)
            warn_once("slots of two optimizers without wrappers", "%s", text)
        self._keepers = {**dict.fromkeys(slots, _Keeper(keeper, is_bare)), **self._keepers}


def check_bare_update(
    optimizer: Any, updates: Sequence[mtf.Operation], variables: Sequence[mtf.Variable]
) -> None:
    """Makes an optimizer the keeper of the slots that its updates write, unless a wrapper calls it.

    Raises ValueError as `SlotOwners.check` does.
    """
    plan = StepPlan.of(variables[0].graph) if updates else None
    if plan is not None and not plan.is_held:  # or the wrapper checks itself
        written = [v for op in updates if isinstance(op, mtf.Assign) for v in op.variables]
        plan.part(SlotOwners).check(optimizer, written, variables, is_bare=True)


def tell_of_names_and_dtypes(optimizer: Any, variables: Sequence[mtf.Variable]) -> None:
    """Warns once of an optimizer's patterns that are in no name, and of variables in few bits."""
    names = {v.name for v in (*variables, *variables[0].graph.trainable_variables)}
    for argument, patterns in patterns_of(optimizer).items():
        what = f"{type(optimizer).__name__}: {argument}"
        if isinstance(patterns, str):
            text = (
                "%s=%r is no list, so that each of its letters is looked for in names: give [%r]."
            )
            warn_once(f"letters {what} {patterns}", text, what, patterns, patterns)
        else:
            warn_of_unmatched(what, patterns, names)
    narrow = [v for v in variables if v.slice_dtype.is_floating and v.slice_dtype.size < 4]
    if narrow:
        dtype = narrow[0].slice_dtype
        warn_once(
            "narrow variables",
            "Stored in %s, so that updates of less than 1/%d of a value are lost: %s. Store "
            "variables in float32 and compute in %s: mtf.VariableDType(tf.float32, tf.float32, "
            "tf.%s), in gin utils.get_variable_dtype.slice_dtype = 'float32'.",
            dtype.name,
            2 ** (9 if dtype == tf.bfloat16 else 12),
            counted([v.name for v in narrow if v.slice_dtype == dtype], "variable"),
            dtype.name,
            dtype.name,
        )


def check_bare_optimizers() -> None:
    """Makes Mesh-TensorFlow's optimizers without a wrapper keepers of their slots, too."""

    def check_and_apply(apply: Any) -> Any:
        def apply_grads(
            self: Any, grads: Any, variables: Any, *args: Any, **kwargs: Any
        ) -> list[mtf.Operation]:
            updates = apply(self, grads, variables, *args, **kwargs)
            if updates:
                tell_of_names_and_dtypes(self, variables)
            check_bare_update(self, updates, variables)
            return updates

        return apply_grads

    patch(mtf.optimize.Optimizer, "apply_grads", check_and_apply)


def _without_scope(name: str, scope: str) -> str:
    return name[len(scope) + 1 :] if scope and name.startswith(scope + "/") else name


def owner_of(name: str, owners: Collection[str]) -> str | None:
    """Returns the longest of the owners' names that `name` extends by a "/" or "_"."""
    for end in range(len(name) - 1, 0, -1):
        if name[end] in "/_" and name[:end] in owners:
            return name[:end]
    return None
