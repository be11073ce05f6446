"""Predicts what a training step costs on TPU chips, for each mesh, without having the chips."""

from mtf_gradsync.runtimes.xla.topology.chips import CHIPS, Chip
from mtf_gradsync.tools.planning.machines import bytes_sent, factorizations
from mtf_gradsync.tools.planning.plan import plan
from mtf_gradsync.tools.planning.result import AxisTraffic, FewerMessages, Plan, PlanRow, Refused
from mtf_gradsync.tools.planning.search import Built, model_flops

__all__ = [
    "CHIPS",
    "AxisTraffic",
    "Built",
    "Chip",
    "FewerMessages",
    "Plan",
    "PlanRow",
    "Refused",
    "bytes_sent",
    "factorizations",
    "model_flops",
    "plan",
]
