"""Sums that are foreseen for gradients, held against those that are built."""

import numpy as np

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending import PendingSums

# Sums of some dozen terms, and chains of products of them; SIMD programs sum in float32.
EPS = {"simd": 2.0**10 * np.finfo(np.float32).eps, "placement": 2.0**10 * np.finfo(float).eps}


def check_foreseen(lowering):
    """Compares, for each tensor of each operation that was followed, foreseen and met axes."""
    lowered = PendingSums.of_lowering(lowering)
    for operation in lowered.flow.operations:
        for tensor in operation.outputs:
            value = lowering.tensors.get(tensor)
            if value is not None:
                met = value.mesh_axes if isinstance(value, mtf.LazyAllreduceSum) else ()
                assert lowered.flow.axes.get(tensor, frozenset()) == set(met), operation
