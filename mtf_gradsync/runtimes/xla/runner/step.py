"""Step: a training step whose variables stay on the devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from . import jax_devices as device_tools
from .files import (
    MANIFEST,
    PROGRAM,
    VALUES,
    array_name,
    assemble,
    check_free,
    distinct_rows,
    dtype_of,
    from_savable,
    read_manifest,
    read_sums,
    write_folder,
)
from .jax_devices import DeviceValues, StepError, devices_errors
from .loaded_program import LoadedProgram, RefusedError, compiled, wait_for_last_program


class Input(NamedTuple):
    """An input of a step.

    Attributes:
      name: the input's name.
      shape: shape of the array. If cores read different rows of the array, the rows are along its
        first dimension.
      dtype: numpy's dtype.
      default: what the step takes if the caller gives no value: "kept" for the value in the folder,
        "step" for the number of steps made before. None if the caller must give a value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    default: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name}{list(self.shape)}"


class Fetched(Mapping):
    """The values that a step returned, by name. Reading a value waits for the step.

    This mapping has, for each name, the value on this process's first core. The method `per_core`
    returns the values on all cores of this process.
    """

    def __init__(self, values: Mapping[str, DeviceValues]):
        self._values = values

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._values[name].arrays[0]
        with devices_errors():
            return np.asarray(array)[()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def per_core(self, name: str) -> list[np.ndarray]:
        """Returns the value of the fetch `name` on each of this process's cores, in order."""
        with devices_errors():
            return [np.asarray(array)[()] for array in self._values[name].arrays]


class Step:
    """An exported training step; its variables stay on the devices, and are updated there.

    Attributes:
      manifest: content of manifest.json.
      inputs: the inputs that the step reads.
      devices: a jax device for each core.
      cores: numbers of this process's cores.
      steps: steps made so far, including those before the folder was written.
    """

    @classmethod
    def load(
        cls, folder: str, devices: Sequence[Any] | None = None, platform: str | None = None
    ) -> Step:
        """Reads a folder, compiles its program and puts its variables on devices.

        Args:
          folder: the folder of an exported step.
          devices: a jax device for each core; default the first ones that jax has.
          platform: "cpu", "gpu" ("cuda", "rocm") or "tpu"; default jax's own choice.

        Returns:
          The step.

        Raises:
          StepError: when a file is missing or damaged, there are too few devices or too little
            memory, or this jax cannot read the program.
        """
        return cls(Path(folder), devices, platform)

    def __init__(self, folder: Path, devices: Sequence[Any] | None, platform: str | None):
        self._folder = folder
        self.manifest = read_manifest(folder)
        count = self.manifest["cores"]
        if devices is None:
            device_tools.make_cpu_devices(count)
            self.devices = device_tools.find_devices(count, platform)
        else:
            self.devices = device_tools.first_devices(devices, count)
        self.steps: int = self.manifest["steps"]
        me = self.devices[0].client.process_index()
        self.cores = [core for core, d in enumerate(self.devices) if d.process_index == me]
        if not self.cores:
            raise StepError(
                f"This is process {me}, and the step's {count} cores are all on devices of other "
                "processes. Start fewer processes."
            )
        self._local_devices = [self.devices[core] for core in self.cores]
        parameters = self.manifest["parameters"]
        self._names = [p["name"] for p in parameters]
        self._variables = [p for p in parameters if p["kind"] != "input"]
        self._given = {p["name"]: p for p in parameters if p["kind"] == "input"}
        self.inputs = inputs_of(self.manifest)
        try:
            program: bytes | str = (folder / PROGRAM).read_bytes()
            if self.devices[0].platform == "cpu":
                from .combiner import combined_for_cpus

                program = combined_for_cpus(program, self.manifest.get("together", ()))
            executable = compiled(program, self.devices)
        except RefusedError as error:
            raise StepError(
                f"{error} The step was exported with jax {self.manifest['made_by']['jax']}: "
                "install that version or a later one."
            ) from error
        self._program = LoadedProgram(executable, self.devices)
        self._on_devices: dict[str, DeviceValues] = {}
        with np.load(folder / VALUES, allow_pickle=False) as values:
            for p in parameters:
                if p["kind"] != "input" or p["default"] == "kept":
                    stored = from_savable(values[array_name(p)], p["dtype"])
                    per_core = [np.array(stored[p["rows"][core]]) for core in self.cores]
                    self._on_devices[p["name"]] = self._put(per_core)

    def __call__(self, inputs: Mapping[str, Any] | None = None) -> Fetched:
        """Begins a step and returns at once; steps run in the order of the calls.

        Args:
          inputs: the arrays of the inputs, by name. Inputs with a value in the folder, and the step
            counter, need not be given.

        Returns:
          The values that the step fetches, by name. Reading a value waits for the step.

        Raises:
          StepError: when an input is missing or has another shape or dtype.
        """
        given = {**self._counters(), **(inputs or {})}
        fresh = {name: self._put(value) for name, value in self._checked(given).items()}
        with devices_errors():
            results = self._program.run([fresh.get(n) or self._on_devices[n] for n in self._names])
        fetched: dict[str, DeviceValues] = {}
        for what, value in zip(self.manifest["results"], results):
            fetched.update((name, value) for name in what["fetches"])
            if what["updates"] is not None:
                self._on_devices[what["updates"]] = value
        self.steps += 1
        return Fetched({name: fetched[name] for name in self.manifest["fetches"]})

    def wait(self) -> None:
        """Waits until all steps that were begun are done."""
        with devices_errors():
            for value in self._on_devices.values():
                for array in value.arrays:
                    array.block_until_ready()

    def variables(self, per_core: bool = False) -> dict[str, Any]:
        """Returns the newest values of all variables.

        If the step runs in several processes, all of them have to call this method.

        Args:
          per_core: whether to return, for each variable, the list of the cores' slices in place of
            the assembled array.

        Returns:
          A dict from names to values. If `per_core` is False, each value is assembled from the
          cores' slices. Variables that Mesh-TF has stacked into one then have an entry each, with
          their own names.
        """
        found: dict[str, Any] = {}
        self._finish()
        for p in self._variables:
            if p["kind"] != "variable":
                continue
            values = device_tools.on_all_cores(self._on_devices[p["name"]], self.devices)
            if per_core:
                found[p["name"]] = values
            else:
                found.update(assemble(p, values))
        return found

    def save(self, folder: str, replace: bool = False) -> None:
        """Writes a folder like the one that was loaded, with the variables' newest values.

        With several processes, all of them have to call `save`; the process with the first core
        writes the folder.

        Args:
          folder: the folder to write.
          replace: whether the new folder may replace an exported step in `folder`.

        Raises:
          StepError: when something exists at `folder` that may not be replaced.
        """
        check_free(Path(folder), replace)
        manifest = {**self.manifest, "steps": self.steps, "parameters": []}
        with np.load(self._folder / VALUES, allow_pickle=False) as values:
            arrays = {k: values[k] for k in values.files if k.startswith(("inputs/", "others/"))}
        self._finish()
        for p in self.manifest["parameters"]:
            if p["kind"] != "input":
                value = self._on_devices[p["name"]]
                arrays[array_name(p)], rows = distinct_rows(
                    device_tools.on_all_cores(value, self.devices)
                )
                p = {**p, "rows": rows}
            manifest["parameters"].append(p)
        if 0 in self.cores:
            kept = [name for name in read_sums(self._folder) if name not in (MANIFEST, VALUES)]
            others = {name: (self._folder / name).read_bytes() for name in kept}
            write_folder(Path(folder), manifest, arrays, others, replace)

    def _finish(self) -> None:
        """Waits for all steps, so that another program may exchange values between processes."""
        with devices_errors():
            wait_for_last_program()

    def _put(self, per_core: Sequence[np.ndarray]) -> DeviceValues:
        with devices_errors():
            return device_tools.put(per_core, self._local_devices)

    def _counters(self) -> dict[str, np.ndarray]:
        now = self.manifest["global_step"] + self.steps
        counters = [i for i in self.inputs if i.default == "step"]
        return {i.name: np.full(i.shape, now, i.dtype) for i in counters}

    def _checked(self, given: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
        """Returns, for the name of each given input, its value on each of this process's cores.

        `given` are the arrays that the caller gave, by name. Raises a StepError if an input is
        missing, unknown, or of another shape or dtype.
        """
        missing = [i.name for i in self.inputs if i.default is None and i.name not in given]
        unknown = [name for name in given if name not in self._given]
        if missing or unknown:
            problem = f"misses {missing}" if missing else f"was given {unknown}, unknown to it"
            wanted = "; ".join(str(i) for i in self.inputs if i.default is None)
            raise StepError(f"The step {problem}. Give it these: {wanted or 'none'}.")
        found = {}
        for expected in self.inputs:
            if expected.name in given:
                value = np.asarray(given[expected.name])
                if value.dtype.kind == "V" and value.dtype.itemsize == expected.dtype.itemsize:
                    value = value.view(expected.dtype)  # numpy's files do not know bfloat16
                if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                    raise StepError(
                        f"The input {expected.name!r} is {value.dtype.name}{list(value.shape)}, "
                        f"and the step reads {expected.dtype.name}{list(expected.shape)}. Cast or "
                        "cut it, or export the step for such a batch."
                    )
                # A copy: the caller may write to the array while the step waits.
                value = np.array(value)
                rows = self._given[expected.name]["rows"]
                found[expected.name] = [
                    value[rows[core]] if _is_split(rows) else value for core in self.cores
                ]
        return found


def inputs_of(manifest: Mapping[str, Any]) -> tuple[Input, ...]:
    """Returns the inputs of a step, in the order in which its manifest lists them."""
    found = []
    for p in manifest["parameters"]:
        if p["kind"] == "input":
            front = (max(p["rows"]) + 1,) if _is_split(p["rows"]) else ()
            shape = (*front, *p["shape"])
            found.append(Input(p["name"], shape, dtype_of(p["dtype"]), p["default"]))
    return tuple(found)


def _is_split(rows: Sequence[int]) -> bool:
    """Returns whether cores read different rows of an input; `rows` has each core's row number."""
    return max(rows) > 0
