"""Cluster K5: identity keys, of adapters, media, salts, hashes and epochs.

Everything that changes the numbers inside a block belongs in its identity, typed and
framed by length; and even then the key only finds candidates, and equality decides.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefix_support import (
    Compute,
    compute_prompt,
    compute_together,
    engine_step,
    every_compute,
    every_hash,
    identities,
    index_of,
    lookup,
    no_room,
    prefix_state,
    sharing_manager,
    sharing_scheduler,
    words,
)
from scenario_support import Append, every_append, every_block_size, found_cached

import kvcore
from kvcore import BlockManager
from kvcore.content_ids import ContentIds
from kvcore.identity import Media, Namespace, block_keys, decode_key, has_media

every_number_of_bits = pytest.mark.parametrize("hash_bits", [0, 1, 2, 63])

TELL_APART: dict[str, tuple[Any, ...]] = {
    "K5_01 two adapters and none": (None, Namespace(lora="a"), Namespace(lora="b")),
    "K5_02 two adapters of one name": (
        Namespace(lora="unique 1", extra=(("name", "x"),)),
        Namespace(lora="unique 2", extra=(("name", "x"),)),
        Namespace(lora="unique 1", extra=(("name", "y"),)),
    ),
    "K5_02 the id beside the name": (
        Namespace(lora="x", extra=(("id", 1),)),
        Namespace(lora="x", extra=(("id", 2),)),
        Namespace(lora="x"),
    ),
    "K5_03 an adapter reloaded in place": (
        Namespace(lora="x", lora_version=1),
        Namespace(lora="x", lora_version=2),
        Namespace(lora="x", lora_version=0),
        Namespace(lora="x"),
    ),
    "K5_08 adapter or salt": (
        Namespace(lora="x"),
        Namespace(salt="x"),
        Namespace(model="x"),
        Namespace(extra=(("salt", "x"),)),
        Namespace(extra=(("x", "x"),)),
        Namespace(salt=b"x"),
    ),
    "K5_08 where one part ends": (
        Namespace(lora="ab", salt="c"),
        Namespace(lora="a", salt="bc"),
        Namespace(model="ab", lora="c"),
        Namespace(model="a", lora="bc"),
        Namespace(extra=(("ab", "c"),)),
        Namespace(extra=(("a", "bc"),)),
        Namespace(salt="abc"),
        # A part that spells what stands between two others.
        Namespace(extra=(("as", "b"),)),
        Namespace(extra=(("a", "sb"),)),
        Namespace(lora="a\x03sb"),
        Namespace(lora="a", salt="b"),
    ),
}


@pytest.mark.parametrize("namespaces", TELL_APART.values(), ids=list(TELL_APART))
@every_compute
@every_block_size
@every_hash
def test_K5_01_K5_02_K5_03_K5_08_equal_tokens_are_shared_within_one_namespace_only(
    hash_bits: int, block_size: int, compute: Compute, namespaces: tuple[Any, ...]
) -> None:
    """Each namespace computes the same tokens, asks for those of all, and finds its own."""
    bm = sharing_manager(2 * len(namespaces) + 1, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2)
    for number, namespace in enumerate(namespaces):
        assert [lookup(bm, tokens, namespace=name) for name in namespaces] == [
            2 if other < number else 0 for other in range(len(namespaces))
        ]
        compute(bm, number, tokens, namespace=namespace)
    assert len({identity.uid for identity in identities(bm).values()}) == 2 * len(namespaces)
    for number, namespace in enumerate(namespaces):
        assert bm.allocate("hit", tokens=[*tokens, 5], namespace=namespace) == 2 * block_size
        assert bm.tables["hit"][:2] == bm.tables[number][:2]
        bm.free_seq("hit")


# ---------------------------------------------------------------- media


@pytest.mark.parametrize("namespace", [None, "tenant"])
@every_block_size
@every_hash
def test_K5_04_equal_placeholders_of_different_items_are_different_content(
    hash_bits: int, block_size: int, namespace: str | None
) -> None:
    bm = sharing_manager(24, block_size, hash_bits=hash_bits)
    placeholders = [7] * (2 * block_size)
    tokens = [*words(block_size, 1), *placeholders, *words(block_size, 2)]

    def picture(digest: bytes) -> Media:
        return Media(block_size, 3 * block_size, digest)

    def found(*media: Media) -> int:
        return lookup(bm, tokens, namespace=namespace, media=media)

    compute_prompt(bm, "cat", tokens, namespace=namespace, media=[picture(b"cat")])
    assert found(picture(b"cat")) == 4
    assert found(picture(b"dog")) == 1, "the text before the picture still hits"
    assert found() == 1
    compute_prompt(bm, "dog", tokens, namespace=namespace, media=[picture(b"dog")])
    compute_prompt(bm, "none", tokens, namespace=namespace)
    assert [found(picture(b"cat")), found(picture(b"dog")), found()] == [4, 4, 4]
    tables = [list(bm.tables[seq]) for seq in ("cat", "dog", "none")]
    assert len({table[0] for table in tables}) == 1
    for column in (1, 2, 3):
        assert len({table[column] for table in tables}) == 3


@every_block_size
@every_hash
def test_K5_04_the_same_item_at_another_place_of_the_same_tokens_is_different_content(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    tokens = [7] * (3 * block_size)
    here = Media(block_size, 2 * block_size, b"cat")
    compute_prompt(bm, "A", tokens, media=[here])
    assert lookup(bm, tokens, media=[here]) == 3
    for start in range(2 * block_size + 1):
        there = Media(start, start + block_size, b"cat")
        if there != here:
            assert lookup(bm, tokens, media=[there]) == (start > block_size)
    for stop in range(block_size + 1, 3 * block_size + 1):
        longer = Media(block_size, stop, b"cat")
        if longer != here:
            assert lookup(bm, tokens, media=[longer]) == 1


@every_block_size
@every_hash
def test_K5_04_items_of_a_prompt_may_be_given_in_any_order_but_not_exchanged(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    tokens = [7] * (3 * block_size)
    spans = [(0, 1), (block_size, block_size + 1), (2 * block_size, 3 * block_size)]
    right = [Media(*span, digest) for span, digest in zip(spans, (b"a", b"b", b"c"), strict=True)]
    compute_prompt(bm, "A", tokens, media=right)
    for order in permutations(right):
        assert lookup(bm, tokens, media=order) == 3
    for digests in permutations((b"a", b"b", b"c")):
        media = [Media(*span, digest) for span, digest in zip(spans, digests, strict=True)]
        same = [given == wanted for given, wanted in zip(media, right, strict=True)]
        assert lookup(bm, tokens, media=media) == [*same, False].index(False)


@every_block_size
@every_hash
def test_K5_05_every_bit_of_a_content_digest_counts(hash_bits: int, block_size: int) -> None:
    digests = [(1 << bit).to_bytes(32, "little") for bit in range(0, 256, 5)]
    digests += [bytes(32), bytes(8), bytes(2), bytes(1), bytes(33)]
    bm = sharing_manager(len(digests), block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1)
    for number, digest in enumerate(digests):
        media = [Media(0, block_size, digest)]
        assert lookup(bm, tokens, media=media) == 0
        compute_prompt(bm, number, tokens, media=media)
    assert len({identity.key for identity in identities(bm).values()}) == len(digests)
    for digest in digests:
        assert lookup(bm, tokens, media=[Media(0, block_size, digest)]) == 1


@pytest.mark.parametrize("namespace", [None, "tenant"])
@every_block_size
@every_hash
def test_K5_06_an_item_is_part_of_exactly_the_blocks_that_its_tokens_are_in(
    hash_bits: int, block_size: int, namespace: str | None
) -> None:
    """The end of an item is exclusive: one that ends on a boundary is not in the block
    behind it. All spans over three blocks, aligned and not."""
    tokens = words(block_size, 1, 2, 3)
    starts = sorted({edge + by for edge in (0, block_size, 2 * block_size) for by in (0, 1)})
    stops = sorted({edge - by for edge in (block_size, 2 * block_size, 3 * block_size)
                    for by in (0, 1)})  # fmt: skip
    for start, stop in product(starts, stops):
        if not 0 <= start < stop <= 3 * block_size:
            continue
        bm = sharing_manager(3, block_size, hash_bits=hash_bits)
        compute_prompt(bm, "A", tokens, namespace=namespace, media=[Media(start, stop, b"cat")])
        for column, block in enumerate(bm.tables["A"]):
            overlaps = start < (column + 1) * block_size and column * block_size < stop
            key = index_of(bm).identity(block).key
            assert has_media(key) == overlaps
            parts = decode_key(key)
            assert (parts.namespace is not None) == (namespace is not None and column == 0)
            expected = [(b"cat", start - column * block_size, stop - start)] if overlaps else []
            assert [tuple(part) for part in parts.media] == expected


@every_block_size
@every_hash
def test_K5_06_recomputing_from_the_item_gives_the_content_of_a_full_computation(
    hash_bits: int, block_size: int
) -> None:
    bm = sharing_manager(6, block_size, hash_bits=hash_bits)
    tokens = [*words(block_size, 1), *[7] * block_size, *words(block_size, 2)]
    item = [Media(block_size, 2 * block_size, b"cat")]
    assert set(block_keys(b"", item, len(tokens), block_size)) == {1}
    compute_prompt(bm, "full", tokens, media=item)

    def contents(seq: str) -> list[tuple[list[int], bytes]]:
        found = [index_of(bm).identity(block) for block in bm.tables[seq]]
        return [(identity.tokens, identity.key) for identity in found]

    full = contents("full")
    bm.free_seq("full")
    assert bm.evict(2) == 2
    assert bm.allocate("again", tokens=tokens, media=item) == block_size
    assert bm.commit("again") == 2
    assert contents("again") == full
    assert lookup(bm, tokens, media=item) == 3


# ---------------------------------------------------------------- salts and framing


def test_K5_08_no_two_combinations_of_parts_have_one_key() -> None:
    values = [None, "a", "b", "ab", "s", "a\x03sb", b"a", b"ab", b"a\x03sb"]
    versions = [None, 0, 1, 97]
    extras: list[tuple[tuple[str, Any], ...]] = [
        (), (("a", "b"),), (("a", b"b"),), (("ab", "a"),), (("a", 1),), (("a", "a"), ("b", "b")),
        (("as", "b"),), (("a", "sb"),), (("a", "a\x04bsb"),),
    ]  # fmt: skip
    keys = {
        Namespace(model, lora, version, salt, extra).key()
        for model, lora, version, salt, extra in product(values, values, versions, values, extras)
    }
    assert len(keys) == len(values) ** 3 * len(versions) * len(extras)


def test_K5_08_the_order_in_which_parts_are_named_does_not_matter() -> None:
    parts = (("a", 1), ("b", "x"), ("c", b"y"))
    assert len({Namespace(extra=order).key() for order in permutations(parts)}) == 1


@every_compute
@every_block_size
@every_hash
def test_K5_08_a_salt_changes_every_block_of_the_chain(
    hash_bits: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(12, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2, 3)
    salts: list[Any] = [None, "s", "t", b"s"]
    for number, salt in enumerate(salts):
        compute(bm, number, tokens, namespace=salt)
    found = identities(bm)
    chains = [[found[block] for block in bm.tables[number]] for number in range(len(salts))]
    assert len({identity.uid for chain in chains for identity in chain}) == 12
    for chain in chains:
        assert [identity.tokens for identity in chain] == [words(block_size, n) for n in (1, 2, 3)]
        assert [identity.parent for identity in chain] == [0, chain[0].uid, chain[1].uid]
    assert lookup(bm, tokens, namespace="u") == 0
    # Behind the first block the key is empty: the predecessor alone keeps them apart.
    assert {identity.key for chain in chains for identity in chain[1:]} == {b""}


def pinned_blocks(bm: BlockManager, tokens: list[int], namespace: Any) -> int:
    with bm.pin_prefix(tokens, namespace=namespace) as pinned:
        return len(pinned.blocks)


def added(bm: BlockManager, tokens: list[int], namespace: Any) -> int:
    scheduler = sharing_scheduler(bm)
    scheduler.add("asks", tokens=[*tokens, 5], namespace=namespace)
    (cached,) = found_cached(scheduler.step())
    scheduler.finish("asks")
    return cached // bm.block_size


def allocated(bm: BlockManager, tokens: list[int], namespace: Any) -> int:
    cached = bm.allocate("asks", tokens=[*tokens, 5], namespace=namespace)
    bm.free_seq("asks")
    return cached // bm.block_size


PATHS: dict[str, Callable[[BlockManager, list[int], Any], int]] = {
    "match": lambda bm, t, n: lookup(bm, t, namespace=n),
    "match of a Prompt": lambda bm, t, n: (
        bm.match(bm.prompt([*t, 5], namespace=n)) // bm.block_size
    ),
    "plan_allocate": lambda bm, t, n: (
        bm.plan_allocate(tokens=[*t, 5], namespace=n).cached_tokens // bm.block_size
    ),
    "can_allocate": lambda bm, t, n: (
        # Whether they are found is seen from a watermark that only new blocks can break.
        2 * bm.can_allocate(tokens=[*t, 5], namespace=n, watermark=bm.num_available - 1)
    ),
    "allocate": allocated,
    "Scheduler.add": added,
    "pin_prefix": pinned_blocks,
    "common_blocks": lambda bm, t, n: bm.prompt(t, namespace=n).common_blocks(bm.prompt_of("A")),
    "forget": lambda bm, t, n: bm.forget(t, namespace=n),
}


@pytest.mark.parametrize("path", PATHS.values(), ids=list(PATHS))
@every_block_size
@every_hash
def test_K5_08_no_path_ignores_the_salt(
    hash_bits: int, block_size: int, path: Callable[[BlockManager, list[int], Any], int]
) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1, 2)
    compute_prompt(bm, "A", tokens, namespace="right")
    for wrong in (None, "wrong", b"right", Namespace(lora="right")):
        assert path(bm, tokens, wrong) == 0
        assert lookup(bm, tokens, namespace="right") == 2
    assert path(bm, tokens, Namespace(salt="right")) == 2


@every_append
@every_block_size
@every_hash
def test_K5_08_decoded_blocks_and_forks_stay_in_the_namespace(
    hash_bits: int, block_size: int, append: Append
) -> None:
    bm = sharing_manager(12, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1), namespace="s")
    bm.fork("A", "B")
    for seq, name in (("A", 2), ("B", 3)):
        append(bm, seq, block_size)
        bm.commit(seq, words(block_size, name))
    for name in (2, 3):
        assert lookup(bm, words(block_size, 1, name), namespace="s") == 2
        assert lookup(bm, words(block_size, 1, name)) == 0


# ---------------------------------------------------------------- hashes decide nothing


@every_number_of_bits
@every_block_size
@pytest.mark.parametrize("seed", range(4))
def test_K5_09_a_predictable_hash_never_gives_a_wrong_block(
    seed: int, block_size: int, hash_bits: int
) -> None:
    """Contents that a constant hash cannot tell apart, against a set of known prefixes."""
    rng = random.Random(seed)
    bm = sharing_manager(400, block_size, hash_bits=hash_bits)
    published: set[tuple[Any, ...]] = set()
    for number in range(60):
        names = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        namespace = rng.choice([None, "s"])
        path = (namespace, *names)
        expected = max(n for n in range(len(path)) if n == 0 or path[: n + 1] in published)
        tokens = words(block_size, *names)
        assert lookup(bm, tokens, namespace=namespace) == expected
        bm.allocate(number, tokens=tokens, namespace=namespace)
        for block, name in zip(bm.tables[number], names[: bm.published(number)], strict=False):
            assert index_of(bm).identity(block).tokens == words(block_size, name)
        bm.commit(number)
        published |= {path[: n + 1] for n in range(1, len(path))}
    if hash_bits < 2:
        assert index_of(bm).verify_rejects > 0
    if hash_bits == 63:
        assert (index_of(bm).verify_rejects, index_of(bm).collisions) == (0, 0)


@every_number_of_bits
@every_block_size
def test_K5_09_a_child_is_not_found_behind_another_parent_of_the_same_hash(
    block_size: int, hash_bits: int
) -> None:
    """Also after the parents were evicted before the children."""
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", words(block_size, 1, 3))
    compute_prompt(bm, "B", words(block_size, 2, 4))
    assert lookup(bm, words(block_size, 1, 4)) == 1
    assert lookup(bm, words(block_size, 2, 3)) == 1
    for seq in "AB":
        bm.pool.forget(bm.tables[seq][0])
        bm.free_seq(seq)
    compute_prompt(bm, "C", words(block_size, 2))
    for first, last in product((1, 2), (3, 4)):
        assert lookup(bm, words(block_size, first, last)) == (first == 2)


@every_number_of_bits
@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("order", [0, 1])
def test_K5_10_contents_that_collide_in_a_polynomial_are_two(
    order: int, block_size: int, hash_bits: int
) -> None:
    """31 more in one token and 1 less in the next are nothing to a polynomial in 31."""
    pair = [[10, 50, 7, 9][:block_size], [41, 49, 7, 9][:block_size]]
    pair = pair[::-1] if order else pair
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    compute_prompt(bm, "A", pair[0])
    assert [lookup(bm, tokens) for tokens in pair] == [1, 0]
    compute_prompt(bm, "B", pair[1])
    assert [lookup(bm, tokens) for tokens in pair] == [1, 1]
    first, second = identities(bm).values()
    assert first.uid != second.uid


@every_compute
@every_block_size
@pytest.mark.parametrize("evicted", [0, 1])
def test_K5_11_contents_of_one_hash_live_side_by_side_and_are_counted(
    evicted: int, block_size: int, compute: Compute
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=0)
    index = index_of(bm)
    compute(bm, "A", words(block_size, 1))
    assert (index.collisions, index.verify_rejects) == (0, 0)
    compute(bm, "B", words(block_size, 2))
    assert (index.collisions, index.duplicates) == (1, 0)
    assert [lookup(bm, words(block_size, name)) for name in (1, 2, 3)] == [1, 1, 0]
    assert index.verify_rejects > 0
    for seq in "BA" if evicted else "AB":
        bm.free_seq(seq)
    bm.evict(1)
    assert [lookup(bm, words(block_size, name)) for name in (1, 2)] == [evicted, 1 - evicted]


@every_block_size
def test_K5_11_whoever_publishes_first_cannot_keep_others_out(block_size: int) -> None:
    bm = sharing_manager(32, block_size, hash_bits=0)
    for name in range(30):
        compute_prompt(bm, name, words(block_size, name))
    assert [lookup(bm, words(block_size, name)) for name in range(30)] == [1] * 30
    assert index_of(bm).collisions == 29


@pytest.mark.parametrize("profile", ["sha256", "vllm", "xxh3"])
def test_K5_10_names_of_contents_that_collide_in_a_polynomial_are_two(profile: str) -> None:
    if profile == "xxh3":
        pytest.importorskip("xxhash", reason="the profile needs the package xxhash")
    names = ContentIds(profile, block_size=4)
    assert names.ids_of([10, 50, 7, 9]) != names.ids_of([41, 49, 7, 9])


# Every process has a pool, a secret and a seed of its own.
NAME_CONTENTS = """
import json, sys
from kvcore import BlockManager
from kvcore.content_ids import ContentIds
from kvcore.identity import Media, Namespace

profile, told = sys.argv[1], []
namespaces = [None, "salt", b"salt", Namespace("m", "a", 3, "s", (("y", 1), ("x", b"z")))]
for block_size in (1, 4, 16):
    bm = BlockManager(64, block_size, prefix_caching=True)
    names = ContentIds(profile, block_size=block_size)
    bm.pool.index.start_log()
    tokens = list(range(7, 7 + 3 * block_size + block_size // 2))
    for namespace in namespaces:
        for media in ((), (Media(0, 2 * block_size, b"cat"),)):
            seq = (namespace, media)
            bm.allocate(seq, tokens=tokens, namespace=namespace, media=media)
            bm.commit(seq)
            names.apply(bm.pool.index.drain())
            blocks = bm.tables[seq][: bm.published(seq)]
            of_index = [names.id_of(bm.pool.index.identity(block).uid) for block in blocks]
            assert of_index == names.ids_of(tokens, namespace=namespace, media=media)
            told += [name if isinstance(name, int) else name.hex() for name in of_index]
assert len(set(told)) == len(told)
print(json.dumps(told))
"""


@pytest.mark.parametrize("profile", ["sha256", "vllm", "xxh3"])
def test_K5_12_names_of_contents_are_equal_in_every_process(profile: str) -> None:
    """What a pool finds its blocks by is its own secret; what it is told by is not."""
    if profile == "xxh3":
        pytest.importorskip("xxhash", reason="the profile needs the package xxhash")
    told: list[list[Any]] = []
    path = os.pathsep.join([str(Path(kvcore.__file__).parents[1]), *sys.path])
    for seed in ("0", "4242", "random"):
        process = subprocess.run(
            [sys.executable, "-P", "-c", NAME_CONTENTS, profile],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        told.append(json.loads(process.stdout))
    assert len(told[0]) == 3 * 3 * 8
    assert told == [told[0]] * len(told)


# ---------------------------------------------------------------- epochs


INVALIDATIONS: dict[str, Callable[[BlockManager], list[int]]] = {
    "set_epoch": lambda bm: bm.set_epoch(2),
    "reset": lambda bm: bm.reset(),
}
every_invalidation = pytest.mark.parametrize(
    "invalidate", INVALIDATIONS.values(), ids=list(INVALIDATIONS)
)


@every_invalidation
@every_append
@every_compute
@every_block_size
def test_K5_13_running_sequences_outlive_their_epoch_and_publish_nothing_more(
    block_size: int,
    compute: Compute,
    append: Append,
    invalidate: Callable[[BlockManager], list[int]],
) -> None:
    bm = sharing_manager(16, block_size)
    old = words(block_size, 1, 2)
    compute(bm, "A", old)
    compute(bm, "idle", words(block_size, 9))
    bm.free_seq("idle")
    bm.allocate("uncommitted", tokens=words(block_size, 5, 6))
    table = list(bm.tables["A"])
    assert invalidate(bm) == []
    assert bm.pool.num_evictable == 0
    for names in ((1, 2), (9,), (5, 6)):
        assert lookup(bm, words(block_size, *names)) == 0

    bm.fork("A", "child")
    for seq, name in (("A", 3), ("child", 4)):
        append(bm, seq, block_size)
        assert bm.commit(seq, words(block_size, name)) == 0
        assert bm.tables[seq][:2] == table
        assert bm.tokens(seq).tolist() == [*old, *words(block_size, name)]
    assert bm.commit("uncommitted") == 0
    bm.truncate("A", 0)
    append(bm, "A", 2 * block_size)
    assert bm.commit("A", words(block_size, 7, 8)) == 0
    assert identities(bm) == {}
    for seq in list(bm):
        bm.free_seq(seq)
    assert len(bm.free) == 16, "nothing of the old epoch stays cached"

    compute_prompt(bm, "new", old)
    assert lookup(bm, old) == 2


@every_block_size
@every_hash
def test_K5_13_an_epoch_is_entered_once(hash_bits: int, block_size: int) -> None:
    bm = sharing_manager(8, block_size, hash_bits=hash_bits)
    bm.set_epoch(2)
    assert bm.epoch == 2
    compute_prompt(bm, "A", words(block_size, 1))
    before = prefix_state(bm)
    for _ in range(10):
        assert bm.set_epoch(2) == []
        assert prefix_state(bm) == before
    bm.set_epoch(1)
    assert (bm.epoch, lookup(bm, words(block_size, 1))) == (1, 0)
    bm.set_epoch(2)
    assert lookup(bm, words(block_size, 1)) == 0, "an epoch left is not entered again as it was"


@every_invalidation
@every_block_size
def test_K5_13_a_hit_of_the_old_epoch_is_not_published_by_who_hit_it(
    block_size: int, invalidate: Callable[[BlockManager], list[int]]
) -> None:
    bm = sharing_manager(8, block_size)
    compute_prompt(bm, "A", words(block_size, 1))
    assert bm.allocate("B", tokens=words(block_size, 1, 2)) == block_size
    invalidate(bm)
    compute_prompt(bm, "C", words(block_size, 1))
    assert bm.commit("B") == 0
    assert lookup(bm, words(block_size, 1, 2)) == 1
    assert set(identities(bm)) == set(bm.tables["C"])


@every_invalidation
@every_block_size
def test_K5_13_a_request_preempted_over_the_change_computes_and_publishes_anew(
    block_size: int, invalidate: Callable[[BlockManager], list[int]]
) -> None:
    bm = sharing_manager(8, block_size)
    old = words(block_size, 1, 2)
    compute_prompt(bm, "A", old)
    prompt = bm.prompt_of("A")
    bm.free_seq("A")
    invalidate(bm)
    assert bm.allocate("A", tokens=prompt, resumed=True) == 0
    assert bm.commit("A") == 2
    assert lookup(bm, old) == 2


@every_invalidation
@every_block_size
@every_hash
def test_K5_14_a_reset_while_something_runs_takes_effect_at_once_and_disturbs_nobody(
    hash_bits: int, block_size: int, invalidate: Callable[[BlockManager], list[int]]
) -> None:
    bm = sharing_manager(4, block_size, hash_bits=hash_bits)
    tokens = words(block_size, 1)
    compute_prompt(bm, "A", tokens)
    bm.fork("A", "B")
    refs, table = bm.ref.tolist(), list(bm.tables["A"])
    assert invalidate(bm) == [], "tables are no pins: nothing has to be asked to let go"
    assert lookup(bm, tokens) == 0
    assert identities(bm) == {}
    for seq in "AB":
        assert bm.tables[seq] == table
        assert bm.tokens(seq).tolist() == tokens
    assert bm.ref.tolist() == refs
    no_room(bm, lambda: bm.allocate("C", tokens=words(block_size, 1, 2, 3, 4)), 4, 3)
    bm.append_slot("A")
    bm.free_seq("A")
    bm.free_seq("B")
    assert len(bm.free) == 4


@every_invalidation
@every_block_size
def test_K5_14_a_scheduler_goes_on_over_the_change(
    block_size: int, invalidate: Callable[[BlockManager], list[int]]
) -> None:
    bm = sharing_manager(12, block_size)
    scheduler = sharing_scheduler(bm)
    tokens = words(block_size, 1, 2)
    scheduler.add("A", tokens=tokens)
    engine_step(bm, scheduler, {"A": 900})
    invalidate(bm)
    scheduler.add("B", tokens=tokens)
    step = engine_step(bm, scheduler, {"A": 900, "B": 901})
    assert step == ["A", "B"]
    assert found_cached(step) == [0]
    assert set(bm.tables["A"]).isdisjoint(bm.tables["B"])
    scheduler.add("C", tokens=[*tokens, 5])
    step = engine_step(bm, scheduler, {"A": 900, "B": 901, "C": 902})
    assert found_cached(step) == [2 * block_size]
    assert bm.tables["C"][:2] == bm.tables["B"][:2]


@every_block_size
def test_K5_14_merging_after_the_change_uses_no_block_of_before(block_size: int) -> None:
    bm = sharing_manager(8, block_size, merge_duplicates=True)
    tokens = words(block_size, 1)
    compute_together(bm, "AB", tokens)
    old = bm.tables["A"][0]
    bm.reset()
    compute_prompt(bm, "C", tokens)
    assert bm.tables["C"][0] != old
    bm.allocate("D", 0)
    bm.append_batch(np.full(block_size, bm.row("D"), np.int32), np.zeros(block_size, np.int64))
    bm.commit("D", tokens)
    assert bm.tables["D"] == bm.tables["C"]
