"""Predicts what a training step costs on TPU chips, on each mesh, without the chips."""

from mtf_gradsync.planning.machines import bytes_sent, factorizations
from mtf_gradsync.planning.plan import plan
from mtf_gradsync.planning.result import AxisTraffic, FewerMessages, Plan, PlanRow, Refused
from mtf_gradsync.planning.search import Built, model_flops
from mtf_gradsync.xla.topology.chips import CHIPS, Chip

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
