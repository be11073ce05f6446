"""Measures what CPU devices of this machine do in a second, by small programs of jax."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

_CHAIN = 20
_ROUNDS = 15
# Products of square matrices of these widths; long chains of small ones, short ones of large.
_WIDTHS = {32: 20, 64: 20, 128: 20, 256: 5, 512: 3}
#: Width of the products between which all-reduces are measured, too.
LOAD = 128
# Floats that each core puts into a sum.
_SIZES = (256, LOAD**2, 131072)
# Floats of all devices together, as a step's own tensors are divided among them.
_PASS = 2**20

_Step = Callable[[Any], Any]


class Rates(NamedTuple):
    """Seconds on the clock while all devices do the same at once.

    Attributes:
      run: of a program that does nothing.
      operation: of an operation on next to no data.
      products: width of square matrices -> of a floating-point operation in their product.
      byte: of a byte read or written.
      sums: members of a group -> (bytes that each puts in, seconds of an all-reduce), by size.
      waits: members of a group -> what an all-reduce takes more after a product of matrices of
        width `LOAD`, where members wait for each other and other groups may work meanwhile.
    """

    run: float
    operation: float
    products: dict[int, float]
    byte: float
    sums: dict[int, tuple[tuple[float, float], ...]]
    waits: dict[int, float]

    def product(self, batch: int, m: int, n: int, k: int) -> float:
        """Seconds of products of [m, k] and [k, n], as of cubes of the same volume."""
        width = (m * n * k) ** (1 / 3)
        widths = sorted(self.products)
        flop = np.interp(np.log(width), np.log(widths), [self.products[w] for w in widths])
        return float(2.0 * batch * m * n * k * flop)

    def all_reduce(self, members: int, size: float) -> float:
        """Seconds of an all-reduce in groups that nobody waits for."""
        sizes, seconds = zip(*self.sums[members])
        if size > sizes[-1]:
            return float(seconds[-1] * size / sizes[-1])
        return float(np.interp(size, sizes, seconds))

    def wait(self, members: int, work: float) -> float:
        """Seconds that members of a group wait for the last of them.

        Args:
          members: of the group.
          work: seconds of each member's work since they last met. What makes one of them late adds
            up by chance, and so grows with the root of it.
        """
        measured = self.products[LOAD] * 2 * LOAD**3
        return self.waits[members] * math.sqrt(work / measured)


def measure(devices: Sequence[Any]) -> Rates:
    """Measures what devices do when all of them work.

    Args:
      devices: jax CPU devices.

    Returns:
      The rates; for all-reduces in groups of each size that divides the number of devices.
    """
    import jax
    import jax.numpy as jnp

    count = len(devices)
    floats = max(1, _PASS // count)
    groups = {
        members: np.arange(count).reshape(-1, members).tolist()
        for members in range(2, count + 1)
        if count % members == 0
    }

    def chain(length: int, among: list[list[int]] | None, is_loaded: bool = True) -> _Step:
        def step(x: Any) -> Any:
            for _ in range(length):
                if is_loaded:
                    x = jnp.tanh(x @ x)
                if among:
                    x = jax.lax.psum(x, "core", axis_index_groups=among) * (1 / len(among[0]))
            return x

        return step

    def passes(x: Any) -> Any:
        return jax.lax.fori_loop(0, _CHAIN, lambda i, v: v * 0.999 + 0.001, x)

    # What makes an array from an array on each device, and the array's shape.
    programs: dict[Any, tuple[_Step, tuple[int, ...]]] = {
        "run": (lambda x: x, (256,)),
        "operations": (chain(_CHAIN, None), (16, 16)),
        "passes": (passes, (floats,)),
    }
    for width, length in _WIDTHS.items():
        programs["product", width] = (chain(length, None), (width, width))
    for members, among in groups.items():
        programs["loaded", members] = (chain(_CHAIN, among), (LOAD, LOAD))
        for size in _SIZES:
            programs["alone", members, size] = (chain(_CHAIN, among, False), (size,))
    seconds = _timed(programs, devices)

    def each(name: Any, length: int = _CHAIN) -> float:
        return float(max(0.0, np.median(seconds[name] - seconds["run"])) / length)

    waits = {
        # Round by round: what slows the machine down slows all of a round down.
        members: float(
            max(
                0.0,
                np.median(
                    (seconds["loaded", members] - seconds["alone", members, LOAD**2]) / _CHAIN
                    - (seconds["product", LOAD] - seconds["run"]) / _WIDTHS[LOAD]
                ),
            )
        )
        for members in groups
    }
    return Rates(
        run=float(np.median(seconds["run"])),
        # A product and the function after it.
        operation=each("operations") / 2,
        products={w: each(("product", w), n) / (2 * w**3) for w, n in _WIDTHS.items()},
        # A pass reads a vector and writes one.
        byte=each("passes") / (8 * floats),
        sums={
            members: tuple((4.0 * size, each(("alone", members, size))) for size in _SIZES)
            for members in groups
        },
        waits=waits,
    )


def _timed(
    programs: dict[Any, tuple[_Step, tuple[int, ...]]], devices: Sequence[Any]
) -> dict[Any, np.ndarray]:
    """Seconds of each program in each round; a round runs each of them once."""
    import jax

    ready = {}
    spread = jax.pmap(lambda x: x, devices=devices)
    for name, (step, shape) in programs.items():
        program = jax.pmap(step, axis_name="core", devices=devices)
        value = spread(np.full((len(devices), *shape), 0.01, np.float32))
        program(value).block_until_ready()
        ready[name] = program, value
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(_ROUNDS):
        for name, (program, value) in ready.items():
            start = time.perf_counter()
            program(value).block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}
