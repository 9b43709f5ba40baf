"""Paged KV-cache block manager and scheduler for LLM serving engines."""

from kvcore.block_manager import AllocationPlan, BlockManager, BlockTable
from kvcore.counters import Counter
from kvcore.errors import InvariantError, KVCoreError, OutOfBlocks, RequestRefused
from kvcore.eviction import LRU, Retention, RetentionPriority, SegmentedLRU
from kvcore.gauges import Gauges
from kvcore.identity import BlockKey, Media, MediaPart, Namespace, decode_key
from kvcore.pool import BlockPool, EvictionPolicy
from kvcore.prefix_index import Identity, PrefixIndex, Prompt
from kvcore.prefix_log import Cleared, Removed, Stored
from kvcore.prefix_pin import PrefixPin
from kvcore.scheduler import Reason, Request, Resumed, Scheduler, Step, Verdict

__version__ = "0.1.0"

__all__ = [
    "LRU",
    "AllocationPlan",
    "BlockKey",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "Cleared",
    "Counter",
    "EvictionPolicy",
    "Gauges",
    "Identity",
    "InvariantError",
    "KVCoreError",
    "Media",
    "MediaPart",
    "Namespace",
    "OutOfBlocks",
    "PrefixIndex",
    "PrefixPin",
    "Prompt",
    "Reason",
    "Removed",
    "Request",
    "RequestRefused",
    "Resumed",
    "Retention",
    "RetentionPriority",
    "Scheduler",
    "SegmentedLRU",
    "Step",
    "Stored",
    "Verdict",
    "decode_key",
]
