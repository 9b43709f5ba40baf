"""The policies by the names that the command line gives them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvcore.admission import Admission, PredictedPeak, ToCompletion, Watermark
from kvcore.order import FCFS, FairShare, Order, Priority, ShortestJob
from kvcore.resume_cost import ResumeCost
from kvcore.victim import CheapestToResume, LowestPriority, Newest, Victim

__all__ = ["ADMISSIONS", "ORDERS", "SWAPS", "VICTIMS", "admission_of", "victim_of"]

ORDERS: dict[str, Callable[[], Order]] = {
    "fcfs": FCFS,
    "priority": Priority,
    "shortest": ShortestJob,
    "fair": FairShare,
}
VICTIMS = ("newest", "priority", "cheapest")
ADMISSIONS = ("watermark", "to-completion", "predicted-peak")
SWAPS = ("always", "cheapest")


def victim_of(name: str, cost: ResumeCost, *, swaps: bool) -> Callable[[], Victim]:
    """Return what makes the policy of that name; can be pickled."""
    if name == "cheapest":
        return partial(CheapestToResume, cost, swaps)
    return {"newest": Newest, "priority": LowestPriority}[name]


def admission_of(name: str, watermark_blocks: int) -> Callable[[], Admission]:
    """Return what makes the policy of that name; can be pickled."""
    if name == "watermark":
        return partial(Watermark, watermark_blocks)
    return {"to-completion": ToCompletion, "predicted-peak": PredictedPeak}[name]
