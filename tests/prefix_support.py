"""What the tests of prefix sharing share: managers, ways to compute tokens, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from scenario_support import Checked, admitted, found_cached, manager_state, refused

from kvcore import BlockManager, BlockPool, Counter, OutOfBlocks, Scheduler, Step
from kvcore.prefix_index import Identity, PrefixIndex

Compute = Callable[..., None]


def sharing_manager(
    num_blocks: int, block_size: int, *, hash_bits: int = 63, **options: Any
) -> BlockManager:
    """A checked manager that shares prefixes; 0 ``hash_bits`` make all its hashes equal."""
    pool = BlockPool(num_blocks)
    PrefixIndex(pool, block_size, hash_bits=hash_bits)
    bm = BlockManager(num_blocks, block_size, pool=pool, prefix_caching=True, **options)
    return cast(BlockManager, Checked(bm, bm.check))


def sharing_scheduler(bm: BlockManager, watermark_blocks: int = 0, **options: Any) -> Scheduler:
    plain = cast(Checked, bm).target
    scheduler = Scheduler(plain, watermark_blocks, **options)
    return cast(Scheduler, Checked(scheduler, plain.check))


def index_of(bm: BlockManager) -> PrefixIndex:
    index = bm.pool.index
    assert index is not None
    return index


def words(block_size: int, *names: int) -> list[int]:
    """One block of tokens for each name; blocks of different names share no token."""
    return [name * block_size + offset for name in names for offset in range(block_size)]


def lookup(bm: BlockManager, tokens: Sequence[int], **identity: Any) -> int:
    """How many leading blocks of ``tokens`` are found; one more token makes all usable."""
    return bm.match([*tokens, 0], **identity) // bm.block_size


def identities(bm: BlockManager) -> dict[int, Identity]:
    """The identity of each block that has one; three ways to ask for it agree."""
    index = index_of(bm)
    uids = index.uids()
    found: dict[int, Identity] = {}
    for block in range(bm.num_blocks):
        identity = index.identity(block)
        assert int(uids[block]) == (0 if identity is None else identity.uid)
        if identity is not None:
            found[block] = identity
    assert len(index) == len(found)
    return found


def prefix_state(bm: BlockManager) -> dict[str, Any]:
    """All that a refused call must leave as it was, also in the index."""
    index = index_of(bm)
    return manager_state(bm) | {
        "identities": identities(bm),
        "known": {seq: bm.tokens(seq).tolist() for seq in bm},
        "published": {seq: (bm.known(seq), bm.published(seq)) for seq in bm},
        "publications": (index.collisions, index.duplicates),
        "epoch": (bm.epoch, index.epoch),
    }


def no_room(bm: BlockManager, call: Callable[[], object], needed: int, available: int) -> None:
    """``call`` meets a shortage ten times over, says its numbers, and changes nothing."""
    caught = refused(OutOfBlocks, call, unchanged=lambda: prefix_state(bm))
    shortage = cast(OutOfBlocks, caught.value)
    assert (shortage.needed, shortage.available) == (needed, available)


# ---------------------------------------------------------------- ways to compute a sequence


def compute_prompt(bm: BlockManager, seq: Hashable, tokens: list[int], **identity: Any) -> None:
    bm.allocate(seq, tokens=tokens, **identity)
    bm.commit(seq)


def compute_in_chunks(bm: BlockManager, seq: Hashable, tokens: list[int], **identity: Any) -> None:
    bm.allocate(seq, tokens=tokens, **identity)
    for settled in range(0, len(tokens) + 1, 3):
        bm.commit(seq, n_settled=settled)
    bm.commit(seq, n_settled=len(tokens))


def compute_singly(bm: BlockManager, seq: Hashable, tokens: list[int], **identity: Any) -> None:
    bm.allocate(seq, 0, **identity)
    for token in tokens:
        bm.append_slot(seq)
        bm.commit(seq, [token])


def compute_in_bulk(bm: BlockManager, seq: Hashable, tokens: list[int], **identity: Any) -> None:
    bm.allocate(seq, 0, **identity)
    bm.append_slots(seq, len(tokens))
    bm.commit(seq, tokens)


def compute_as_batch(bm: BlockManager, seq: Hashable, tokens: list[int], **identity: Any) -> None:
    bm.allocate(seq, 0, **identity)
    rows = np.full(len(tokens), bm.row(seq), np.int32)
    served, _ = bm.append_batch(rows, np.zeros(len(tokens), np.int64))
    assert served == len(tokens)
    bm.commit_batch(rows, np.array(tokens, np.int32))


COMPUTES = {
    "prompt": compute_prompt,
    "chunks": compute_in_chunks,
    "one by one": compute_singly,
    "in bulk": compute_in_bulk,
    "batch": compute_as_batch,
}
every_compute = pytest.mark.parametrize("compute", COMPUTES.values(), ids=list(COMPUTES))
every_hash = pytest.mark.parametrize("hash_bits", [0, 63], ids=["constant hash", "keyed hash"])
with_and_without_sharing = pytest.mark.parametrize("sharing", [False, True], ids=["off", "on"])


def compute_together(
    bm: BlockManager, seqs: Sequence[Hashable], tokens: list[int], **identity: Any
) -> list[int]:
    """Sequences of the same tokens in one step: no one can hit what another computes.

    Returns the first block of each.
    """
    for seq in seqs:
        assert bm.allocate(seq, tokens=tokens, **identity) == 0
    blocks = [int(bm.tables[seq][0]) for seq in seqs]
    for seq in seqs:
        bm.commit(seq)
    return blocks


def engine_step(bm: BlockManager, scheduler: Scheduler, decoded: Mapping[Hashable, int]) -> Step:
    """One step whose prefills and decodes are run and settled at once.

    ``decoded``: the token that each sequence decodes.
    """
    step = scheduler.step()
    assert len(found_cached(step)) == len(admitted(step))
    for seq, _ in admitted(step):
        bm.commit(seq)
    for seq in step:
        bm.commit(seq, [decoded[seq]])
    return step


def counted(bm: BlockManager, *counters: Counter) -> tuple[int, ...]:
    return tuple(int(bm.counters[counter]) for counter in counters)
