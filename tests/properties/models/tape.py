"""The part of Mesh-TF's interface that models are written in, in numpy float64, with gradients.

A model that is a function of a module `m` runs on a mesh with `m = mtf` and here with `m = tape`.
Tensors have named dimensions as Mesh-TF's have; every operation that is differentiated is one of
`_cwise`, `_einsum`, `_add`, `_reshape`, `slice` and `pad`, or made of these. Casts round nothing.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf

Dimension = mtf.Dimension
Shape = mtf.Shape


class Tensor:
    """A value, and how the gradient by it gives gradients by what it was made from.

    Attributes:
      value: float64 array.
      shape: `mtf.Shape` of it.
      parents: pairs of a tensor and the function from this tensor's gradient to that one's.
    """

    mesh = None
    dtype = np.float64

    def __init__(self, value: Any, shape: Any, parents: Sequence[Any] = ()):
        self.value = np.asarray(value, np.float64)
        self.shape = mtf.convert_to_shape(shape)
        self.parents = list(parents)
        assert list(self.value.shape) == self.shape.to_integer_list

    def __add__(self, other):
        return add(self, other)

    def __sub__(self, other):
        return add(self, -other)

    def __rsub__(self, other):
        return add(-self, other)

    def __mul__(self, other):
        return multiply(self, other)

    def __truediv__(self, other):
        return multiply(self, reciprocal(other) if isinstance(other, Tensor) else 1.0 / other)

    def __rtruediv__(self, other):
        return reciprocal(self) * other

    def __neg__(self):
        return negative(self)

    __radd__, __rmul__ = __add__, __mul__


def gradients(loss: Tensor, xs: Sequence[Tensor]) -> list[np.ndarray]:
    """The gradients of a scalar by tensors, zero where there is no way from one to the other."""
    order: list[Tensor] = []
    seen: set[int] = set()

    def visit(tensor: Tensor) -> None:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            for parent, _ in tensor.parents:
                visit(parent)
            order.append(tensor)

    visit(loss)
    found = {id(loss): np.float64(1.0)}
    for tensor in reversed(order):
        dy = found.get(id(tensor))
        for parent, back in tensor.parents if dy is not None else ():
            found[id(parent)] = found.get(id(parent), 0.0) + back(dy)
    return [found.get(id(x), np.zeros_like(x.value)) for x in xs]


# What everything else is made of.


def _contract(values: Sequence[Any], shapes: Sequence[Shape], out: Shape) -> np.ndarray:
    """The sum of the products of named arrays; dimensions that only `out` has are repeated."""
    dims = list({d: None for shape in shapes for d in shape.dims})
    index = {d: i for i, d in enumerate(dims)}
    kept = [d for d in out.dims if d in index]
    operands: list[Any] = []
    for value, shape in zip(values, shapes):
        operands += [value, [index[d] for d in shape.dims]]
    made = np.einsum(*operands, [index[d] for d in kept])
    wide = [d.size if d in index else 1 for d in out.dims]
    return np.broadcast_to(np.reshape(made, wide), out.to_integer_list)


def _einsum(xs: Sequence[Tensor], out: Shape) -> Tensor:
    values, shapes = [x.value for x in xs], [x.shape for x in xs]

    def back(i: int) -> Callable[[Any], Any]:
        others = [j for j in range(len(xs)) if j != i]
        shapes_of = [out, *(shapes[j] for j in others)]
        return lambda dy: _contract([dy, *(values[j] for j in others)], shapes_of, shapes[i])

    return Tensor(_contract(values, shapes, out), out, [(x, back(i)) for i, x in enumerate(xs)])


def _add(x: Tensor, y: Tensor, out: Shape) -> Tensor:
    x, y = broadcast(x, out), broadcast(y, out)
    return Tensor(x.value + y.value, out, [(x, lambda dy: dy), (y, lambda dy: dy)])


def _cwise(x: Tensor, value: Any, slope: Any) -> Tensor:
    return Tensor(value, x.shape, [(x, lambda dy: dy * slope)])


def reshape(x: Tensor, new_shape: Any, name: str = "") -> Tensor:
    """As `mtf.reshape`; renames dimensions too."""
    new_shape, old = mtf.convert_to_shape(new_shape), x.value.shape
    made = np.reshape(x.value, new_shape.to_integer_list)
    return Tensor(made, new_shape, [(x, lambda dy: np.reshape(dy, old))])


def _part(x: Tensor, dim_name: str, begin: int, size: int) -> tuple[Any, Shape]:
    axis = x.shape.dimension_names.index(dim_name)
    index = tuple(
        np.s_[begin : begin + size] if i == axis else np.s_[:] for i in range(x.shape.ndims)
    )
    return index, x.shape.resize_dimension(dim_name, size)


def slice(x: Tensor, begin: int, size: int, slice_dim_name: str) -> Tensor:
    """As `mtf.slice`."""
    index, shape = _part(x, slice_dim_name, begin, size)

    def back(dy: Any) -> Any:
        dx = np.zeros_like(x.value)
        dx[index] = dy
        return dx

    return Tensor(x.value[index], shape, [(x, back)])


def pad(x: Tensor, paddings: Sequence[int], dim_name: str) -> Tensor:
    """As `mtf.pad`."""
    axis = x.shape.dimension_names.index(dim_name)
    size = x.value.shape[axis]
    widths = [list(paddings) if i == axis else [0, 0] for i in range(x.shape.ndims)]
    made = np.pad(x.value, widths)
    shape = x.shape.resize_dimension(dim_name, made.shape[axis])
    index, _ = _part(Tensor(made, shape), dim_name, paddings[0], size)
    return Tensor(made, shape, [(x, lambda dy: dy[index])])


# Functions of each entry.


def _sigmoid(v: Any) -> Any:
    return 1 / (1 + np.exp(-v))


class _Function(NamedTuple):
    value: Callable[[Any], Any]
    slope: Callable[[Any], Any]

    def __call__(self, x: Tensor) -> Tensor:
        return _cwise(x, self.value(x.value), self.slope(x.value))


negative = _Function(np.negative, lambda v: -1.0)
square = _Function(np.square, lambda v: 2 * v)
sqrt = _Function(np.sqrt, lambda v: 0.5 / np.sqrt(v))
rsqrt = _Function(lambda v: v**-0.5, lambda v: -0.5 * v**-1.5)
reciprocal = _Function(lambda v: 1 / v, lambda v: -1 / v**2)
exp = _Function(np.exp, np.exp)
log = _Function(np.log, lambda v: 1 / v)
sin = _Function(np.sin, np.cos)
tanh = _Function(np.tanh, lambda v: 1 - np.tanh(v) ** 2)
sigmoid = _Function(_sigmoid, lambda v: _sigmoid(v) * (1 - _sigmoid(v)))
softplus = _Function(lambda v: np.log1p(np.exp(v)), _sigmoid)
relu = _Function(lambda v: np.maximum(v, 0), lambda v: v > 0)
sign = _Function(np.sign, lambda v: 0.0)
logical_not = _Function(lambda v: 1.0 - v, lambda v: 0.0)


def identity(x: Tensor) -> Tensor:
    """As `mtf.identity`."""
    return _cwise(x, x.value, 1.0)


def cast(x: Tensor, dtype: Any) -> Tensor:
    """The same value: tolerances account for narrow dtypes."""
    return identity(x)


def stop_gradient(x: Tensor) -> Tensor:
    """As `mtf.stop_gradient`."""
    return Tensor(x.value, x.shape)


# Functions of several.


def _joint_shape(x: Shape, y: Shape, given: Any) -> Shape:
    if given is not None:
        return mtf.convert_to_shape(given)
    if set(x.dims) <= set(y.dims):
        return y
    return Shape([*x.dims, *(d for d in y.dims if d not in x.dims)])


def add(x: Tensor, y: Any, output_shape: Any = None) -> Tensor:
    """As `mtf.add`."""
    y = y if isinstance(y, Tensor) else Tensor(y, [])
    return _add(x, y, _joint_shape(x.shape, y.shape, output_shape))


def multiply(x: Tensor, y: Any, output_shape: Any = None) -> Tensor:
    """As `mtf.multiply`."""
    if not isinstance(y, Tensor):
        return _cwise(x, x.value * y, y)
    return _einsum([x, y], _joint_shape(x.shape, y.shape, output_shape))


def einsum(xs: Sequence[Tensor], output_shape: Any) -> Tensor:
    """As `mtf.einsum`."""
    return _einsum(xs, mtf.convert_to_shape(output_shape))


def broadcast(x: Tensor, new_shape: Any) -> Tensor:
    """As `mtf.broadcast`."""
    new_shape = mtf.convert_to_shape(new_shape)
    return x if x.shape == new_shape else _einsum([x], new_shape)


transpose = broadcast


def reduce_sum(x: Tensor, output_shape: Any = None, reduced_dim: Any = None) -> Tensor:
    """As `mtf.reduce_sum`."""
    if reduced_dim is not None:
        output_shape = x.shape - reduced_dim
    return _einsum([x], mtf.convert_to_shape([] if output_shape is None else output_shape))


def reduce_mean(x: Tensor, output_shape: Any = None, reduced_dim: Any = None) -> Tensor:
    """As `mtf.reduce_mean`."""
    total = reduce_sum(x, output_shape, reduced_dim)
    return total * (total.shape.size / x.shape.size)


def softmax(x: Tensor, reduced_dim: Any) -> Tensor:
    """As `mtf.softmax`, for entries that are not large."""
    made = exp(x)
    return made / reduce_sum(made, reduced_dim=reduced_dim)


def where(condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
    """As `mtf.where`; the condition holds zeros and ones."""
    return if_true * condition + if_false * logical_not(condition)


def rename_dimension(x: Tensor, old_name: str, new_name: str) -> Tensor:
    """As `mtf.rename_dimension`."""
    return reshape(x, x.shape.rename_dimension(old_name, new_name))


def gather(weights: Tensor, indices: Tensor, dim: Any) -> Tensor:
    """As `mtf.gather`."""
    rows = np.eye(dim.size)[indices.value.astype(int)]
    one_hot = Tensor(rows, [*indices.shape.dims, dim])
    rest = [d for d in weights.shape.dims if d != dim]
    return _einsum([one_hot, weights], Shape([*indices.shape.dims, *rest]))


def cumsum(x: Tensor, dim: Any) -> Tensor:
    """As `mtf.cumsum`."""
    new = Dimension("tmp_dim_cumsum", dim.size)
    upper = Tensor(np.triu(np.ones([dim.size, dim.size])), [dim, new])
    made = _einsum([x, upper], x.shape.rename_dimension(dim.name, new.name))
    return reshape(made, x.shape)


def concat(xs: Sequence[Tensor], concat_dim_name: str) -> Tensor:
    """As `mtf.concat`."""
    sizes = [x.shape.get_dim_by_name(concat_dim_name).size for x in xs]
    ends = np.cumsum(sizes)
    padded = [
        pad(x, [int(end - size), int(ends[-1] - end)], concat_dim_name)
        for x, size, end in zip(xs, sizes, ends)
    ]
    return add_n(padded)


def split(x: Tensor, split_dim: Any, num_or_size_splits: Any) -> list[Tensor]:
    """As `mtf.split`, into equal parts or parts of given sizes."""
    sizes = num_or_size_splits
    if isinstance(sizes, int):
        sizes = [split_dim.size // sizes] * sizes
    begins = np.cumsum([0, *sizes])
    return [slice(x, int(b), n, split_dim.name) for b, n in zip(begins, sizes)]


def stack(xs: Sequence[Tensor], dim_name: str, axis: int = 0) -> Tensor:
    """As `mtf.stack`."""
    dims = xs[0].shape.dims
    one = Shape([*dims[:axis], Dimension(dim_name, 1), *dims[axis:]])
    return concat([reshape(x, one) for x in xs], dim_name)


def unstack(x: Tensor, dim: Any) -> list[Tensor]:
    """As `mtf.unstack`."""
    return [reshape(slice(x, i, 1, dim.name), x.shape - dim) for i in range(dim.size)]


def add_n(xs: Sequence[Tensor]) -> Tensor:
    """As `mtf.add_n`."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def import_tf_tensor(mesh: Any, value: Any, shape: Any) -> Tensor:
    """As `mtf.import_tf_tensor`, for a numpy array."""
    return Tensor(np.asarray(value), shape)


def recompute_grad(
    fn: Callable[..., Tensor], explicit_inputs: Sequence[Tensor], control_dependencies: bool = True
) -> Tensor:
    """As `mtf.recompute_grad`: the function itself."""
    return fn(*explicit_inputs)


def conv2d(x: Tensor, conv_filter: Tensor) -> Tensor:
    """As `mtf.Conv2dOperation` without padding: the sum over the filter's places."""
    (h, w), (fh, fw) = x.shape.dims[-3:-1], conv_filter.shape.dims[:2]
    out = [*x.shape.dims[:-3], Dimension(h.name, h.size - fh.size + 1)]
    out += [Dimension(w.name, w.size - fw.size + 1), conv_filter.shape.dims[-1]]
    terms = []
    for i in range(fh.size):
        for j in range(fw.size):
            seen = slice(slice(x, i, out[-3].size, h.name), j, out[-2].size, w.name)
            place = slice(slice(conv_filter, i, 1, fh.name), j, 1, fw.name)
            terms.append(
                _einsum([seen, reshape(place, Shape(conv_filter.shape.dims[2:]))], Shape(out))
            )
    return add_n(terms)
