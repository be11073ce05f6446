"""MeshOptimizer: makes an optimizer of tf.compat.v1 update mesh variables."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import gin
import numpy as np

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import hyperparameters, root_scope
from mtf_gradsync.compat_v1.opt_argument import NOT_GIVEN, V1OptimizerLike, given_optimizer
from mtf_gradsync.gradients.arguments import check_grads_and_variables
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.gradients.rounding import (
    COUNT,
    NEAREST,
    STOCHASTIC,
    assign,
    check_not_float16,
    check_rounding,
    make_update_count,
    rounds_by_chance,
    subtract,
    warn_if_nothing_is_rounded,
)
from mtf_gradsync.step.plan import StepPlan
from mtf_gradsync.step.writes import gated_update


class _MeshState(NamedTuple):
    """The variables of an optimizer in one mtf graph.

    `slots` has the slot for each pair of an updated variable and the slot's name (`Slot.key`).
    `powers` has, by name, the scalar variables that each update multiplies by a number
    (`Rule.powers`).
    """

    slots: dict[tuple[mtf.Variable, str], mtf.Variable]
    powers: dict[str, mtf.Variable]


@gin.configurable(module="mtf_gradsync")
class MeshOptimizer(mtf.optimize.Optimizer):
    """An optimizer of mesh variables that computes as one of `tf.compat.v1.train`.

    `MeshOptimizer` takes a GradientDescentOptimizer, MomentumOptimizer, AdagradOptimizer,
    AdamOptimizer, RMSPropOptimizer, AdadeltaOptimizer or FtrlOptimizer. The arguments of such an
    optimizer may be numbers, tf or mtf scalars, or functions without arguments that return numbers
    or scalars. Adam's betas and the initial values of slots cannot be mtf scalars, because
    variables begin with them. Updates are equal to those of TensorFlow for dense gradients, up to
    float rounding. Updates of variables with masters in a dtype narrower than float32 are computed
    in float32.

    Slots are laid out like their variables and have TensorFlow's names (`w/Adam`, `w/Adam_1`,
    `beta1_power`), in the scope in which gradients are applied. So models with a mesh can read
    checkpoints of models without a mesh, and the reverse. If two optimizers of the same class and
    name update the same variables, the second gets the next free names, as in TensorFlow.

    With rounding="stochastic", a variable that is rounded, or that has rounded slots, gets one more
    slot, `w/rounding_t`: the int32 number of updates of the variable.

    Attributes:
      opt: the optimizer of TensorFlow.
      rounding: how new values of bfloat16 variables and slots are rounded.

    Examples:
      >>> opt = gs.MeshOptimizer(tf.train.AdamOptimizer(0.001))
      >>> print(gs.describe(gs.CrossShardOptimizer(opt)))
      every step  reduce over the replica axes: fused  (CrossShardOptimizer)
                  update by Adam
    """

    def __init__(
        self, opt: V1OptimizerLike, learning_rate: Any = NOT_GIVEN, rounding: str = NEAREST
    ):
        """Wraps an optimizer.

        Args:
          opt: an optimizer of one of the seven classes that `MeshOptimizer` takes; or one of these
            classes, or a factory of such an optimizer. A class or factory is called with
            `learning_rate=learning_rate`.
          learning_rate: the learning rate that opt is called with. Give it only if opt is a class
            or factory.
          rounding: how new values of variables and slots in bfloat16 are rounded: to "nearest", or
            "stochastic". Stochastic rounding goes up or down by chance and does not change the
            mean, so that small changes are not lost.

        Raises:
          TypeError: opt is no optimizer, class or factory that `MeshOptimizer` takes; the error
            lists the classes.
          ValueError: learning_rate is missing, or opt has a learning rate already, or rounding is
            neither "nearest" nor "stochastic".
        """
        self.rounding = check_rounding(rounding)
        opt = given_optimizer(opt, learning_rate, "MeshOptimizer")
        if type(opt) not in RULES:
            raise TypeError(
                "MeshOptimizer knows how these optimizers of tf.compat.v1.train update: "
                f"{', '.join(sorted(kind.__name__ for kind in RULES))}; got {opt!r}. Take one of "
                "them, or an optimizer of Mesh-TensorFlow (mtf.optimize)."
            )
        self.opt: tf.train.Optimizer = opt
        self._last: _MeshState | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy of the optimizer gets: its settings, but no variables of a graph."""
        return {**self.__dict__, "_last": None}

    def apply_grads(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Updates variables by the rule of the optimizer of TensorFlow.

        Args:
          grads: a gradient for each variable, or None for a variable that is not updated.
          variables: mesh variables.

        Returns:
          A flat list of mtf operations; empty if every gradient is None.

        Raises:
          TypeError: a gradient or variable has the wrong type.
          ValueError: lengths differ, a shape differs from its variable's, or an mtf scalar was
            given as a variable's initial value.
        """
        grads, variables = check_grads_and_variables(grads, variables, same_shapes=True)
        pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
        if not pairs:
            return []
        rule = rule_of(self.opt)
        self._check_initial_values(rule)
        for _, variable in pairs:
            self.check_variable(variable)
        if self.rounding == STOCHASTIC:
            dtypes = {v.slice_dtype for _, v in pairs}
            if rule.slots:  # which have the dtype of the variable's master
                dtypes |= {v.master_dtype for _, v in pairs}
            warn_if_nothing_is_rounded("MeshOptimizer", dtypes)
        graph = pairs[0][1].graph

        def make() -> list[mtf.Operation]:
            return graph.combine_assignments(self._operations(rule, pairs))

        with StepPlan.of(graph).undone_on_error():
            return gated_update(make, [grad for grad, _ in pairs])

    def check_variable(self, var: mtf.Variable) -> None:
        """Raises ValueError for a variable that the optimizer cannot update.

        The error is raised if a slot or a power would begin with an mtf tensor, or if `rounding` is
        "stochastic" and the variable `var` is stored or read in float16.
        """
        # Hyperparameters that are functions are called once a step, in `apply_grads`.
        self._check_initial_values(rule_of(self.opt, call=False))
        if self.rounding == STOCHASTIC:
            check_not_float16("MeshOptimizer", var)

    def _check_initial_values(self, rule: Rule) -> None:
        for name, value in (*rule.powers, *((slot.key, slot.initial) for slot in rule.slots)):
            if isinstance(value, (mtf.Tensor, mtf.Variable)):
                raise ValueError(
                    f"{name!r} of {self.opt.get_name()} begins with {value!r}, but what a variable "
                    "begins with has to be a number or a tf tensor."
                )

    def apply_grad(self, grad: mtf.Tensor | None, var: mtf.Variable) -> list[mtf.Operation]:
        """Updates the variable `var` by the gradient `grad`, which may be None.

        Returns a list of mtf operations.
        """
        return self.apply_grads([grad], [var])

    def get_slot(self, var: mtf.Variable, name: str) -> mtf.Variable | None:
        """Returns a slot of a variable, or None.

        Args:
          var: a variable that was updated.
          name: the slot's name in TensorFlow's ``get_slot`` ("m", "v", "momentum", "accumulator",
            "rms", "mg", "accum", "accum_update", "linear").

        Returns:
          An `mtf.Variable` of the graph in which gradients were applied last.
        """
        return self._last and self._last.slots.get((var, name))

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots, sorted."""
        return sorted(slot.key for slot in rule_of(self.opt, call=False).slots)

    def variables(self) -> list[mtf.Variable]:
        """Returns the optimizer's own variables in the graph of its last update."""
        return [*self._last.slots.values(), *self._last.powers.values()] if self._last else []

    def _operations(
        self, rule: Rule, pairs: Sequence[tuple[mtf.Tensor, mtf.Variable]]
    ) -> list[mtf.Operation]:
        mesh = pairs[0][1].mesh
        # A name for each object, because two optimizers of the same name may train one graph.
        name = f"{type(self).__name__} {id(self)}"
        state = self._last = StepPlan.of(mesh.graph).state(self, name, lambda: _MeshState({}, {}))
        # Variables that an error has taken out of their graph again are forgotten.
        listed = mesh.graph.name_to_variable
        made: list[dict[Any, mtf.Variable]] = [state.slots, state.powers]
        for held in made:
            for key in [k for k, v in held.items() if listed.get(v.name) is not v]:
                del held[key]
        for name, value in rule.powers:
            if name not in state.powers:
                state.powers[name] = _make_scalar_variable(mesh, name, value)
        # Scalars are made on the mesh of the powers, and moved to the mesh of each variable.
        mesh = next((power.mesh for power in state.powers.values()), mesh)
        scalars = {name: _as_mesh_scalar(mesh, value) for name, value in rule.scalars.items()}
        operations: list[mtf.Operation] = []
        if rule.with_powers is not None:
            powers = {n: mtf.cast(p.value, tf.float32) for n, p in state.powers.items()}
            scalars = dict(rule.with_powers(scalars, powers))
            for name, base in rule.powers:
                power = state.powers[name]
                base = _as_mesh_scalar(mesh, base, power.value.dtype)
                operations.append(mtf.assign(power, power.value * base))
        on = {m: _on_mesh(scalars, m) for m in dict.fromkeys(v.mesh for _, v in pairs)}
        for grad, variable in pairs:
            slots = [self._slot(state, slot, variable) for slot in rule.slots]
            update_count = None
            if rounds_by_chance(self.rounding, variable, *slots):
                count = self._count(state, variable)
                update_count = count.value
                operations.append(mtf.assign(count, update_count + 1))
            operations += _update(rule, grad, variable, slots, on[variable.mesh], update_count)
        for power in state.powers.values():
            power.begins_with = [s.name for (_, key), s in state.slots.items() if key != COUNT]
        return operations

    def _slot(self, state: _MeshState, slot: Slot, variable: mtf.Variable) -> mtf.Variable:
        key = variable, slot.key
        if key not in state.slots:
            is_drawn = self.rounding == STOCHASTIC and variable.master_dtype == tf.bfloat16
            if variable.master_dtype.size < 4 and not is_drawn:
                warn_once(
                    f"narrow slots {type(self.opt).__name__}",
                    "MeshOptimizer(%s): the slots of %s are %s, the dtype of the variable's "
                    "master, as in TensorFlow. A mean that decays slowly stands still in this "
                    "dtype (0.999 x is rounded to x). Give variables float32 masters, use "
                    "gs.AdamWOptimizer, whose slots are float32, or, for bfloat16, give "
                    "rounding='stochastic'.",
                    type(self.opt).__name__,
                    variable.name,
                    variable.master_dtype.name,
                )
            free = _free_slot_name(variable, slot.name)
            state.slots[key] = _make_state_variable(
                variable.mesh, free, variable.shape, variable.master_dtype, slot.initial
            )
        return state.slots[key]

    def _count(self, state: _MeshState, variable: mtf.Variable) -> mtf.Variable:
        key = variable, COUNT
        if key not in state.slots:
            state.slots[key] = make_update_count(variable.mesh, _free_slot_name(variable, COUNT))
        return state.slots[key]


def _as_mesh_scalar(mesh: mtf.Mesh, value: Any, dtype: tf.DType = tf.float32) -> Any:
    """Returns a hyperparameter as an mtf scalar on `mesh`, of the dtype `dtype`.

    `value` is a tf or mtf tensor or variable. A Python number is returned as it is.
    """
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, mtf.Variable):
        value = value.value
    if not isinstance(value, mtf.Tensor):
        value = mtf.import_tf_tensor(mesh, tf.convert_to_tensor(value), mtf.Shape([]))
    value = on_mesh(value, mesh)
    return value if value.dtype == dtype else mtf.cast(value, dtype)


def _on_mesh(scalars: dict[str, Any], mesh: mtf.Mesh) -> dict[str, Any]:
    return {k: on_mesh(x, mesh) if isinstance(x, mtf.Tensor) else x for k, x in scalars.items()}


def _free_slot_name(variable: mtf.Variable, name: str) -> str:
    scope, taken = tf.get_variable_scope().name, variable.graph.name_to_variable
    return _first_free(
        f"{variable.name}/{name}", lambda n: (f"{scope}/{n}" if scope else n) in taken
    )


def _first_free(name: str, is_taken: Callable[[str], bool]) -> str:
    """Returns the first of name, name_1, name_2, ... for which `is_taken` returns False.

    TensorFlow chooses the names of variables in the same way.
    """
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
    return next(n for n in names if not is_taken(n))


def _make_scalar_variable(mesh: mtf.Mesh, name: str, value: Any) -> mtf.Variable:
    """Returns a new scalar mesh variable that begins with `value`.

    The variable's name is `name`, or the next free name, in the current name scope.
    """
    graph = tf.get_default_graph()
    scope = graph.get_name_scope()
    reuses = bool(tf.get_variable_scope().reuse)

    def is_taken(full: str) -> bool:
        if full in mesh.graph.name_to_variable:
            return True
        try:
            graph.get_operation_by_name(full)
        except KeyError:
            return False
        return not reuses

    free = _first_free(f"{scope}/{name}" if scope else name, is_taken)
    dtype = tf.as_dtype(getattr(value, "dtype", tf.float32)).base_dtype
    with root_scope():
        return _make_state_variable(mesh, free, mtf.Shape([]), dtype, value)


def _make_state_variable(
    mesh: mtf.Mesh, name: str, shape: mtf.Shape, dtype: tf.DType, value: Any
) -> mtf.Variable:
    """Returns a new variable on `mesh` that is not trained; all of its elements begin with `value`.

    `name`, `shape` and `dtype` are the variable's. `value` is a number or a tf scalar.
    """
    if isinstance(value, tf.Tensor):
        # A TPU program is initialized outside of it, where the tensor may not exist.
        known = tf.get_static_value(value)
        value = value if known is None else known

    def initial(shape: Any, dtype: tf.DType, **unused: Any) -> tf.Tensor:
        return tf.fill(shape, tf.cast(value, dtype))

    return mtf.get_variable(
        mesh, name, shape, dtype, initializer=initial, trainable=False
    ).operation


def _update(
    rule: Rule,
    grad: mtf.Tensor,
    variable: mtf.Variable,
    slots: Sequence[mtf.Variable],
    scalars: dict[str, Any],
    update_count: mtf.Tensor | None,
) -> list[mtf.Operation]:
    """Returns the assignments of an update to one variable and its slots.

    Args:
      rule: the update rule.
      grad: the gradient.
      variable: the variable.
      slots: the variable's slots, in the order of `rule.slots`.
      scalars: the hyperparameters by name, numbers or mtf scalars.
      update_count: the number of earlier updates of the variable, an mtf scalar, from which
        stochastic rounding makes its random numbers; None rounds to nearest.
    """
    dtype = variable.master_dtype if variable.master_dtype.size >= 4 else tf.float32
    tensors = {name: value for name, value in scalars.items() if isinstance(value, mtf.Tensor)}
    inputs = [grad, *(slot.value for slot in slots), *tensors.values()]
    if rule.reads_variable:
        inputs.append(variable.value)

    def step(*slices: tf.Tensor) -> tuple[tf.Tensor, ...]:
        grad, *others = (tf.cast(x, dtype) for x in slices)
        kept, rest = others[: len(slots)], others[len(slots) :]
        by = {**scalars, **dict(zip(tensors, rest))}
        first, new = rule.step(grad, rest[-1] if rule.reads_variable else None, kept, by)
        return (first, *new) if new else first  # Mesh-TF takes no tuple of one

    number = 1 + len(slots)
    results = mtf.slicewise(
        step,
        inputs,
        output_shape=[variable.shape] * number,
        output_dtype=[dtype] * number,
        splittable_dims=variable.shape.dims,
        name="update",
    )
    write = assign if rule.replaces else subtract
    return [
        write(variable, results[0], update_count),
        *(assign(slot, new, update_count) for slot, new in zip(slots, results[1:])),
    ]


# The update rules of the classes, as functions of single elements.


# Hyperparameters and the like by name.
Scalars = Mapping[str, Any]
Step = Callable[[tf.Tensor, Any, Sequence[tf.Tensor], Scalars], "tuple[tf.Tensor, list[tf.Tensor]]"]


class Slot(NamedTuple):
    """A variable that an optimizer keeps for each variable that it updates.

    Attributes:
      key: the slot's name in ``get_slot``.
      name: the last part of the name of the slot's variable. If that name is taken, a number is
        added.
      initial: the number that the slot begins with.
    """

    key: str
    name: str
    initial: Any = 0.0


class Rule(NamedTuple):
    """The update rule of an optimizer.

    Attributes:
      step: a function that computes an update element by element. It is called as `step(gradient,
        variable, slots, scalars)`. The first three are tf tensors of one shape, a core's slices.
        The variable is None if `reads_variable` is false, and slots are in the order of `slots`.
        `step` returns the change, which the caller subtracts from the variable, and a list of new
        slots.
      slots: the slots of each variable, in the order in which TensorFlow makes them.
      scalars: the hyperparameters that `step` is called with, numbers or scalar tensors by name.
      powers: pairs (name, base) of scalar variables that each update multiplies by base: Adam's
        powers of beta1 and beta2.
      with_powers: if there are powers, a function that returns the scalars for `step`. The function
        is called with `scalars` and with the powers before the update, float32 mtf scalars by name.
      reads_variable: whether `step` needs the variable.
      replaces: whether `step` returns the new value of the variable in place of the change.
    """

    step: Step
    slots: tuple[Slot, ...]
    scalars: dict[str, Any]
    powers: tuple[tuple[str, Any], ...] = ()
    with_powers: Callable[[Scalars, Scalars], Scalars] | None = None
    reads_variable: bool = False
    replaces: bool = False


def rule_of(optimizer: tf.train.Optimizer, call: bool = True) -> Rule:
    """Returns the update rule of an optimizer whose class is in `RULES`.

    If `call` is True, hyperparameters that are functions are called, and the rule has their
    results. If `call` is False, the rule has the functions themselves, which suffices for a caller
    that only reads the rule's slots.
    """
    # TensorFlow makes float32 of them before it computes, 1 - beta for example.
    given = {
        k: float(np.float32(v)) if isinstance(v, (float, np.floating)) else v
        for k, v in hyperparameters(optimizer, call).items()
    }
    return RULES[type(optimizer)](given, optimizer.get_name())


def _gradient_descent(given: dict[str, Any], name: str) -> Rule:
    del name

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        return grad * by["learning_rate"], []

    return Rule(step, (), given)


def _momentum(given: dict[str, Any], name: str) -> Rule:
    use_nesterov = given.pop("use_nesterov")

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        velocity = slots[0] * by["momentum"] + grad
        rate = by["learning_rate"]
        if use_nesterov:
            return grad * rate + velocity * by["momentum"] * rate, [velocity]
        return velocity * rate, [velocity]

    return Rule(step, (Slot("momentum", name),), given)


def _adagrad(given: dict[str, Any], name: str) -> Rule:
    initial = given.pop("initial_accumulator_value")

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        squares = slots[0] + tf.square(grad)
        return grad * by["learning_rate"] * tf.math.rsqrt(squares), [squares]

    return Rule(step, (Slot("accumulator", name, initial),), given)


def _adam(given: dict[str, Any], name: str) -> Rule:
    def rate(by: Scalars, powers: Scalars) -> Scalars:
        unbiased = mtf.sqrt(1.0 - powers["beta2_power"]) / (1.0 - powers["beta1_power"])
        return {**by, "learning_rate": unbiased * by["learning_rate"]}

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        mean = slots[0] + (grad - slots[0]) * (1.0 - by["beta1"])
        squares = slots[1] + (tf.square(grad) - slots[1]) * (1.0 - by["beta2"])
        return mean * by["learning_rate"] / (tf.sqrt(squares) + by["epsilon"]), [mean, squares]

    powers = (("beta1_power", given["beta1"]), ("beta2_power", given["beta2"]))
    return Rule(step, (Slot("m", name), Slot("v", name)), given, powers, rate)


def _rms_prop(given: dict[str, Any], name: str) -> Rule:
    centered = given.pop("centered")

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        *means, velocity = slots
        means[0] += (tf.square(grad) - means[0]) * (1.0 - by["decay"])
        variance = means[0]
        if centered:
            means[1] += (grad - means[1]) * (1.0 - by["decay"])
            variance -= tf.square(means[1])
        scaled = grad * by["learning_rate"] * tf.math.rsqrt(variance + by["epsilon"])
        velocity = velocity * by["momentum"] + scaled
        return velocity, [*means, velocity]

    mean = (Slot("mg", name),) if centered else ()
    return Rule(step, (Slot("rms", name, 1.0), *mean, Slot("momentum", name)), given)


def _adadelta(given: dict[str, Any], name: str) -> Rule:
    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        rho, epsilon = by["rho"], by["epsilon"]
        squares = slots[0] * rho + tf.square(grad) * (1.0 - rho)
        update = tf.sqrt(slots[1] + epsilon) * tf.math.rsqrt(squares + epsilon) * grad
        updates = slots[1] * rho + tf.square(update) * (1.0 - rho)
        return update * by["learning_rate"], [squares, updates]

    return Rule(step, (Slot("accum", name), Slot("accum_update", name)), given)


def _ftrl(given: dict[str, Any], name: str) -> Rule:
    initial = given.pop("initial_accumulator_value")
    slots = (
        Slot("accum", given.pop("accum_name") or name, initial),
        Slot("linear", given.pop("linear_name") or name),
    )

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        rate, power = by["learning_rate"], -by["learning_rate_power"]
        l1 = by["l1_regularization_strength"]
        squares = slots[0] + tf.square(grad)
        learned = tf.pow(squares, power) - tf.pow(slots[0], power)
        shrunk = grad + 2.0 * by["l2_shrinkage_regularization_strength"] * variable
        linear = slots[1] + shrunk - learned / rate * variable
        l2 = by["l2_regularization_strength"] + by["beta"] / (2.0 * rate)
        quadratic = tf.pow(squares, power) / rate + 2.0 * l2
        value = (tf.sign(linear) * l1 - linear) / quadratic
        return tf.where(tf.abs(linear) > l1, value, tf.zeros_like(value)), [squares, linear]

    return Rule(step, slots, given, reads_variable=True, replaces=True)


RULES: dict[type, Callable[[dict[str, Any], str], Rule]] = {
    tf.train.GradientDescentOptimizer: _gradient_descent,
    tf.train.MomentumOptimizer: _momentum,
    tf.train.AdagradOptimizer: _adagrad,
    tf.train.AdamOptimizer: _adam,
    tf.train.RMSPropOptimizer: _rms_prop,
    tf.train.AdadeltaOptimizer: _adadelta,
    tf.train.FtrlOptimizer: _ftrl,
}
