"""Random small models: a few variables, a few operations on them, one or two losses."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from mtf_gradsync._private.libraries import mtf, tf
from tests.properties.models import small_models, uses
from tests.properties.models.small_models import HIDDEN, IN, OTHER, Model, Tensors

# What variables may be; OTHER is renamed into HIDDEN, which the layout splits.
KINDS = {
    "matrix": [IN, HIDDEN],
    "turned": [HIDDEN, IN],
    "whole": [IN, OTHER],
    "column": [IN],
    "row": [HIDDEN],
    "scalar": [],
}


def _turned(m: Any, x: Any) -> Any:
    return m.transpose(x, mtf.Shape(x.shape.dims[::-1]))


def _moved(m: Any, x: Any) -> Any:
    return m.pad(m.slice(x, 1, 3, "in"), [0, 1], "in")


def _halves(m: Any, x: Any) -> Any:
    first, second = m.split(x, IN, 2)
    return m.concat([second, -first], "in")


UNARY = {
    "-x": lambda m, x: -x,
    "2x": lambda m, x: 2.0 * x,
    "x/3": lambda m, x: x / 3.0,
    "1-x": lambda m, x: 1.0 - x,
    "x+1": lambda m, x: x + 1.0,
    "square": lambda m, x: 0.5 * m.square(x),
    "tanh": lambda m, x: m.tanh(x),
    "sigmoid": lambda m, x: m.sigmoid(x),
    "exp": lambda m, x: m.exp(m.tanh(x)),
    "rsqrt": lambda m, x: m.rsqrt(m.square(x) + 1.0),
    "softplus": lambda m, x: m.softplus(x),
    "mask": lambda m, x: m.where(uses.mask(m, x), x, -x),
    "bfloat16": lambda m, x: m.cast(m.cast(x, tf.bfloat16), tf.float32),
    "float64": lambda m, x: m.cast(m.tanh(m.cast(x, tf.float64)), tf.float32),
    "turned": _turned,
    "centred": lambda m, x: x - m.reduce_mean(x),
}
# These take a tensor with IN.
ALONG_IN = {
    "softmax": lambda m, x: m.softmax(x, IN),
    "sum": lambda m, x: 0.5 * m.reduce_sum(x, reduced_dim=IN),
    "cumsum": lambda m, x: 0.5 * m.cumsum(x, IN),
    "moved": _moved,
    "halves": _halves,
    "stacked": lambda m, x: 0.5 * m.add_n(m.unstack(x, IN)),
}


def _joint(x: Any, y: Any) -> mtf.Shape:
    return mtf.Shape([d for d in (IN, HIDDEN) if d in x.shape.dims or d in y.shape.dims])


BINARY = {
    "+": lambda m, x, y: m.add(x, y, output_shape=_joint(x, y)),
    "-": lambda m, x, y: m.add(x, -y, output_shape=_joint(x, y)),
    "*": lambda m, x, y: m.multiply(x, y, output_shape=_joint(x, y)),
    "over HIDDEN": lambda m, x, y: m.einsum(
        [x, y], mtf.Shape([d for d in _joint(x, y).dims if d != HIDDEN])
    ),
}


class Plan(NamedTuple):
    """A random model.

    Attributes:
      variables: names in KINDS.
      nodes: (operation, number, number): an operation on one or two tensors made before, counted
        from the last, variables first. One along IN does nothing to a tensor without it.
      terms: 1 or 2 losses, among which what no operation uses is dealt out.
      penalties: tensors (counted likewise) whose squares are added to the loss.
      microbatches: as for `Model`.
    """

    variables: tuple[str, ...]
    nodes: tuple[tuple[str, int, int], ...]
    terms: int = 1
    penalties: tuple[int, ...] = ()
    microbatches: int = 1

    @property
    def has_bfloat16(self) -> bool:
        """Whether a narrow dtype is among it."""
        return any(name == "bfloat16" for name, *_ in self.nodes)

    def model(self) -> Model:
        """The model; its loss is scaled down so that some steps of SGD are small."""
        return Model(
            {f"{kind}_{number}": KINDS[kind] for number, kind in enumerate(self.variables)},
            self._loss,
            eps=small_models.BFLOAT16 if self.has_bfloat16 else small_models.FLOAT32,
            microbatches=self.microbatches,
        )

    def _loss(self, m: Any, v: Tensors, d: Tensors) -> Any:
        made = []
        for name, x in v.items():
            if name.startswith("whole"):
                x = m.rename_dimension(x, OTHER.name, HIDDEN.name)
            made.append(x)
        used: set[int] = set()
        for name, first, second in self.nodes:
            last = len(made) - 1
            i, j = last - first % len(made), last - second % len(made)
            used.add(i)
            if name in BINARY:
                used.add(j)
                made.append(BINARY[name](m, made[i], made[j]))
            elif name in ALONG_IN:
                has_in = IN in made[i].shape.dims
                made.append(ALONG_IN[name](m, made[i]) if has_in else -made[i])
            else:
                made.append(UNARY[name](m, made[i]))
        leaves = [x for i, x in enumerate(made) if i not in used]
        losses = []
        for term in range(self.terms):
            parts = leaves[term :: self.terms]
            if parts:
                shape = mtf.Shape([IN, HIDDEN])
                u = m.add_n([m.broadcast(x, shape) for x in parts])
                losses.append(small_models.squared_error(m, small_models.predict(m, u, d), d["y"]))
        for number in self.penalties:
            losses.append(0.01 * m.reduce_sum(m.square(made[-1 - number % len(made)])))
        return 0.3 * m.add_n(losses)


@st.composite
def plans(draw: st.DrawFn, with_microbatches: bool = True) -> Plan:
    """Models of 1 to 3 variables and up to 6 operations."""
    variables = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    operation = st.sampled_from([*UNARY, *ALONG_IN, *BINARY, *BINARY])
    number = st.integers(0, 4)
    nodes = draw(st.lists(st.tuples(operation, number, number), min_size=1, max_size=6))
    return Plan(
        tuple(variables),
        tuple(nodes),
        draw(st.integers(1, 2)),
        tuple(draw(st.lists(number, max_size=1))),
        draw(st.sampled_from([1, 1, 1, 2])) if with_microbatches else 1,
    )
