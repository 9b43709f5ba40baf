"""Paged KV-cache block manager and scheduler for LLM serving engines."""

from kvcore.block_manager import BlockManager, BlockTable
from kvcore.counters import Counter
from kvcore.errors import InvariantError, KVCoreError, OutOfBlocks, RequestRefused
from kvcore.gauges import Gauges
from kvcore.identity import BlockKey, Media, MediaPart, Namespace, decode_key
from kvcore.pool import BlockPool
from kvcore.prefix_log import Cleared, Removed, Stored
from kvcore.scheduler import Reason, Resumed, Scheduler, Step, Verdict

__version__ = "0.1.0"

__all__ = [
    "BlockKey",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "Cleared",
    "Counter",
    "Gauges",
    "InvariantError",
    "KVCoreError",
    "Media",
    "MediaPart",
    "Namespace",
    "OutOfBlocks",
    "Reason",
    "Removed",
    "RequestRefused",
    "Resumed",
    "Scheduler",
    "Step",
    "Stored",
    "Verdict",
    "decode_key",
]
