"""Chooses a strategy for a mesh, by the hardware under it."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, Callable, Hashable, NamedTuple, Sequence

from mtf_gradsync._common import grouped, log_once, walk, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync._private.tensorflow import local_devices
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import full_name, kind_of, place_of, process_of
from mtf_gradsync.reduce.collective import CollectiveAllReduce
from mtf_gradsync.reduce.hierarchical import HierarchicalAllReduce
from mtf_gradsync.reduce.parts import Cuts
from mtf_gradsync.reduce.strategy import (
    PLACEMENT_PACKED_BYTES,
    FusedAllReduce,
    Strategy,
    has_gradient_reduction,
)

_logger = logging.getLogger("mtf_gradsync")

# A message between GPUs without links goes over the host's memory, while packing is a copy in the
# GPU's own memory. The size was not measured.
GPU_BUCKET_BYTES = 1024 * 1024


#: Kinds of devices that something is known about.
KNOWN_KINDS = ("CPU", "GPU", "TPU")


class Topology(NamedTuple):
    """The hardware that a mesh runs on, as far as device strings and TensorFlow tell.

    Attributes:
      size: number of processors.
      simd: whether the mesh is a SIMD mesh, on which one program runs on all processors. The other
        attributes are then empty.
      kinds: kind of each processor's device, such as "CPU"; see `kind_of`.
      processes: a key for each processor; processors of one process have equal keys.
      chips: a key for each processor; processors on one device, or on parts of one GPU, have equal
        keys.
      linked: whether fast links connect all GPUs of each process, directly or through other GPUs;
        None if that is unknown, as for GPUs of other processes.
      models: names of those GPUs whose names TensorFlow knows.
    """

    size: int
    simd: bool
    kinds: Sequence[str] = ()
    processes: Sequence[Hashable] = ()
    chips: Sequence[Hashable] = ()
    linked: bool | None = None
    models: Sequence[str] = ()

    def describe(self) -> str:
        """Returns the topology as text for logs, such as "2 CPU devices of one process"."""
        if self.simd:
            return f"a SIMD mesh of {self.size}"
        counts = [f"{self.kinds.count(kind)} {kind}" for kind in sorted(set(self.kinds))]
        devices = " and ".join(counts) + " device" + ("s" if self.size > 1 else "")
        processes = len(set(self.processes))
        where = "one process" if processes == 1 else f"{processes} processes"
        links = {True: ", joined by links", False: ", without links", None: ""}[self.linked]
        models = f" ({', '.join(sorted(set(self.models)))})" if self.models else ""
        return f"{devices}{models} of {where}{links}"


def topology_of(mesh_impl: Any, device_attributes: Sequence[Any] | None = None) -> Topology:
    """Returns the hardware of a placement or SIMD mesh.

    `device_attributes` are TensorFlow's `DeviceAttributes` of the mesh's GPUs, which tell their
    links and names; attributes of other devices are ignored. If `device_attributes` is None and the
    mesh has GPUs of this process, TensorFlow is asked for the attributes. TensorFlow then
    initializes all GPUs that it can see, as a session would.
    """
    if is_simd(mesh_impl):
        return Topology(mesh_impl.shape.size, simd=True)
    devices = [str(device) for device in mesh_impl.devices]
    kinds = [kind_of(device) for device in devices]
    processes = [_or_itself(process_of, device) for device in devices]
    chips = [_or_itself(full_name, device) for device in devices]
    topology = Topology(len(devices), False, kinds, processes, chips)
    if "GPU" not in kinds:
        return topology
    if device_attributes is None:
        here = any(p == process_of("") for p, kind in zip(processes, kinds) if kind == "GPU")
        device_attributes = _devices_here() if here else ()
    return _with_gpus(topology, devices, device_attributes)


# Cached: BestAllReduce asks at each sum, and TensorFlow would make its devices anew each time.
@functools.lru_cache(maxsize=None)
def _devices_here() -> Sequence[Any]:
    return local_devices()


def _or_itself(fn: Callable[[str], Hashable], device: str) -> Hashable:
    try:
        return fn(device)
    except (AttributeError, TypeError, ValueError):
        return device


def _with_gpus(
    topology: Topology, devices: Sequence[str], device_attributes: Sequence[Any]
) -> Topology:
    """Returns a topology with the links and names of its GPUs; parts of one GPU get equal `chips`.

    `devices` has the name of each processor's device. `device_attributes` are TensorFlow's
    `DeviceAttributes`; some GPUs may be missing in them.
    """
    attributes = {place_of(a.name): a for a in device_attributes if kind_of(a.name) == "GPU"}
    gpus = [p for p, kind in enumerate(topology.kinds) if kind == "GPU"]
    found = {
        p: attributes[place_of(devices[p])] for p in gpus if place_of(devices[p]) in attributes
    }
    chips, models = list(topology.chips), []
    for p, attribute in found.items():
        # For example "device: 0, name: Tesla V100, pci bus id: 0000:00:04.0, compute ...".
        description = dict(re.findall(r"([\w ]+): ([^,]+)", attribute.physical_device_desc))
        description = {key.strip(): value for key, value in description.items()}
        if "name" in description:
            models.append(description["name"])
        if "pci bus id" in description:
            chips[p] = (topology.processes[p], description["pci bus id"])
    linked = None
    if len(found) == len(gpus):
        by_process = grouped(gpus, [topology.processes[p] for p in gpus]).values()
        linked = all(_are_linked([found[p] for p in members]) for members in by_process)
    return topology._replace(chips=chips, linked=linked, models=models)


def _are_linked(gpus: Sequence[Any]) -> bool:
    """Returns whether links connect all GPUs of a process, directly or through other GPUs.

    `gpus` are TensorFlow's `DeviceAttributes` of the GPUs.
    """
    numbers = [tf.DeviceSpec.from_string(gpu.name).device_index for gpu in gpus]
    links = {
        number: {link.device_id for link in gpu.locality.links.link}
        for number, gpu in zip(numbers, gpus)
    }
    reached = walk(numbers[:1], lambda number: links[number].intersection(links))
    return set(reached) == set(numbers)


class Choice(NamedTuple):
    """A chosen strategy, and the reason for the choice: a clause for the log, without a period."""

    strategy: Strategy
    why: str


def choose_the_best(
    mesh_impl: Any,
    gradients: Sequence[Any] | None = None,
    groups: ProcessorGroups | None = None,
    device_attributes: Sequence[Any] | None = None,
) -> Strategy:
    """Returns the best strategy for a mesh, and logs the choice and its reason.

    | mesh | strategy |
    |---|---|
    | SIMD | `FusedAllReduce`: the compiler combines the sums of a group |
    | one CPU, or several in one process | `FusedAllReduce`: sums move no bytes between them |
    | sums that run over several processes | `HierarchicalAllReduce`, small tensors packed |
    | GPUs of one process that links join | `CollectiveAllReduce`, which is NCCL on GPUs |
    | GPUs without links, or with unknown ones | `FusedAllReduce` with buckets of 1 MiB |
    | anything else | `FusedAllReduce`; for kinds of devices that are not known, with a warning |

    The choice never fails: one warning names what is not known of the mesh. The first three rows
    are measured by ``python -m benchmarks.reductions`` and ``python -m benchmarks.two_processes``;
    the rows of GPUs are not measured.

    Args:
      mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
      gradients: the tensors to be summed (`LaidOutTensor`s, mtf or tf tensors), or None if they
        are not known yet. Only the log's line about their sizes depends on them.
      groups: the groups of processors that sum with each other; None if all processors are one
        group.
      device_attributes: TensorFlow's `DeviceAttributes` of the mesh's GPUs; None asks TensorFlow
        for them if the mesh has GPUs of this process.

    Returns:
      A new strategy: that of the row of the table above which fits the mesh.

    References:
      TensorFlow 1's `cross_tower_ops.choose_the_best`, which looks at kinds of devices and at
      links between GPUs.
    """
    choice, text = _choose_and_describe(mesh_impl, gradients, groups, device_attributes)
    _logger.info(text)
    return choice.strategy


@late_configurable(module="mtf_gradsync")
class BestAllReduce(Strategy):
    """A strategy that sums by another one, which `choose_the_best` picks when a graph is lowered.

    Use `BestAllReduce` for a wrapper that is made before its mesh, by gin for example. Each choice
    is logged once. `BestAllReduce` never picks a strategy that keeps state for gradients, because
    the variables of the state have to be made before the graph is lowered. To use such a strategy,
    give it a `BestAllReduce` as `reducer`: `QuantizedAllReduce(reducer=BestAllReduce())` quantizes
    the gradients, and makes all other sums by the strategy that is picked.
    """

    def __init__(self) -> None:
        """Makes a strategy without arguments."""
        # Without a constructor, gin would accept bindings of any arguments.
        super().__init__()

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        values = list(values)
        return self._chosen(mesh_impl, values, groups).all_reduce(mesh_impl, values, groups)

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        values = list(values)
        chosen = self._chosen(mesh_impl, values, groups)
        return chosen.reduce_scatter(mesh_impl, values, groups, cuts)

    def _chosen(self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups) -> Strategy:
        self.check(mesh_impl, groups)
        choice, text = _choose_and_describe(mesh_impl, values, groups)
        if has_gradient_reduction(choice.strategy):
            name = type(choice.strategy).__name__
            raise TypeError(
                f"BestAllReduce cannot reduce by {choice.strategy!r}: the state of this strategy "
                "is made when a step is built, and BestAllReduce picks a strategy when the graph "
                f"is lowered. Give {name}(reducer=BestAllReduce()) in its place."
            )
        log_once(text, logging.INFO, "%s", text)
        return choice.strategy

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        choice, _ = _choose_and_describe(mesh_impl, None, groups)
        return choice.strategy.wire_dtype(mesh_impl, dtype, groups)


def _choose_and_describe(
    mesh_impl: Any,
    gradients: Sequence[Any] | None,
    groups: ProcessorGroups | None,
    device_attributes: Sequence[Any] | None = None,
) -> tuple[Choice, str]:
    """Returns the strategy for a mesh with its reason, and a line about both for the log.

    If the mesh cannot be examined, a warning is logged, and the choice is `FusedAllReduce`; no
    exception is raised.

    Args:
      mesh_impl: the mesh.
      gradients: the gradients, whose sizes the line tells; None if they are not known.
      groups: the processors that sum with each other; None for all processors in one group.
      device_attributes: TensorFlow's `DeviceAttributes` of the mesh's GPUs. None finds them.
    """
    # Training must not stop because this module does not know its mesh.
    try:
        topology = topology_of(mesh_impl, device_attributes)
        if groups is None:
            groups = ProcessorGroups.along(mesh_impl, range(mesh_impl.shape.ndims))
        choice = choose(topology, groups)
        where = f"{topology.describe()}, in groups of {groups.group_size}"
    except Exception as error:
        warn_once(
            f"choice failed: {type(error).__name__}",
            "The devices of the mesh could not be examined (%r); FusedAllReduce is used. Give "
            "reducer= a strategy to choose another one.",
            error,
        )
        choice = Choice(FusedAllReduce(), "the mesh could not be examined")
        where = "an unknown mesh"
    name = type(choice.strategy).__name__
    text = f"{name} for {describe_sizes(mesh_impl, gradients)} on {where}: {choice.why}."
    return choice, text


def choose(topology: Topology, groups: ProcessorGroups) -> Choice:
    """Returns the strategy in the table of `choose_the_best` for a mesh, with the reason.

    `topology` is the hardware of the mesh, and `groups` are the groups of processors that sum with
    each other. A warning is logged if devices are of a kind that is not in `KNOWN_KINDS`.
    """
    if groups.group_size == 1:
        return Choice(FusedAllReduce(), "groups of one processor have nothing to sum")
    if topology.simd:
        return Choice(FusedAllReduce(), "the compiler combines the sums of a group")
    unknown = sorted(set(topology.kinds) - set(KNOWN_KINDS))
    if unknown:
        warn_once(
            f"choice for {unknown}",
            "Devices of kind %s are unknown; FusedAllReduce is used, which only copies and adds. "
            "Give reducer= a strategy to choose another one.",
            " and ".join(unknown),
        )
        return Choice(FusedAllReduce(), f"nothing is known about {' and '.join(unknown)}")
    members = groups.groups
    if any(len({topology.processes[p] for p in group}) > 1 for group in members):
        strategy = HierarchicalAllReduce(
            agg_small_grads_max_bytes=PLACEMENT_PACKED_BYTES, agg_small_grads_max_group=32
        )
        return Choice(strategy, "each process sends one copy of a sum and reads one")
    if set(topology.kinds) == {"CPU"}:
        why = "CPU devices of one process read each other's memory, only launches are to be saved"
        return Choice(FusedAllReduce(), why)
    if set(topology.kinds) == {"GPU"}:
        return _choose_for_gpus(topology, groups)
    return Choice(FusedAllReduce(), "sums on each device in turn suit all kinds of devices")


def _choose_for_gpus(topology: Topology, groups: ProcessorGroups) -> Choice:
    apart = all(len({topology.chips[p] for p in g}) == len(g) for g in groups.groups)
    if topology.linked and apart:
        return Choice(CollectiveAllReduce(), "NCCL goes over the links between the GPUs")
    if not apart:
        why = "processors share a GPU, where collectives would wait for each other"
    elif topology.linked is None:
        why = "whether links join the GPUs is not known"
    else:
        why = "no links join the GPUs, so that messages go over the host and should be few"
    return Choice(FusedAllReduce(GPU_BUCKET_BYTES), why)


def describe_sizes(mesh_impl: Any, gradients: Sequence[Any] | None) -> str:
    """Returns text about gradients for the log: "60 gradients (float32, 72.1 MiB a processor)".

    `gradients` are `LaidOutTensor`s, mtf or tf tensors; elements that are None are not counted. The
    text says that sizes are unknown if `gradients` is None or has other elements. No exception is
    raised.
    """
    try:
        known = [] if gradients is None else [x for x in gradients if x is not None]
    except Exception:  # Anything may be given; this is only for the log.
        known = []
    if not known:
        return "gradients of unknown sizes"
    number = "1 gradient" if len(known) == 1 else f"{len(known)} gradients"
    sizes, dtypes = [], set()
    for x in known:
        try:
            size, dtype = _size_and_dtype(mesh_impl, x)
        except Exception:  # Anything may be in the list; sizes are only for the log.
            return f"{number}, not all of known size"
        sizes.append(size * dtype.size)
        dtypes.add(dtype.name)
    return f"{number} ({' and '.join(sorted(dtypes))}, {sum(sizes) / 2**20:.3g} MiB a processor)"


def _size_and_dtype(mesh_impl: Any, x: Any) -> tuple[int, tf.DType]:
    """Returns the number of elements that a processor holds of a gradient, and its dtype.

    The gradient `x` is an mtf tensor, a `LaidOutTensor`, or another tensor of a lowered graph with
    a method `to_laid_out_tensor`. It may also be a tf tensor, which counts as the slice of one
    processor. Raises ValueError if the tf tensor's shape is unknown.
    """
    if isinstance(x, mtf.Tensor):
        return mtf.list_product(mesh_impl.slice_shape(x.shape)), tf.as_dtype(x.dtype)
    if hasattr(x, "to_laid_out_tensor"):
        x = getattr(x, "laid_out_input", x).to_laid_out_tensor()
        return mtf.list_product(x.slice_shape), x.tensor_list[0].dtype.base_dtype
    size = x.shape.num_elements()
    if size is None:
        raise ValueError(f"The size of {x!r} is unknown.")
    return size, x.dtype.base_dtype
