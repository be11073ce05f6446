"""Functions of jaxlib without a public name, for programs of HLO in benchmarks and tests.

They were checked with jaxlib 0.4.34, 0.4.38, 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

from typing import Any


def hlo_from_text(text: str) -> bytes:
    """Returns a serialized ``HloModuleProto`` from the text that XLA prints."""
    return _hlo().hlo_module_from_text(text).as_serialized_hlo_module_proto()


def stablehlo_flops(module: str, device: Any) -> float:
    """Returns XLA's count of a StableHLO module's floating-point operations.

    `module` is the module's text. `device` is any device of jax, whose compiler does the counting.
    The operations in a loop are counted for one iteration.
    """
    # Imported here so that a test can load this file alone.
    from mtf_gradsync.runtimes._private.jax import stablehlo_to_hlo

    read = _hlo().HloModule.from_serialized_hlo_module_proto(stablehlo_to_hlo(module))
    try:
        from jaxlib import _jax as library
    except ImportError:
        from jaxlib.xla_client import _xla as library
    return library.hlo_module_cost_analysis(device.client, read).get("flops", 0.0)


def _hlo() -> Any:
    from jaxlib import xla_client

    return getattr(xla_client, "hlo", None) or xla_client._xla
