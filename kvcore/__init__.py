"""Paged KV-cache block manager and scheduler for LLM serving engines."""

from kvcore.admission import Admission, PredictedPeak, ToCompletion, Watermark
from kvcore.block_manager import AllocationPlan, AppendPlan, BlockManager, BlockTable
from kvcore.counters import Counter
from kvcore.errors import InvariantError, KVCoreError, OutOfBlocks, RequestRefused
from kvcore.eviction import LRU, Retention, RetentionPriority, SegmentedLRU
from kvcore.gauges import Gauges
from kvcore.identity import BlockKey, Media, MediaPart, Namespace, decode_key
from kvcore.order import FCFS, FairShare, Order, Priority, ShortestJob
from kvcore.pool import BlockPool, EvictionPolicy
from kvcore.prefix_index import Identity, PrefixIndex, Prompt
from kvcore.prefix_log import Cleared, Removed, Stored
from kvcore.prefix_pin import PrefixPin
from kvcore.request import Member, Reason, Request, Resumed, Verdict
from kvcore.resources import BlocksOf, Resource, SharedSlots, Slots
from kvcore.resume_cost import ResumeCost, SwapCandidate, SwapRule
from kvcore.running_view import RunningView
from kvcore.scheduler import Scheduler
from kvcore.step import SchedulerCounters, Step, StepStats
from kvcore.victim import CheapestToResume, LowestPriority, Newest, Victim

__version__ = "0.1.0"

__all__ = [
    "FCFS",
    "LRU",
    "Admission",
    "AllocationPlan",
    "AppendPlan",
    "BlockKey",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "BlocksOf",
    "CheapestToResume",
    "Cleared",
    "Counter",
    "EvictionPolicy",
    "FairShare",
    "Gauges",
    "Identity",
    "InvariantError",
    "KVCoreError",
    "LowestPriority",
    "Media",
    "MediaPart",
    "Member",
    "Namespace",
    "Newest",
    "Order",
    "OutOfBlocks",
    "PredictedPeak",
    "PrefixIndex",
    "PrefixPin",
    "Priority",
    "Prompt",
    "Reason",
    "Removed",
    "Request",
    "RequestRefused",
    "Resource",
    "ResumeCost",
    "Resumed",
    "Retention",
    "RetentionPriority",
    "RunningView",
    "Scheduler",
    "SchedulerCounters",
    "SegmentedLRU",
    "SharedSlots",
    "ShortestJob",
    "Slots",
    "Step",
    "StepStats",
    "Stored",
    "SwapCandidate",
    "SwapRule",
    "ToCompletion",
    "Verdict",
    "Victim",
    "Watermark",
    "decode_key",
]
