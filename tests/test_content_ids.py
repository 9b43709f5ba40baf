"""Names of blocks for other processes: fixed values, and the log of an index told by name.

The values of the profiles ``"xxh3"`` and ``"vllm"`` were computed by ai-dynamo-runtime 1.6.1
and by vLLM's rules with cbor2; those of ``"sha256"`` are our own promise: whoever stored
blocks under them wants to find them again.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvcore
from kvcore import BlockManager, OutOfBlocks, PrefixIndex, content_ids
from kvcore.content_ids import (
    ContentEvent,
    ContentId,
    ContentIds,
    ContentRemoved,
    ContentStored,
    as_uint64,
)
from kvcore.identity import Media, MediaPart, Namespace, block_keys, decode_key
from kvcore.prefix_log import Change, Cleared, Removed, Stored

needs_xxhash = pytest.mark.skipif(
    find_spec("xxhash") is None, reason="the package xxhash is not installed"
)
profiles = pytest.mark.parametrize(
    "profile", ["sha256", pytest.param("xxh3", marks=needs_xxhash), "vllm"]
)
ONE_TO_48 = list(range(1, 49))


def hexes(names: list[ContentId]) -> list[str]:
    return [name.hex() for name in names if isinstance(name, bytes)]


# ---------------------------------------------------------------- fixed values


@needs_xxhash
@pytest.mark.parametrize(
    ("block_size", "local", "chain"),
    [
        (
            16,
            [16863443419780771464, 2287610619914608821, 12129935312930971799],
            [16863443419780771464, 12466389667045779788, 960926348267535642],
        ),
        (
            4,
            [14643705804678351452, 16777012769546811212, 483935686894639516],
            [14643705804678351452, 4945711292740353085, 12583592247330656132],
        ),
    ],
)
def test_xxh3_names_are_those_of_the_router(
    block_size: int, local: list[int], chain: list[int]
) -> None:
    ids = ContentIds("xxh3", block_size=block_size)
    tokens = ONE_TO_48[: 3 * block_size]
    assert ids.ids_of(tokens) == chain
    # A block's own hash is its name where it comes first.
    starts = range(0, len(tokens), block_size)
    assert [ids.ids_of(tokens[start:][:block_size])[0] for start in starts] == local


@needs_xxhash
def test_xxh3_names_know_adapters_salts_and_media_as_the_router_does() -> None:
    ids = ContentIds("xxh3", block_size=4)
    tokens = ONE_TO_48[:12]
    assert ids.ids_of(tokens, namespace=Namespace(lora="alpha-7b")) == [
        16548428770143335509,
        616729622351478655,
        3026556737724619440,
    ]
    assert ids.ids_of(tokens, namespace=Namespace(lora="alpha-7b", salt="tenant")) == [
        6492948924113202746,
        3260215720121709330,
        12160721242103379952,
    ]
    # The router's own 64 bits of an item, as the first 16 digits of its hexadecimal hash.
    item = Media(4, 8, bytes.fromhex("0001020304050607"))
    assert ids.ids_of(tokens, media=[item]) == [
        14643705804678351452,
        4461314528615060339,
        15375351240040564316,
    ]


def test_vllm_names_are_those_of_vllm() -> None:
    ids = ContentIds("vllm", block_size=16)
    plain = ids.ids_of(ONE_TO_48[:32])
    assert hexes(plain) == [
        "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
        "2533ea50426b36e9e4d68296cac6bce8cf602e46957d0fe40b368b33d87bf3bf",
    ]
    salted = ids.ids_of(ONE_TO_48[:16], namespace="salt")
    assert hexes(salted) == ["737c70bd98dc63b69b3951bbb0dbbdb2b431d1d966906e25761c0dc3bb3bf8a6"]
    root = ids._profile.chain(None, 0).root
    assert root.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    assert [as_uint64(name) for name in (root, *plain, *salted)] == [
        10672167085007826672,
        8866452693264111234,
        807986237951177663,
        8510692530134448294,
    ]


def test_vllm_names_know_adapters_with_their_path_and_media() -> None:
    names = ContentIds("vllm", block_size=4).ids_of(
        ONE_TO_48[:12],
        namespace=Namespace(lora="a", salt="s", extra=(("lora_path", "/p"),)),
        media=[Media(3, 7, b"\x0a\xff")],
    )
    assert hexes(names) == [
        "89342ae4d56fdee2a733590ece7b181eda9a05a6f406b77c60d5a86a1800640f",
        "dcb24da42af8319d9a06c61b17d8ba8e0aaf72f0804cecccd516d6b2600ee10f",
        "35859b19ee329735481eb897db84fd364b328f8e149613f0e4711a243aba3da8",
    ]


def test_sha256_names_stay_what_they_are() -> None:
    ids = ContentIds(block_size=4)
    tokens = ONE_TO_48[:8]
    assert hexes(ids.ids_of(tokens)) == [
        "f034857865d4d3af6fc854544731393c38d74dfdf1a0d88096fef4dd508d6221",
        "ce0a18dad5aa19a24e2c2b1614ba73f2943582ba39d159174a15322b4bfc140a",
    ]
    assert hexes(ids.ids_of(tokens, namespace="salt")) == [
        "1ed01d328a9eee2f514a4a42e3a7e30707ee104c5c1864abfef12a6cb881c939",
        "a61678300de0391277c30865f72612780a5b997116301f56ff5ecfbfc340a9e4",
    ]
    assert hexes(ids.ids_of(tokens, media=[Media(3, 7, b"\x0a\xff")])) == [
        "9e6a4aa69e76eb75871eef019190bca6f19ca2a2701b071d4096e87fcd26dd4b",
        "f3b1cd41378625f00b1084f77491adc4053955b89862cc206252d551e4323058",
    ]
    assert hexes(ContentIds(block_size=4, seed="s", epoch=2).ids_of(tokens)) == [
        "6bf9e2377e4588aeb45e6db58bf7a6ccf50eeea5162e0a53745330ff825c0f59",
        "ed6868377a1b6cad21da74f46335db8e931f47a8583a32605679803434707637",
    ]


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (1_000_000, "1a000f4240"),
        (1_000_000_000_000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-1, "20"),
        (-100, "3863"),
        (-1000, "3903e7"),
        (-18446744073709551616, "3bffffffffffffffff"),
        (None, "f6"),
        (b"", "40"),
        (bytes.fromhex("01020304"), "4401020304"),
        ("", "60"),
        ("IETF", "6449455446"),
        ("\u6c34", "63e6b0b4"),
        ((), "80"),
        ([1, (2, 3), [4, 5]], "8301820203820405"),
        (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
    ids=str,
)
def test_canonical_cbor_as_in_its_specification(value: object, encoded: str) -> None:
    """The vectors of RFC 8949, appendix A, that need these types only."""
    assert content_ids._cbor(value).hex() == encoded


def test_what_cbor_does_not_hold_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no CBOR for 1\.5 of type float"):
        content_ids._cbor(1.5)
    with pytest.raises(ValueError, match="does not fit in 64 bits"):
        content_ids._cbor(2**64)


# ------------------------------------------------------------ what a name says


@profiles
def test_names_are_equal_in_processes_with_other_hash_seeds(profile: str) -> None:
    """K5-12: nothing of the interpreter's own hashes gets in."""
    code = """
import json, sys
from kvcore.content_ids import ContentIds
from kvcore.identity import Media, Namespace
names = ContentIds(sys.argv[1], block_size=4).ids_of(
    list(range(20)),
    namespace=Namespace(lora="x", salt=b"y", extra=(("b", 1), ("a", "z"))),
    media=[Media(6, 11, b"digest")],
)
print(json.dumps([str(name) for name in names]))
"""
    package = str(Path(kvcore.__file__).parent.parent)
    printed = [
        subprocess.run(
            [sys.executable, "-P", "-c", code, profile],
            env=os.environ | {"PYTHONPATH": package, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    ]
    assert len(json.loads(printed[0])) == 5
    assert printed[0] == printed[1] == printed[2]


@profiles
def test_a_prefix_has_the_names_of_its_blocks(profile: str) -> None:
    ids = ContentIds(profile, block_size=4)
    names = ids.ids_of(ONE_TO_48)
    assert len(set(names)) == 12
    for n_tokens in range(20):
        assert ids.ids_of(ONE_TO_48[:n_tokens]) == names[: n_tokens // 4]
    assert ids.ids_of([9, *ONE_TO_48[1:]])[1] != names[1], "what is before a block is part of it"


@profiles
def test_every_part_of_a_namespace_changes_every_name(profile: str) -> None:
    """K5-01 to K5-03 and K5-08, outside: block 0 says it, the chain carries it."""
    ids = ContentIds(profile, block_size=4)
    namespaces = [
        None,
        Namespace(model="x"),
        Namespace(lora="x"),
        Namespace(lora=b"x"),
        Namespace(lora_version=1),
        Namespace(lora="x", lora_version=1),
        Namespace(lora="x", lora_version=2),
        Namespace(salt="x"),
        Namespace(salt=b"x"),
        Namespace(lora="x", salt="x"),
        Namespace(lora="ab", salt="c"),
        Namespace(lora="a", salt="bc"),
        Namespace(lora="x", extra=(("lora_path", "/x"),)),
        Namespace(lora="x", extra=(("lora_path", b"/x"),)),
        Namespace(extra=(("lora_path", "/x"),)),
        Namespace(extra=(("salt", "x"),)),
        Namespace(extra=(("salt", 1),)),
    ]
    columns = zip(
        *(ids.ids_of(ONE_TO_48, namespace=namespace) for namespace in namespaces), strict=True
    )
    assert all(len(set(column)) == len(namespaces) for column in columns)


@profiles
def test_a_media_item_changes_the_names_from_its_first_block_on(profile: str) -> None:
    """K5-04, K5-05: by its whole digest; digests that differ in their high bits only differ."""
    ids = ContentIds(profile, block_size=4)
    plain = ids.ids_of(ONE_TO_48)
    digests = [number.to_bytes(size, "big") for size in (8, 32) for number in (5, 5 + (1 << 62))]
    for digest in digests:
        names = ids.ids_of(ONE_TO_48, media=[Media(9, 14, digest)])
        assert names[:2] == plain[:2]
        assert not set(names[2:]) & set(plain[2:])
    ends = {ids.ids_of(ONE_TO_48, media=[Media(9, 14, digest)])[-1] for digest in digests}
    assert len(ends) == len(digests)


@pytest.mark.parametrize("profile", ["sha256", "vllm"])
def test_an_epoch_changes_every_name(profile: str) -> None:
    """K5-13, outside: other weights, other content."""
    columns = zip(
        *(ContentIds(profile, block_size=4, epoch=epoch).ids_of(ONE_TO_48) for epoch in (0, 1, -1)),
        strict=True,
    )
    assert all(len(set(column)) == 3 for column in columns)


@profiles
def test_a_seed_changes_every_name(profile: str) -> None:
    seed = 7 if profile == "xxh3" else "cluster"
    plain = ContentIds(profile, block_size=4).ids_of(ONE_TO_48)
    seeded = ContentIds(profile, block_size=4, seed=seed).ids_of(ONE_TO_48)
    assert not set(plain) & set(seeded)


texts = st.text("ab", min_size=1, max_size=2)
values = st.none() | texts | texts.map(str.encode)
namespaces = st.builds(
    Namespace,
    model=values,
    lora=values,
    lora_version=st.none() | st.integers(-1, 1),
    salt=values,
    extra=st.dictionaries(texts | st.just("lora_path"), texts | st.integers(0, 1), max_size=2).map(
        lambda parts: tuple(parts.items())
    ),
)
spans = st.tuples(st.integers(0, 5), st.integers(1, 3), texts.map(str.encode))
prompts = st.tuples(
    st.lists(st.integers(0, 1), min_size=6, max_size=6),
    namespaces,
    spans.map(lambda span: [Media(span[0], min(6, span[0] + span[1]), span[2])]) | st.just([]),
    st.integers(0, 1),
)


@given(prompts, prompts)
def test_sha256_names_are_equal_exactly_where_identities_are(one: Any, other: Any) -> None:
    def identity(prompt: Any) -> list[tuple[Any, ...]]:
        tokens, namespace, media, epoch = prompt
        keys = block_keys(namespace.key(), media, 6, 2)
        blocks = [(tokens[2 * column :][:2], keys.get(column)) for column in range(3)]
        return [(epoch, *blocks[: column + 1]) for column in range(3)]

    def names(prompt: Any) -> list[ContentId]:
        tokens, namespace, media, epoch = prompt
        ids = ContentIds(block_size=2, epoch=epoch)
        return ids.ids_of(tokens, namespace=namespace, media=media)

    for column, (a, b) in enumerate(zip(identity(one), identity(other), strict=True)):
        assert (a == b) == (names(one)[column] == names(other)[column])


def test_block_sizes_have_chains_of_their_own() -> None:
    ids = [ContentIds(block_size=size).ids_of([1] * 8) for size in (1, 2, 4)]
    assert len({name for names in ids for name in names}) == 8 + 4 + 2


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(1, 49, dtype=np.int32),
        np.arange(1, 49, dtype=np.uint32),
        np.arange(1, 49, dtype=np.int64),
        np.arange(48, 0, -1)[::-1],
        tuple(ONE_TO_48),
        range(1, 49),
    ],
    ids=lambda tokens: str(getattr(tokens, "dtype", type(tokens).__name__)),
)
def test_tokens_may_come_in_many_types(tokens: Any) -> None:
    ids = ContentIds(block_size=16)
    assert ids.ids_of(tokens) == ids.ids_of(ONE_TO_48)


@pytest.mark.parametrize(
    ("tokens", "error", "said"),
    [
        ([1, 2, -3], ValueError, "between 0 and 2147483647, got -3 at position 2"),
        ([1, 2**31], ValueError, "got 2147483648 at position 1"),
        ([1.0], TypeError, "tokens must be integers, got float64"),
        (["1"], TypeError, "tokens must be integers"),
        ([True], TypeError, "tokens must be integers, got bool"),
        ([[1], [2]], ValueError, "tokens must have one dimension, got 2"),
    ],
    ids=str,
)
def test_tokens_are_checked(tokens: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ContentIds(block_size=1).ids_of(tokens)


def test_no_tokens_have_no_names() -> None:
    assert ContentIds(block_size=1).ids_of([]) == []


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"profile": "md5"}, ValueError, "profile must be one of sha256, xxh3, vllm, got 'md5'"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"block_size": "4"}, TypeError, "'str' object cannot be interpreted as an integer"),
        ({"epoch": 2**63}, ValueError, "epoch must fit in 64 bits, got 9223372036854775808"),
        ({"seed": 5}, TypeError, "seed of profile 'sha256' must be str or bytes, got 5"),
        ({"profile": "vllm", "seed": b"x"}, TypeError, "seed of profile 'vllm' must be str"),
        pytest.param(
            {"profile": "xxh3", "seed": "x"},
            TypeError,
            "seed of profile 'xxh3' must be an integer, got 'x'",
            marks=needs_xxhash,
        ),
        pytest.param(
            {"profile": "xxh3", "seed": -1},
            ValueError,
            "seed of profile 'xxh3' must be between 0 and 18446744073709551615, got -1",
            marks=needs_xxhash,
        ),
    ],
)
def test_arguments_are_checked(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ContentIds(**{"block_size": 4} | arguments)


def test_without_xxhash_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"pip install 'kvcore\[xxhash\]'"):
        ContentIds("xxh3", block_size=4)
    assert ContentIds("sha256", block_size=4).ids_of(ONE_TO_48)


# ------------------------------------------------------------ following a log


def stored(uid: int, parent: int, *tokens: int, key: bytes = b"") -> Stored:
    return Stored(uid, parent, list(tokens), key)


@profiles
def test_a_log_is_told_by_the_names_that_its_tokens_have(profile: str) -> None:
    ids = ContentIds(profile, block_size=2)
    namespace = Namespace(lora="x")
    media = [Media(3, 6, b"d")]
    keys = block_keys(namespace.key(), media, 6, 2)
    names = ids.ids_of([1, 2, 3, 4, 5, 6], namespace=namespace, media=media)
    events = ids.apply(
        [
            Cleared(),
            stored(7, 0, 1, 2, key=keys[0]),
            stored(8, 7, 3, 4, key=keys[1]),
            stored(9, 8, 5, 6, key=keys[2]),
            Removed(9),
        ]
    )
    assert events == [
        Cleared(),
        ContentStored(names[0], None, [1, 2], namespace, ()),
        ContentStored(names[1], names[0], [3, 4], namespace, (MediaPart(b"d", 1, 3),)),
        ContentStored(names[2], names[1], [5, 6], namespace, (MediaPart(b"d", -1, 3),)),
        ContentRemoved(names[2]),
    ]
    assert [ids.id_of(uid) for uid in (7, 8, 9)] == [names[0], names[1], None]
    assert len(ids) == 2


def test_what_stands_on_a_removed_block_goes_before_it() -> None:
    """Readers of events never see a child without its parent, nor lose a live one."""
    ids = ContentIds(block_size=1)
    a, b, c = ids.ids_of([1, 2, 3])
    ids.apply([Cleared(), stored(1, 0, 1), stored(2, 1, 2), stored(3, 2, 3)])

    assert ids.apply([Removed(1)]) == [ContentRemoved(c), ContentRemoved(b), ContentRemoved(a)]
    assert len(ids) == 0
    assert ids.id_of(2) is None

    # The content comes back under new numbers, and what is left of the old ones ends later.
    again = ids.apply([stored(4, 0, 1), stored(5, 4, 2), Removed(2), Removed(3)])
    assert [type(event) for event in again] == [ContentStored, ContentStored]
    assert len(ids) == 2
    assert ids.apply([Removed(5), Removed(4)]) == [ContentRemoved(b), ContentRemoved(a)]


def test_a_snapshot_may_hold_what_nobody_can_reach() -> None:
    ids = ContentIds(block_size=1)
    (a,) = ids.ids_of([1])
    events = ids.apply([Cleared(), stored(5, 0, 1), stored(3, 2, 9), stored(4, 3, 9)])
    assert events == [Cleared(), ContentStored(a, None, [1], None, ())]
    assert ids.apply([Removed(4), Removed(3)]) == []
    assert len(ids) == 1


def test_contents_that_a_profile_cannot_tell_apart_are_one_name() -> None:
    """vLLM's names leave out how long an item is; its blocks are told of once."""
    ids = ContentIds("vllm", block_size=4)
    short, long = (block_keys(b"", [Media(0, stop, b"d")], 4, 4)[0] for stop in (2, 4))
    events = ids.apply(
        [Cleared(), stored(1, 0, 5, 5, 5, 5, key=short), stored(2, 0, 5, 5, 5, 5, key=long)]
    )
    assert len(events) == 2
    assert len(ids) == 1
    assert ids.apply([Removed(1)]) == []
    assert ids.apply([Removed(2)]) == [ContentRemoved(events[1].id)]  # type: ignore[union-attr]


def test_a_cleared_log_begins_again_in_its_epoch() -> None:
    ids = ContentIds(block_size=1)
    ids.apply([Cleared(), stored(1, 0, 1), stored(2, 1, 2)])
    events = ids.apply([stored(3, 2, 3), Removed(3), Cleared(epoch=5), stored(4, 0, 1)])
    in_epoch_5 = ContentIds(block_size=1, epoch=5).ids_of([1])
    assert events == [Cleared(epoch=5), ContentStored(in_epoch_5[0], None, [1], None, ())]
    assert ids.epoch == 5
    assert ids.ids_of([1]) == in_epoch_5
    assert ids.id_of(1) is None


def test_nothing_is_named_that_a_clear_makes_void(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ContentIds(block_size=1)
    named: list[list[int]] = []
    name = ids._profile.name

    def counted(chain: Any, parent: Any, tokens: list[int], key: bytes, said: Any) -> ContentId:
        named.append(tokens)
        return name(chain, parent, tokens, key, said)

    monkeypatch.setattr(ids._profile, "name", counted)
    ids.apply([Cleared(), stored(1, 0, 1), stored(2, 1, 2), Cleared(), stored(3, 0, 3)])
    assert named == [[3]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([stored(1, 0, 1), stored(1, 0, 1)], "content 1 is stored already"),
        ([Removed(1)], "content 1 is not stored"),
        ([stored(1, 0, 1), Removed(1), Removed(1)], "content 1 is not stored"),
        ([stored(1, 0, 1, 2)], "content 1 has 2 tokens, a block has 1"),
    ],
)
def test_changes_that_do_not_follow_are_refused(changes: list[Change], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContentIds(block_size=1).apply(changes)


class Following(RuleBasedStateMachine):
    """A log at random, its events read by a strict reader that starts from nothing.

    The log itself is loose, as an index's may be: parents go before children, contents come
    back under new numbers while old children wait, drains fall anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids = ContentIds(block_size=1)
        self.log: list[Change] = [Cleared()]
        self.live: dict[int, tuple[int, int]] = {}
        """Parent and token, by number."""
        self.next_uid = 1
        self.epoch = 0
        self.read: dict[ContentId, ContentId | None] = {}
        """What the reader knows: parent by name."""

    def path(self, uid: int) -> list[int] | None:
        """The tokens from the root on; None where something before is gone."""
        tokens: list[int] = []
        while uid:
            if uid not in self.live:
                return None
            uid, token = self.live[uid]
            tokens.append(token)
        return tokens[::-1]

    @rule(data=st.data(), token=st.integers(0, 1))
    def publish(self, data: st.DataObject, token: int) -> None:
        parent = data.draw(st.sampled_from([0, *self.live]))
        if self.path(parent) is None or (parent, token) in self.live.values():
            return
        self.live[self.next_uid] = parent, token
        self.log.append(stored(self.next_uid, parent, token))
        self.next_uid += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(list(self.live)))
        del self.live[uid]
        self.log.append(Removed(uid))

    @rule(epoch=st.integers(0, 1))
    def clear(self, epoch: int) -> None:
        self.live.clear()
        self.epoch = epoch
        self.log.append(Cleared(epoch))

    @rule()
    def overflow(self) -> None:
        """Nobody read for too long: the log begins again, what cannot be reached at its end."""
        reachable = [uid for uid in sorted(self.live) if self.path(uid) is not None]
        others = [uid for uid in sorted(self.live) if uid not in reachable]
        self.log = [Cleared(self.epoch)]
        for uid in reachable + others:
            parent, token = self.live[uid]
            self.log.append(stored(uid, parent, token))

    @rule()
    def drain(self) -> None:
        for event in self.ids.apply(self.log):
            self.follow(event)
        self.log = []

    def follow(self, event: ContentEvent) -> None:
        if isinstance(event, ContentStored):
            assert event.id not in self.read, "told twice"
            assert event.parent is None or event.parent in self.read, "a child before its parent"
            self.read[event.id] = event.parent
        elif isinstance(event, ContentRemoved):
            assert event.id not in self.read.values(), "a parent before its child"
            del self.read[event.id]
        else:
            self.read.clear()

    @invariant()
    def the_reader_knows_what_can_be_hit(self) -> None:
        if self.log:
            return
        paths = [path for path in map(self.path, self.live) if path is not None]
        expected = {self.ids.ids_of(path)[-1] for path in paths}
        assert set(self.read) == expected
        assert len(self.ids) == len(expected)


TestFollowing = Following.TestCase


def names_of_what_can_be_hit(index: PrefixIndex, ids: ContentIds) -> set[ContentId]:
    """From the blocks themselves, without the log: each content's name by its whole path."""
    found = map(index.identity, range(index.pool.num_blocks))
    contents = {identity.uid: identity for identity in found if identity is not None}
    names = set()
    for last in contents.values():
        path = [last]
        while path[-1].parent in contents:
            path.append(contents[path[-1].parent])
        if path[-1].parent == 0:
            path.reverse()
            media = {
                Media(start, start + part.length, part.digest)
                for column, identity in enumerate(path)
                for part in decode_key(identity.key).media
                for start in [column * index.block_size + part.offset]
            }
            tokens = [token for identity in path for token in identity.tokens]
            # An item may end beyond the path's last token.
            end = max([len(tokens), *(item.stop for item in media)])
            padded = tokens + [0] * (end - len(tokens))
            namespace = decode_key(path[0].key).namespace
            named = ids.ids_of(padded, namespace=namespace, media=list(media))
            names.add(named[len(path) - 1])
    return names


@pytest.mark.parametrize("seed", range(5))
def test_the_log_of_a_real_index_names_what_can_be_hit(seed: int) -> None:
    """Publish, hit, evict, forget, lose, reset, new epochs; drains anywhere, a short log."""
    chance = random.Random(seed)
    bm = BlockManager(24, 2, prefix_caching=True)
    index = bm.pool.index
    assert index is not None
    index.start_log(16)
    ids = ContentIds(block_size=2)
    read: set[ContentId] = set()
    named = 0
    for number in range(1_500):
        with suppress(OutOfBlocks):
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 12))]
            who: dict[str, Any] = {"namespace": chance.choice([None, "red", Namespace(lora="x")])}
            if len(tokens) > 3 and chance.random() < 0.3:
                who["media"] = [Media(1, chance.randrange(2, len(tokens)), b"picture")]
            bm.allocate(number, tokens=tokens, **who)
            bm.commit(number)
        while len(bm) > 3:
            bm.free_seq(chance.choice(list(bm)))
        event = chance.randrange(40)
        if event < 4:
            bm.evict(event)
        elif event < 6:
            bm.forget(tokens, **who)
        elif event < 12:
            bm.pool.forget(chance.randrange(24))
        elif event == 12:
            bm.reset()
        elif event == 13:
            bm.set_epoch(number)
        if chance.random() < 0.3:
            for told in ids.apply(index.drain()):
                if isinstance(told, ContentStored):
                    assert told.id not in read
                    assert told.parent is None or told.parent in read
                    read.add(told.id)
                elif isinstance(told, ContentRemoved):
                    read.remove(told.id)
                else:
                    read.clear()
            assert ids.epoch == index.epoch
            assert read == names_of_what_can_be_hit(index, ids)
            assert len(ids) == len(read)
            named += len(read)
    assert named > 1_000
    bm.check()


def chains(rounds: int) -> Iterator[list[Change]]:
    """Chains of four that come and go, each head before its tail; 40 contents live at once."""
    uid = 0
    alive: list[list[int]] = []
    for number in range(rounds):
        changes: list[Change] = []
        parent, chain = 0, []
        for _ in range(4):
            uid += 1
            changes.append(stored(uid, parent, number))
            parent = uid
            chain.append(uid)
        alive.append(chain)
        if len(alive) > 10:
            changes += map(Removed, alive.pop(0))
        yield changes


def test_memory_is_flat_over_100_000_contents() -> None:
    """I11: one record a live content, none for those that went."""
    ids = ContentIds(block_size=1)
    ids.apply([Cleared()])
    counts: list[int] = []
    for number, changes in enumerate(chains(25_000)):
        ids.apply(changes)
        if number in (1_000, 24_999):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert len(ids._live) == len(ids) == 40
    assert counts[1] - counts[0] <= 8
