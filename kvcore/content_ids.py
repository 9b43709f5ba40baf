"""Names of blocks for the outside world: events, tiers, routers, other engines.

A name says what a block holds: its tokens, everything before it, its namespace, its media.
It is the same in every process and on every machine. It has nothing to do with the hash that
the prefix index finds its candidates by, which is secret and never leaves the pool; nor does
the index ever trust a name. Nothing is computed here until somebody asks for names or
follows the log of an index.

Three profiles, that is three answers to who has to understand the names:

``"sha256"``
    A SHA-256 chain of our own. For whoever stores or serves data by name: two contents of one
    name cannot be made. ::

        root  = SHA-256("kvcore blocks 1" size(seed) seed block_size(4) epoch(8))
        name  = SHA-256(parent's name or root, size(4) key, tokens as uint32 little-endian)

``"xxh3"``
    What Dynamo's router computes of a prompt, 64 bits. A hint where to route to, and no more:
    collisions are easily made. It knows no epoch. Needs the ``xxhash`` package.

``"vllm"``
    What vLLM computes with ``sha256_cbor``, for readers that compare names across engines. An
    adapter is named like vLLM's where an ``extra`` part ``"lora_path"`` gives its path, and a
    media item where its digest is the bytes that vLLM's identifier spells in hexadecimal.
    What vLLM has no word for is added to it: model, version, other parts, an epoch but 0.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import index
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcore.identity import (
    BlockKey,
    Media,
    MediaPart,
    Namespace,
    block_keys,
    decode_key,
    namespace_key,
)
from kvcore.prefix_log import Change, Cleared, Removed, Stored

__all__ = [
    "PROFILES",
    "ContentEvent",
    "ContentId",
    "ContentIds",
    "ContentRemoved",
    "ContentStored",
    "as_uint64",
]

ContentId = bytes | int
"""32 bytes, or 64 bits in the profile ``"xxh3"``."""


class ContentStored(NamedTuple):
    """A block of this name became available."""

    id: ContentId
    parent: ContentId | None
    """The name of the block before it; None at the root."""
    tokens: list[int]
    namespace: Namespace | None
    """That of the whole chain, in every block of it."""
    media: tuple[MediaPart, ...]
    """The items that overlap this block."""


class ContentRemoved(NamedTuple):
    """No block of this name is available any more."""

    id: ContentId


ContentEvent = ContentStored | ContentRemoved | Cleared


def as_uint64(content_id: ContentId) -> int:
    """Return the name as routers write it: the last 8 bytes, big-endian."""
    if isinstance(content_id, int):
        return content_id
    return int.from_bytes(content_id[-8:], "big")


class _Profile(Protocol):
    """How one kind of reader names blocks."""

    def chain(self, namespace: Namespace | None, epoch: int) -> Any:
        """Prepare what all blocks of a chain have in common."""

    def name(
        self, chain: Any, parent: ContentId | None, tokens: list[int], key: bytes, said: BlockKey
    ) -> ContentId:
        """Name one block: ``said`` is what its ``key`` says."""


class _SHA256:
    def __init__(self, block_size: int, seed: object) -> None:
        seed = b"" if seed is None else seed
        if not isinstance(seed, str | bytes):
            raise TypeError(f"seed of profile 'sha256' must be str or bytes, got {seed!r}")
        # Text and bytes of one content are one seed: it is no part of an identity, only a start.
        seed = seed.encode() if isinstance(seed, str) else seed
        head = b"kvcore blocks 1" + struct.pack(">I", len(seed)) + seed
        self._head = head + struct.pack(">I", block_size)
        self._block = struct.Struct(f"<{block_size}I")

    def chain(self, namespace: Namespace | None, epoch: int) -> bytes:
        # The key of block 0 says the namespace; here it adds nothing.
        return hashlib.sha256(self._head + struct.pack(">q", epoch)).digest()

    def name(
        self, chain: bytes, parent: ContentId | None, tokens: list[int], key: bytes, said: BlockKey
    ) -> bytes:
        before = chain if parent is None else parent
        assert isinstance(before, bytes)
        framed = before + struct.pack(">I", len(key)) + key
        return hashlib.sha256(framed + self._block.pack(*tokens)).digest()


class _XXH3:
    def __init__(self, block_size: int, seed: object) -> None:
        try:
            self._xxh3 = import_module("xxhash").xxh3_64_intdigest
        except ImportError as error:
            raise ImportError(
                "profile 'xxh3' needs the package xxhash: pip install 'kvcore[xxhash]'"
            ) from error
        self._seed = 1337 if seed is None else _uint64("seed of profile 'xxh3'", seed)
        self._block = struct.Struct(f"<{block_size}I")

    def chain(self, namespace: Namespace | None, epoch: int) -> int:
        """Return the seed of the chain, into which its namespace is added."""
        seed = self._seed
        if namespace is None:
            return seed
        # The router knows an adapter and a salt, both text; other parts have a term of their own.
        lora = namespace.lora if isinstance(namespace.lora, str) else None
        salt = namespace.salt if isinstance(namespace.salt, str) else None
        rest = Namespace(
            namespace.model,
            None if lora else namespace.lora,
            namespace.lora_version,
            None if salt else namespace.salt,
            namespace.extra,
        ).key()
        terms = [(lora or "").encode(), (salt or "").encode(), rest]
        for number, term in enumerate(terms):
            if term:
                seed += self._xxh3(term, number)
        return seed % 2**64

    def name(
        self, chain: int, parent: ContentId | None, tokens: list[int], key: bytes, said: BlockKey
    ) -> int:
        content = self._block.pack(*tokens)
        if said.media:
            content += b"".join(
                struct.pack("<Q", number) for number in sorted(map(self._media, said.media))
            )
        local: int = self._xxh3(content, chain)
        if parent is None:
            return local
        # The step along the chain has the plain seed: its operands carry the namespace.
        name: int = self._xxh3(struct.pack("<QQ", parent, local), self._seed)
        return name

    def _media(self, part: MediaPart) -> int:
        if len(part.digest) == 8:  # already what the router would use
            return int.from_bytes(part.digest, "big")
        framed = part.digest + struct.pack(">qQ", part.offset, part.length)
        number: int = self._xxh3(framed, self._seed)
        return number


class _VLLM:
    @dataclass(slots=True)
    class Chain:
        root: bytes
        adapter: list[bytes]
        """Keys in every block, before those of media."""
        first: list[bytes]
        """Keys in the first block, after those of media."""

    def __init__(self, block_size: int, seed: object) -> None:
        seed = "vllm-none-hash" if seed is None else seed
        if not isinstance(seed, str):
            raise TypeError(f"seed of profile 'vllm' must be str, got {seed!r}")
        self._root = hashlib.sha256(_cbor(seed)).digest()

    def chain(self, namespace: Namespace | None, epoch: int) -> Chain:
        chain = self.Chain(self._root, [], [])
        if namespace is not None:
            extra = dict(namespace.extra)
            if namespace.lora is not None:
                path = extra.get("lora_path")
                path = extra.pop("lora_path") if isinstance(path, str) else None
                chain.adapter.append(_cbor(("lora", namespace.lora, path)))
            if namespace.lora_version is not None:
                chain.adapter.append(_cbor(("lora_version", namespace.lora_version)))
            if namespace.salt is not None:
                chain.first.append(_cbor(("cache_salt", namespace.salt)))
            if namespace.model is not None:
                chain.first.append(_cbor(("model", namespace.model)))
            chain.first += [_cbor(("extra", name, value)) for name, value in extra.items()]
        if epoch:
            chain.first.append(_cbor(("epoch", epoch)))
        return chain

    def name(
        self, chain: Chain, parent: ContentId | None, tokens: list[int], key: bytes, said: BlockKey
    ) -> bytes:
        keys = list(chain.adapter)
        keys += [_cbor(("mm", part.digest.hex(), part.offset)) for part in said.media]
        if parent is None:
            parent = chain.root
            keys += chain.first
        extra = _cbor_head(4, len(keys)) + b"".join(keys) if keys else _cbor(None)
        content = _cbor_head(4, 3) + _cbor(parent) + _cbor(tokens) + extra
        return hashlib.sha256(content).digest()


def _cbor_head(major: int, number: int) -> bytes:
    """Encode a type and its number in the fewest bytes, as canonical CBOR (RFC 8949) wants."""
    if number < 24:
        return bytes([major << 5 | number])
    for more, size in enumerate((1, 2, 4, 8)):
        if number < 1 << 8 * size:
            return bytes([major << 5 | 24 + more]) + number.to_bytes(size, "big")
    raise ValueError(f"{number} does not fit in 64 bits")


def _cbor(value: object) -> bytes:
    """Encode None, integers, text, bytes, and sequences of them."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    if isinstance(value, list | tuple):
        return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
    raise TypeError(f"no CBOR for {value!r} of type {type(value).__name__}")


_PROFILES: dict[str, Callable[[int, object], _Profile]] = {
    "sha256": _SHA256,
    "xxh3": _XXH3,
    "vllm": _VLLM,
}

PROFILES = tuple(_PROFILES)
"""The names of the profiles; the first is the default."""

_NOTHING = BlockKey(None, ())


@dataclass(slots=True, eq=False)
class _Live:
    """One content of the index that can be reached from a root."""

    id: ContentId
    parent: int
    chain: Any
    namespace: Namespace | None
    children: set[int] = field(default_factory=set)


class ContentIds:
    """Names blocks, from a list of tokens or along the log of a prefix index.

    Following a log it keeps one record for each content that is live, and none for the others.
    Not for several threads at a time.

    Parameters
    ----------
    profile : {"sha256", "xxh3", "vllm"}
        Whose names; see the module.
    block_size : int
        Tokens of a block.
    seed : str, bytes or int, optional
        Where chains begin. All who compare names must use the same: text or bytes for
        ``"sha256"``, 64 bits for ``"xxh3"``, the text of vLLM's PYTHONHASHSEED for ``"vllm"``.
    epoch : int
        The epoch of the weights, until ``apply`` reads another one.

    Raises
    ------
    ImportError
        ``"xxh3"`` without the package xxhash; says how to install it.
    """

    def __init__(
        self,
        profile: str = "sha256",
        *,
        block_size: int,
        seed: str | bytes | int | None = None,
        epoch: int = 0,
    ) -> None:
        if profile not in _PROFILES:
            raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
        if index(block_size) < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if not -(2**63) <= index(epoch) < 2**63:
            raise ValueError(f"epoch must fit in 64 bits, got {epoch}")
        self._profile_name = profile
        self._profile: _Profile = _PROFILES[profile](index(block_size), seed)
        self._block_size = index(block_size)
        self._epoch = index(epoch)
        # By uid. None stands for a content that nobody can reach: something before it is gone.
        self._live: dict[int, _Live | None] = {}
        # How many contents have a name. More than one where a profile does not tell them apart;
        # a reader hears of the first and of the end of the last.
        self._named: dict[ContentId, int] = {}

    @property
    def profile(self) -> str:
        """The name of the profile."""
        return self._profile_name

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    @property
    def epoch(self) -> int:
        """The epoch that names are made for."""
        return self._epoch

    def __len__(self) -> int:
        """Count the names that are live on the log followed."""
        return len(self._named)

    def __repr__(self) -> str:
        return (
            f"ContentIds({self._profile_name!r}, block_size={self._block_size}), {len(self)} live"
        )

    def ids_of(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any],
        *,
        namespace: Namespace | str | bytes | None = None,
        media: Sequence[Media] = (),
    ) -> list[ContentId]:
        """Name the full blocks of a list of tokens. Changes nothing.

        Parameters
        ----------
        tokens : sequence of int
            What the first block begins with, and on; a last block that is not full has no name.
        namespace, media
            As for ``BlockManager.allocate``.
        """
        ids = _checked(tokens)
        start = namespace_key(namespace)
        keys = block_keys(start, media, len(ids), self._block_size)
        chain = self._profile.chain(decode_key(start).namespace, self._epoch)
        names: list[ContentId] = []
        parent: ContentId | None = None
        for column in range(len(ids) // self._block_size):
            block = ids[column * self._block_size : (column + 1) * self._block_size]
            key = keys.get(column, b"")
            said = decode_key(key) if key else _NOTHING
            parent = self._profile.name(chain, parent, block, key, said)
            names.append(parent)
        return names

    def id_of(self, uid: int) -> ContentId | None:
        """Return the name of a live content of the log; None of one that cannot be reached."""
        live = self._live.get(uid)
        return None if live is None else live.id

    def apply(self, changes: Iterable[Change]) -> list[ContentEvent]:
        """Follow the log of an index and tell its changes by name.

        A reader of the events knows the contents that a request could hit: what lost a block
        before it is removed with it, children before parents, and no name is told twice. What
        a later ``Cleared`` makes void is not named at all.

        Parameters
        ----------
        changes : iterable of Stored, Removed or Cleared
            All of them since the log began, drain by drain.

        Raises
        ------
        ValueError
            A change that does not follow from those before it.
        """
        changes = list(changes)
        events: list[ContentEvent] = []
        for position in reversed(range(len(changes))):
            if isinstance(changes[position], Cleared):
                del changes[:position]
                break
        for change in changes:
            if isinstance(change, Stored):
                self._store(change, events)
            elif isinstance(change, Removed):
                self._remove(change.uid, events)
            else:
                self._live.clear()
                self._named.clear()
                self._epoch = change.epoch
                events.append(change)
        return events

    def _store(self, change: Stored, events: list[ContentEvent]) -> None:
        uid, parent_uid, tokens, key = change
        if uid in self._live:
            raise ValueError(f"content {uid} is stored already")
        if len(tokens) != self._block_size:
            raise ValueError(
                f"content {uid} has {len(tokens)} tokens, a block has {self._block_size}"
            )
        said = decode_key(key) if key else _NOTHING
        if parent_uid == 0:
            namespace, before = said.namespace, None
            chain = self._profile.chain(namespace, self._epoch)
        else:
            parent = self._live.get(parent_uid)
            if parent is None:
                self._live[uid] = None
                return
            namespace, before, chain = parent.namespace, parent.id, parent.chain
        name = self._profile.name(chain, before, tokens, key, said)
        if parent_uid:
            assert parent is not None
            parent.children.add(uid)
        self._live[uid] = _Live(name, parent_uid, chain, namespace)
        count = self._named.get(name, 0)
        self._named[name] = count + 1
        if count == 0:
            events.append(ContentStored(name, before, tokens, namespace, said.media))

    def _remove(self, uid: int, events: list[ContentEvent]) -> None:
        if uid not in self._live:
            raise ValueError(f"content {uid} is not stored")
        live = self._live.pop(uid)
        if live is None:
            return
        parent = self._live.get(live.parent)
        if parent is not None:
            parent.children.discard(uid)
        lost = [live]
        for above in lost:  # grows as it is read
            for child_uid in sorted(above.children):
                child = self._live[child_uid]
                assert child is not None
                lost.append(child)
                self._live[child_uid] = None
        for gone in reversed(lost):
            count = self._named.pop(gone.id)
            if count == 1:
                events.append(ContentRemoved(gone.id))
            else:
                self._named[gone.id] = count - 1


def _checked(tokens: Sequence[int] | np.ndarray[Any, Any]) -> list[int]:
    """Return the ids as a list, or raise an error that names the first that is none."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must have one dimension, got {array.ndim}")
    if array.size == 0:
        return []
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, got {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array >= 2**31))
    if bad.size:
        raise ValueError(
            f"tokens must be between 0 and {2**31 - 1}, got {array[bad[0]]} at position {bad[0]}"
        )
    ids: list[int] = array.tolist()
    return ids


def _uint64(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not 0 <= value < 2**64:
        raise ValueError(f"{name} must be between 0 and {2**64 - 1}, got {value}")
    return value
