"""Makes the manifest of an exported step: a core's program, described for the runner."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Mapping, Sequence

from mtf_gradsync.extension import HeldSlices, mtf, tf
from mtf_gradsync.runtimes.xla.bridge import STATE_WORDS
from mtf_gradsync.runtimes.xla.executable import CoreModule
from mtf_gradsync.runtimes.xla.replica_program import ReplicaInput, ReplicaProgram

RANDOM_STATE = "random_state"


def made_by() -> dict[str, str]:
    """Returns the versions of the libraries with which a step is exported, by library's name."""
    names = {"mtf_gradsync": "mtf-gradsync", "jax": "jax", "mesh_tensorflow": "mesh-tensorflow"}
    found = {"tensorflow": tf.__version__}
    for name, distribution in names.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"  # it runs from a checkout
    return found


def input_names(
    tensors: Sequence[ReplicaInput], names: Mapping[str, Any] | None
) -> dict[str, ReplicaInput]:
    """Gives names to the inputs of a program; returns the inputs by name, in their order.

    `tensors` are the program's inputs that are tensors, not variables. The keys of the dict `names`
    are names that the user chose. The value of a key says which input gets the name: it is the
    tensor that the program reads, this tensor's name, or the result of `Program.per_replica`.
    Inputs that are not in `names` are named after their operations. Raises a ValueError if the
    program does not read a tensor in `names`, or if two inputs have the same name.
    """
    by_tensor: dict[str, ReplicaInput] = {}
    for i in tensors:
        # The tensor that the input was made for.
        name, _, number = i.name.partition("/output_")
        by_tensor[f"{name}:{number or 0}"] = i
        if len(set(i.sources)) == 1:
            by_tensor[i.sources[0]] = i
    called = {i.name: i.name.replace("/output_", ":") for i in tensors}
    for name, tensor in (names or {}).items():
        key = tensor if isinstance(tensor, str) else tensor.name
        if key not in by_tensor:
            raise ValueError(
                f"The program does not read {key!r}, to which `inputs` gives the name {name!r}. "
                f"From outside, the program reads {sorted(by_tensor)}."
            )
        called[by_tensor[key].name] = name
    found = {called[i.name]: i for i in tensors}
    if len(found) < len(tensors):
        raise ValueError(f"Two inputs cannot have the same name: {sorted(called.values())}.")
    return found


def describe_input(name: str, given: ReplicaInput, default: str | None) -> dict[str, Any]:
    """Returns the manifest's entry for an input of the program.

    Args:
      name: the name by which users of the exported step give the input.
      given: the input.
      default: what the step takes if no value is given: "kept" for a value in the folder, "step"
        for the step counter, None if a value must be given.
    """
    found = list(dict.fromkeys(given.sources))
    return {
        "kind": "input",
        "name": name,
        "dtype": given.dtype,
        "shape": list(given.shape),
        "rows": [found.index(source) for source in given.sources],
        "sources": found,
        "default": default,
    }


def mesh_variables(lowerings: Sequence[mtf.Lowering]) -> dict[str, tuple[Any, mtf.MeshImpl]]:
    """Returns each variable of Mesh-TensorFlow with its mesh, by the name of its first slice.

    `lowerings` have the variables. In the result, a variable is an `mtf.Variable`, and its mesh is
    an `mtf.MeshImpl`. The first slice is the one that core 0 holds.
    """
    found = {}
    for lowering in lowerings:
        for variable, laid_out in lowering.variables.items():
            if isinstance(laid_out, HeldSlices):
                continue  # slices that belong to another variable
            # Outside a program, the first slice's name is used for all slices.
            first = laid_out.laid_out_tensor.all_slices[0].get()
            found[first.op.name] = variable, lowering.mesh_impl(variable)
    return found


def master_names(
    given: ReplicaInput, mesh_variables: Mapping[str, tuple[Any, mtf.MeshImpl]]
) -> list[str]:
    """Returns the names of the masters of which a program's variable, `given`, holds slices.

    The result has several names if Mesh-TensorFlow has stacked several variables into `given`, and
    no names if `given` is not a variable of Mesh-TensorFlow. `mesh_variables` is what the function
    `mesh_variables` returned.
    """
    variable, _ = mesh_variables.get(given.sources[0], (None, None))
    return [] if variable is None else getattr(variable, "original_names", [variable.name])


def describe_variable(
    given: ReplicaInput,
    mesh_variables: Mapping[str, tuple[Any, mtf.MeshImpl]],
    rows: Sequence[int],
) -> dict[str, Any]:
    """Returns the manifest's entry for a variable of the program, `given`.

    `mesh_variables` is what the function `mesh_variables` returned. The variable's values are
    stored as the rows of an array; `rows` has, for each core, the number of the row that is the
    core's value.
    """
    variable, impl = mesh_variables.get(given.sources[0], (None, None))
    return {
        "kind": "variable",
        "name": given.sources[0] if variable is None else variable.name,
        "dtype": given.dtype,
        "shape": list(given.shape),
        "rows": list(rows),
        "sources": list(given.sources),
        "whole": None if variable is None else _slices_of(variable, impl),
    }


def _slices_of(variable: mtf.Variable, impl: mtf.MeshImpl) -> dict[str, Any]:
    """Returns how to assemble a variable from slices, as a dict for the manifest.

    The returned dict has the shape and dtype of the whole variable. For each slice, it has the
    number of a core that holds the slice, and the position in the whole variable where the slice
    begins.
    `impl` is the implementation of the variable's mesh.
    """
    shape = variable.outputs[0].shape
    slices: dict[tuple[int, ...], int] = {}
    for logical in range(impl.size):
        begin = tuple(int(b) for b in impl.slice_begin(shape, logical))
        slices.setdefault(begin, impl.l2p(logical))
    return {
        "names": getattr(variable, "original_names", [variable.name]),
        "is_stacked": hasattr(variable, "original_names"),
        "dtype": variable.master_dtype.name,
        "shape": shape.to_integer_list,
        "slices": [[core, list(begin)] for begin, core in slices.items()],
    }


def describe_random_state(rows: Sequence[int]) -> dict[str, Any]:
    """Returns the manifest's entry for the state of random numbers.

    The states of the cores are stored as the rows of an array. `rows` has, for each core, the
    number of the row that is the core's state.
    """
    return {
        "kind": "random_state",
        "name": RANDOM_STATE,
        "dtype": "int64",
        "shape": [STATE_WORDS],
        "rows": list(rows),
    }


def describe_results(
    replica: ReplicaProgram,
    lowered: CoreModule,
    parameters: Sequence[Mapping[str, Any]],
    positions: Mapping[str, int],
    graph: tf.Graph,
) -> list[dict[str, Any]]:
    """Returns the manifest's entries for a program's results, in the order of the results.

    The entry of a result says which fetches have the result as their value, or which variable has
    the result as its new value.

    Args:
      replica: the program of one core.
      lowered: the same program as StableHLO.
      parameters: the manifest's entries for the program's parameters.
      positions: for the name of each fetch, its number among the program's results, from 0.
      graph: the user's graph, with the fetched tensors.
    """
    results = []
    for number, tensor in enumerate(replica.fetches):
        found = graph.get_tensor_by_name(tensor)
        results.append(
            {
                "fetches": [name for name, n in positions.items() if n == number],
                "updates": None,
                "dtype": found.dtype.base_dtype.name,
                "shape": found.shape.as_list(),
            }
        )
    nothing: dict[str, Any] = {"fetches": [], "updates": None, "dtype": "float32", "shape": []}
    # A program that fetches nothing still returns a number.
    results += [nothing] * (lowered.num_fetches - len(results))
    for parameter in lowered.updated:
        updated = parameters[parameter]
        new = {"updates": updated["name"], "dtype": updated["dtype"], "shape": updated["shape"]}
        results.append({**nothing, **new})
    return results
