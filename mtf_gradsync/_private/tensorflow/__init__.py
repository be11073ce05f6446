"""What this package uses of TensorFlow that has no public name, one function each.

All were read on TensorFlow 2.12 to 2.21; ``tests/private`` has a test of each that fails where a
version means something else.
"""

from mtf_gradsync._private.tensorflow.graphs import (
    TracedFunction,
    control_flow_context,
    control_flow_v1,
    replace_capture,
    set_attr,
    trace_function,
    variable_key,
    variables_written,
)
from mtf_gradsync._private.tensorflow.optimizers import (
    MovingAverageSettings,
    create_slots,
    each_inside,
    hyperparameters,
    moving_average_settings,
    number_of_tpu_shards,
    optimizers_inside,
)
from mtf_gradsync._private.tensorflow.sessions import (
    add_saving_listeners,
    session_interface,
    singular_monitored_session,
    summary_writers,
)
from mtf_gradsync._private.tensorflow.sums import collective_sum, local_devices, write_to_own_memory
from mtf_gradsync._private.tensorflow.tpu_programs import (
    TOGETHER_ATTR,
    TPU_PROGRAM_ATTR,
    kernel_devices,
    summed_together,
    tpu_replicate_context,
    tpu_replicate_metadata,
    tpu_replicated_input,
    tpu_shard_context,
)
from mtf_gradsync._private.tensorflow.xla import (
    GATHERS,
    PASSES_ON,
    BridgeError,
    cross_replica_gather,
    cross_replica_rows,
    cross_replica_scatter,
    eager_mode,
    function_hlo,
    hlo_module,
    profile_space,
    with_own_types,
    xla_custom_call,
    xla_element_types,
)

__all__ = [
    "GATHERS",
    "PASSES_ON",
    "TOGETHER_ATTR",
    "TPU_PROGRAM_ATTR",
    "BridgeError",
    "MovingAverageSettings",
    "TracedFunction",
    "add_saving_listeners",
    "collective_sum",
    "control_flow_context",
    "control_flow_v1",
    "create_slots",
    "cross_replica_gather",
    "cross_replica_rows",
    "cross_replica_scatter",
    "each_inside",
    "eager_mode",
    "function_hlo",
    "hlo_module",
    "hyperparameters",
    "kernel_devices",
    "local_devices",
    "moving_average_settings",
    "number_of_tpu_shards",
    "optimizers_inside",
    "profile_space",
    "replace_capture",
    "session_interface",
    "set_attr",
    "singular_monitored_session",
    "summary_writers",
    "summed_together",
    "tpu_replicate_context",
    "tpu_replicate_metadata",
    "tpu_replicated_input",
    "tpu_shard_context",
    "trace_function",
    "variable_key",
    "variables_written",
    "with_own_types",
    "write_to_own_memory",
    "xla_custom_call",
    "xla_element_types",
]
