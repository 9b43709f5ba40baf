"""Paged KV-cache block manager and scheduler for LLM serving engines."""

from kvcore.block_manager import BlockManager, BlockTable
from kvcore.counters import Counter
from kvcore.errors import InvariantError, KVCoreError, OutOfBlocks, RequestRefused
from kvcore.gauges import Gauges
from kvcore.pool import BlockPool
from kvcore.scheduler import Reason, Resumed, Scheduler, Step, Verdict

__version__ = "0.1.0"

__all__ = [
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "Counter",
    "Gauges",
    "InvariantError",
    "KVCoreError",
    "OutOfBlocks",
    "Reason",
    "RequestRefused",
    "Resumed",
    "Scheduler",
    "Step",
    "Verdict",
]
