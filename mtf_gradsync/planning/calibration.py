"""Measures what CPU devices of this machine do in a second, by small programs of jax."""

from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

_CHAIN = 20
_WIDTH = 256
_SMALL, _LARGE = 256, 65536  # floats
_ROUNDS = 5


class Rates(NamedTuple):
    """Seconds on the clock while all devices do the same at once.

    Attributes:
      run: of a program that does nothing.
      operation: of an operation on next to no data.
      flop: of a floating-point operation in a product of matrices.
      byte: of a byte read or written.
      sums: members of a group -> of an all-reduce of next to no data, and of a byte put in.
    """

    run: float
    operation: float
    flop: float
    byte: float
    sums: dict[int, tuple[float, float]]


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

    def timed(step: Callable[[Any], Any], size: int) -> float:
        """Seconds of a program that makes a vector from a vector on each device."""
        program = jax.pmap(step, axis_name="core", devices=devices)
        value = jax.device_put_sharded([np.full(size, 0.5, np.float32)] * count, devices)
        program(value).block_until_ready()
        seconds = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            program(value).block_until_ready()
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds))

    def products(width: int) -> Callable[[Any], Any]:
        def step(x: Any) -> Any:
            x = x.reshape(-1, width)
            for _ in range(_CHAIN):
                x = jnp.tanh(x @ x)
            return x.reshape(-1)

        return step

    def passes(x: Any) -> Any:
        return jax.lax.fori_loop(0, 4 * _CHAIN, lambda i, v: v * 0.999 + 0.001, x)

    def sums(members: int) -> Callable[[Any], Any]:
        groups = np.arange(count).reshape(-1, members).tolist()

        def step(x: Any) -> Any:
            for _ in range(_CHAIN):
                x = jax.lax.psum(x, "core", axis_index_groups=groups) * (1 / members)
            return x

        return step

    run = timed(lambda x: x, _SMALL)
    operation = max(0.0, timed(products(16), 256) - run) / (2 * _CHAIN)
    product = max(0.0, timed(products(_WIDTH), _WIDTH**2) - run) / _CHAIN - 2 * operation
    flop = max(0.0, product) / (2 * _WIDTH**3)
    # A pass reads a vector and writes one.
    byte = max(0.0, timed(passes, _LARGE) - timed(passes, 16)) / (4 * _CHAIN * 8 * _LARGE)
    found = {}
    for members in range(2, count + 1):
        if count % members == 0:
            small = max(0.0, timed(sums(members), _SMALL) - run) / _CHAIN
            large = max(0.0, timed(sums(members), _LARGE) - run) / _CHAIN
            each = max(0.0, large - small) / (4 * (_LARGE - _SMALL))
            found[members] = (max(0.0, small - operation), each)
    return Rates(run, operation, flop, byte, found)
