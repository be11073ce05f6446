"""The values on the devices: copies inputs and variables to the devices and back."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Callable, Collection, Iterable, Sequence, cast

import numpy as np

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._private.tensorflow import as_tensorflow_bfloat16
from mtf_gradsync.runtimes.simd.graph_facts import split_input
from mtf_gradsync.runtimes.simd.replica_session import VariableAccess
from mtf_gradsync.runtimes.xla.gathering import Cores
from mtf_gradsync.runtimes.xla.host_graph import HostGraph
from mtf_gradsync.runtimes.xla.replica_program import ReplicaInput
from mtf_gradsync.runtimes.xla.runner.jax_devices import DeviceValues, keeping_64_bits, put


class DeviceInputs:
    """The inputs of a program; inputs that are the same in every step are copied once."""

    def __init__(self, outside: HostGraph, cores: Cores):
        self._outside = outside
        self._cores = cores
        # Input -> the operations that it is made of, if these are constant; else None.
        self._constant: dict[tuple[str, ...], set[str] | None] = {}
        self._kept: dict[tuple[str, ...], DeviceValues] = {}

    def sources(self, inputs: Sequence[ReplicaInput], fed: Collection[str]) -> set[str]:
        """Returns the names of the tensors to compute outside the program before a step.

        `inputs` are the program's inputs, and `fed` has the names of the tensors that the user
        feeds in this step. Inputs whose constant values are on the devices already are left out.
        Raises a ValueError if an input is computed from results of the program.
        """
        wanted = [i for i in inputs if not self._is_kept(i, fed)]
        names = {i.sources[c] for i in wanted for c in self._cores.local}
        for name in sorted(names):
            if self._outside.is_after(name):
                raise ValueError(
                    f"The program's input {name!r} is made from what the program returns. Fetch "
                    "this tensor in one step, and feed its value in the next step."
                )
        return names

    def put(
        self,
        inputs: Sequence[ReplicaInput],
        values: dict[str, Any],
        fed: Collection[str],
        shared: Collection[str],
    ) -> list[DeviceValues]:
        """Puts a step's inputs on the devices, and returns them in the order of `inputs`.

        Args:
          inputs: the program's inputs.
          values: the values of the tensors that `sources` returned and of fed tensors, by name.
          fed: the names of tensors that the user feeds in this step.
          shared: the names of tensors whose arrays other code holds, too. The arrays of shared and
            of fed tensors are copied first, because other code may write to these arrays.
        """
        copies: dict[str, np.ndarray] = {}

        def given(name: str) -> Any:
            # The caller may write to an array while the step runs, or before the next one.
            if name not in fed and name not in shared:
                return values[name]
            if name not in copies:
                copies[name] = np.array(values[name])
            return copies[name]

        found = []
        for one in inputs:
            if self._is_kept(one, fed):
                found.append(self._kept[one.sources])
                continue
            per_core = [given(one.sources[c]) for c in self._cores.local]
            found.append(put(per_core, self._cores.local_devices))
            if self._is_constant(one, fed):
                self._kept[one.sources] = found[-1]
        return found

    def _is_kept(self, one: ReplicaInput, fed: Collection[str]) -> bool:
        return one.sources in self._kept and self._is_constant(one, fed)

    def _is_constant(self, one: ReplicaInput, fed: Collection[str]) -> bool:
        """Returns whether an input has the same value in every step: it depends only on constants.

        `one` is the input. `fed` has the names of the tensors that the user feeds in this step. If
        the input depends on one of them, the result is False.
        """
        if one.sources not in self._constant:
            is_fixed = all(self._outside.is_fixed(name) for name in set(one.sources))
            self._constant[one.sources] = self._outside.ancestors(one.sources) if is_fixed else None
        made_of = self._constant[one.sources]
        return made_of is not None and not any(split_input(name)[0] in made_of for name in fed)


class DeviceVariables:
    """The newest value of each variable, wherever it is: on the devices or in TensorFlow.

    At first all values are in the TensorFlow session `session`, whose variables have the names that
    they have in the user's graph. If the program runs in several processes, all of them have to
    call the same methods in the same order.
    """

    def __init__(self, session: tf.Session, cores: Cores):
        self._session = session
        self._cores = cores
        self._access = VariableAccess(session.graph)
        self._on_devices: dict[tuple[str, ...], DeviceValues] = {}
        # The keys of values on the devices that are newer than TensorFlow's.
        self._newer: set[tuple[str, ...]] = set()
        # Name of a variable -> the keys that contain it; a key is `ReplicaInput.sources`.
        self._keys: dict[str, set[tuple[str, ...]]] = {}

    def copy_from_first_process(self) -> None:
        """Sets the variables in TensorFlow, on every process, to the first process's values.

        Initial values of variables may be random, and then differ between processes. String
        variables are not changed. All processes have to call this method.
        """
        if self._cores.is_alone:
            return
        values = self._access.read_all(self._session)
        names = sorted(name for name, value in values.items() if value.dtype != object)
        digests = [
            np.frombuffer(hashlib.sha256(cast("Any", array)).digest(), np.uint8)
            for array in (np.ascontiguousarray(values[n]) for n in names)
        ]
        shared = self._cores.from_first(digests)
        differs = [not np.array_equal(own, first) for own, first in zip(digests, shared)]
        anywhere = np.any(self._cores.gather([[np.array(differs)] * len(self._cores.local)])[0], 0)
        wanted = [name for name, one in zip(names, anywhere) if one]
        found = self._cores.from_first([np.asarray(values[n]) for n in wanted])
        self._access.set(self._session, zip(wanted, found))

    def take(self, variables: Sequence[ReplicaInput]) -> list[DeviceValues]:
        """Returns the values of `variables` on the devices, in the order of `variables`.

        Values that are not on the devices yet are first copied from TensorFlow to the devices.
        """
        missing = [v for v in variables if v.sources not in self._on_devices]
        local = self._cores.local
        names = {v.sources[c] for v in missing for c in local}
        values = self._session.run({name: self._access.read[name] for name in sorted(names)})
        for variable in missing:
            # Copies: a step may write over the memory, and cores may have the same source.
            self._on_devices[variable.sources] = put(
                [np.array(values[variable.sources[c]]) for c in local], self._cores.local_devices
            )
            for source in variable.sources:
                self._keys.setdefault(source, set()).add(variable.sources)
        return [self._on_devices[v.sources] for v in variables]

    def put(self, variable: ReplicaInput, value: DeviceValues) -> None:
        """Stores the new value of `variable`, which a step has computed on the devices.

        `take` returns the new value from now on. The variable in TensorFlow keeps an old value
        until `copy_to_tensorflow` is called.
        """
        self._on_devices[variable.sources] = value
        self._newer.add(variable.sources)

    def copy_to_tensorflow(self, names: Iterable[str] | None = None) -> None:
        """Copies the values that are newer on the devices to the variables in TensorFlow.

        `names` are the names of variables to copy; None copies all variables.
        """
        keys = self._keys_of(names) & self._newer
        if not keys:
            return
        # A variable that all cores share has the same value on all of them.
        shared = [key for key in keys if len(set(key)) == 1]
        values = {key[0]: np.asarray(self._on_devices[key].arrays[0]) for key in shared}
        sliced = sorted(keys.difference(shared))  # in one order on all processes
        local = [[np.asarray(a) for a in self._on_devices[k].arrays] for k in sliced]
        if local:
            for key, per_core in zip(sliced, self._cores.gather(local)):
                values.update(zip(key, per_core))
        self._access.set(self._session, ((n, as_tensorflow_bfloat16(v)) for n, v in values.items()))
        self._newer -= keys

    def checksums(self) -> dict[tuple[str, ...], list[Any]]:
        """Returns a checksum of each variable's value on each core, computed on the core's device.

        Returns:
          A dict with an entry for each variable that is on the devices. The key of an entry is the
          tuple of the names that the variable has in TensorFlow, one name per core. The value of an
          entry is the list of the checksums (numpy integers), one per core.
        """
        keys = sorted(self._on_devices)
        if not keys:
            return {}
        local = checksums_on(self._cores.devices, [self._on_devices[key] for key in keys])
        (of_cores,) = self._cores.gather([local])
        return {key: [sums[n] for sums in of_cores] for n, key in enumerate(keys)}

    def values_on_cores(self, names: Sequence[str]) -> list[np.ndarray]:
        """Returns the values of one variable on some cores, in the order of `names`.

        In TensorFlow each core's copy of a variable may have a name of its own, or all copies may
        have the same name. `names` are the names of the copies whose values are returned. If all
        copies have the same name, the values on all cores are returned.
        """
        key = next(key for key in self._on_devices if names[0] in key)
        local = [np.asarray(array) for array in self._on_devices[key].arrays]
        (of_cores,) = self._cores.gather([local])
        places = range(len(key)) if len(set(key)) == 1 else map(key.index, names)
        return [of_cores[place] for place in places]

    def wait(self) -> None:
        """Waits until the devices have computed all values of variables."""
        for value in self._on_devices.values():
            for array in value.arrays:
                array.block_until_ready()

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Discards the devices' values of variables, even if they are newer than TensorFlow's.

        Call `forget` for variables that changed in TensorFlow. The next call of `take` then copies
        the variables' values from TensorFlow to the devices again. `names` are the variables'
        names; None discards the values of all variables.
        """
        keys = self._keys_of(names)
        for key in keys:
            self._on_devices.pop(key, None)
        self._newer -= keys

    def _keys_of(self, names: Iterable[str] | None) -> set[tuple[str, ...]]:
        if names is None:
            return set(self._on_devices)
        return {key for name in names for key in self._keys.get(name, ())}


def checksums_on(devices: Sequence[Any], values: Sequence[DeviceValues]) -> list[np.ndarray]:
    """Returns checksums of the bits of values on several devices, each computed on its device.

    `devices` are the devices of all cores, and `values` are the values to make checksums of. The
    result has an array for each device of this process, in the order of the devices, with one
    checksum for each value. If a single number in a value changes, the value's checksum always
    changes.
    """
    if devices[0].platform == "cpu":
        # Nothing to compile, and faster than XLA's sums on CPUs; numpy reads the devices' memory.
        of_values = [[_checksum(np.asarray(array)) for array in v.arrays] for v in values]
        return [np.stack(of_device) for of_device in zip(*of_values)]
    sharding, program = _checksum_program(tuple(devices))
    with keeping_64_bits():
        found = program([value.joined(sharding) for value in values])
    shards = sorted(found.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data)[0] for shard in shards]


# Odd numbers, so that no change of one word is lost.
_WEIGHTS = np.random.RandomState(0).randint(0, 2**63, 4096, np.uint64) | np.uint64(1)


def _checksum(array: np.ndarray) -> np.uint64:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    rest = data.size % _WEIGHTS.nbytes
    last = np.zeros_like(_WEIGHTS)
    last.view(np.uint8)[:rest] = data[data.size - rest :]
    rows = data[: data.size - rest].view(np.uint64).reshape(-1, _WEIGHTS.size)
    sums = np.append(np.einsum("ij,j->i", rows, _WEIGHTS), np.sum(last * _WEIGHTS))
    return np.sum(sums * np.arange(1, 2 * sums.size, 2, np.uint64))


@functools.lru_cache(maxsize=None)
def _checksum_program(devices: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a jax sharding over `devices`, and a compiled function that computes checksums.

    The compiled function takes a list of arrays that `DeviceValues.joined` made with the sharding.
    The function returns a uint32 array ``[devices, values]`` with a row for each device. The row of
    a device has the checksums of the arrays on this device, and is stored there.
    """
    import jax
    import jax.numpy as jnp

    if hasattr(jax, "shard_map"):
        shard_map: Any = jax.shard_map
    else:  # before jax 0.6
        from jax.experimental import shard_map as earlier

        shard_map = earlier.shard_map

    def checksum(value: Any) -> Any:
        if value.dtype == jnp.bool_:
            value = value.astype(jnp.uint8)
        word = jnp.dtype(f"uint{8 * min(value.dtype.itemsize, 4)}")
        bits = jax.lax.bitcast_convert_type(value, word).reshape(-1).astype(jnp.uint32)
        numbers = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B1)
        weights = (numbers ^ (numbers >> 15)) | jnp.uint32(1)
        return jnp.sum(bits * weights, dtype=jnp.uint32)

    def of_core(values: Any) -> Any:
        return jnp.stack([checksum(value) for value in values])[jnp.newaxis]

    mesh = jax.sharding.Mesh(np.array(devices), ("core",))
    everywhere, apart = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("core")
    program = shard_map(of_core, mesh=mesh, in_specs=everywhere, out_specs=apart)
    return jax.sharding.NamedSharding(mesh, everywhere), jax.jit(program)
