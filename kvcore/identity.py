"""Who may share a block, besides those with equal tokens: namespaces, media, key bytes.

Equal tokens are not equal content. The keys and values of a block also depend on the model
and adapter that computed them, and on the pictures or sounds behind its placeholder tokens;
and a salt keeps tenants apart although their content is the same. All of that becomes one
string of bytes per block, its key, and blocks are shared only where keys are equal.

Nothing is hashed or cut here. Every part carries its type and its length, so that two
different combinations cannot spell the same bytes, and ``decode_key`` reads them back.

The layout, integers big-endian::

    key            = [namespace] [media]                   either may be absent
    namespace      = "N" size(4) part...                   in the column 0 of a prompt only
    part           = field(1) [text name, of an extra one] value
    value          = "s" text | "b" bytes | "i" integer(8, signed)
    media          = "M" count(4) item...                  by their first token
    item           = bytes offset(8, signed) length(8)
    text, bytes    = size(4) content                       text in UTF-8
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from operator import attrgetter, index
from typing import Any, NamedTuple, NoReturn

__all__ = [
    "MAX_PART_BYTES",
    "BlockKey",
    "Media",
    "MediaPart",
    "Namespace",
    "block_keys",
    "decode_key",
    "has_media",
    "namespace_key",
]

MAX_PART_BYTES = 4096
"""The longest name, value or digest. Longer ones are refused, never shortened."""

_NAMESPACE, _MEDIA = b"N", b"M"
_FIELDS = ("model", "lora", "lora_version", "salt")
_EXTRA = len(_FIELDS)

_SIZE = struct.Struct(">I")
_INTEGER = struct.Struct(">q")
_SPAN = struct.Struct(">qQ")


class _Frozen:
    """A value made of the parts that ``__match_args__`` names.

    What a frozen dataclass is, without what the module ``dataclasses`` adds to the time that
    ``import kvcore`` takes.
    """

    __slots__ = ()
    __match_args__: tuple[str, ...] = ()

    def _set(self, **parts: object) -> None:
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def _parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of a {type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} of a {type(self).__name__} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        parts = zip(self.__match_args__, self._parts(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={part!r}' for name, part in parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts()


class Namespace(_Frozen):
    """Who may share blocks: every part takes part in the identity of every block.

    Text and bytes of the same content are two different values, and a part that is absent
    differs from every value. An empty one is refused: it looks like a boundary and is none.

    Parameters
    ----------
    model : str or bytes, optional
        The weights, where several models share one pool.
    lora : str or bytes, optional
        The adapter, by a value that no other adapter ever has. A name that users choose is
        not enough by itself: see ``lora_version``.
    lora_version : int, optional
        Counts how often an adapter was reloaded under its name.
    salt : str or bytes, optional
        A secret of a tenant or a request. Without one, how fast an answer comes tells
        whether somebody else sent the same prompt before.
    extra : tuple of (str, str or bytes or int)
        Further parts by name, in any order; no name twice.

    Raises
    ------
    TypeError, ValueError
        A part of another type, empty, or beyond ``MAX_PART_BYTES`` or 64 bits.
    """

    __slots__ = ("_key", "extra", "lora", "lora_version", "model", "salt")
    __match_args__ = ("model", "lora", "lora_version", "salt", "extra")

    model: str | bytes | None
    lora: str | bytes | None
    lora_version: int | None
    salt: str | bytes | None
    extra: tuple[tuple[str, str | bytes | int], ...]
    _key: bytes

    def __init__(
        self,
        model: str | bytes | None = None,
        lora: str | bytes | None = None,
        lora_version: int | None = None,
        salt: str | bytes | None = None,
        extra: tuple[tuple[str, str | bytes | int], ...] = (),
    ) -> None:
        for name, part in (("model", model), ("lora", lora), ("salt", salt)):
            if not isinstance(part, str | bytes | None):
                raise TypeError(_wrong_type(name, "str or bytes", part))
        if lora_version is not None:
            lora_version = _integer("lora_version", lora_version, -(2**63))
        extra = _sorted_by_name(extra)
        parts = bytearray()
        value: str | bytes | int | None
        for number, value in enumerate((model, lora, lora_version, salt)):
            if value is not None:
                parts.append(number)
                parts += _value(_FIELDS[number], value)
        for name, value in extra:
            parts.append(_EXTRA)
            parts += _framed(name.encode())
            parts += _value(f"extra part {name!r}", value)
        key = _NAMESPACE + _framed(bytes(parts)) if parts else b""
        self._set(
            model=model, lora=lora, lora_version=lora_version, salt=salt, extra=extra, _key=key
        )

    def key(self) -> bytes:
        """Return the bytes that stand for this namespace: ``b""`` if it has no part."""
        return self._key


class Media(_Frozen):
    """One media item of a prompt: its tokens are ``start`` up to, not including, ``stop``.

    Parameters
    ----------
    start, stop : int
        Positions in the prompt, ``0 <= start < stop``.
    digest : bytes
        What tells this item from all others, for instance SHA-256 of its content and of how
        it was processed. Compared as a whole, up to ``MAX_PART_BYTES``.
    """

    __slots__ = __match_args__ = ("start", "stop", "digest")

    start: int
    stop: int
    digest: bytes

    def __init__(self, start: int, stop: int, digest: bytes) -> None:
        start, stop = _integer("start", start, 0), _integer("stop", stop, 0)
        if stop <= start:
            raise ValueError(f"stop must be beyond start, got the empty span {start}:{stop}")
        if not isinstance(digest, bytes):
            raise TypeError(_wrong_type("digest", "bytes", digest))
        _check_size("digest", digest)
        self._set(start=start, stop=stop, digest=digest)


class MediaPart(NamedTuple):
    """One media item as a block sees it."""

    digest: bytes
    offset: int
    """Its first token, counted from the block's; negative if it begins in an earlier block."""
    length: int
    """Its tokens, over all blocks."""


class BlockKey(NamedTuple):
    """What the key bytes of a block say."""

    namespace: Namespace | None
    media: tuple[MediaPart, ...]


def namespace_key(namespace: Namespace | str | bytes | None) -> bytes:
    """Return the bytes of a namespace: ``b""`` for None; text or bytes alone are a salt."""
    if namespace is None:
        return b""
    if isinstance(namespace, Namespace):
        return namespace.key()
    if isinstance(namespace, str | bytes):
        return Namespace(salt=namespace).key()
    raise TypeError(_wrong_type("namespace", "a Namespace, str, bytes or None", namespace))


def block_keys(
    namespace_key: bytes, media: Sequence[Media], n_tokens: int, block_size: int
) -> dict[int, bytes]:
    """Make the keys of a prompt's blocks, for those that have one.

    Block 0 has one if there is a namespace; the blocks after it inherit the namespace from
    their predecessor. A media item is part of every block that it overlaps, partial ones
    included.

    Parameters
    ----------
    namespace_key : bytes
        Of the function of that name.
    media : sequence of Media
        In any order, none overlapping another.
    n_tokens, block_size : int
        The length of the prompt, which no item may exceed, and of a block.

    Returns
    -------
    dict of int to bytes
        Key by column of the block table.
    """
    if not media:
        return {0: namespace_key} if namespace_key else {}
    items: dict[int, list[bytes]] = {}
    end = 0
    for item in _by_start(media):
        if item.start < end:
            raise ValueError(
                f"media must not overlap, got one that ends at {end} and {item.start}:{item.stop}"
            )
        end = item.stop
        if end > n_tokens:
            raise ValueError(
                f"media must end within the {n_tokens} tokens, got one that ends at {end}"
            )
        digest = _framed(item.digest)
        for column in range(item.start // block_size, (end - 1) // block_size + 1):
            span = _SPAN.pack(item.start - column * block_size, end - item.start)
            items.setdefault(column, []).append(digest + span)
    keys = {
        column: _MEDIA + _SIZE.pack(len(found)) + b"".join(found) for column, found in items.items()
    }
    if namespace_key:
        keys[0] = namespace_key + keys.get(0, b"")
    return keys


def has_media(key: bytes) -> bool:
    """Whether a media item takes part in the key of a block."""
    if key[:1] != _NAMESPACE:
        return key[:1] == _MEDIA
    size: int = _SIZE.unpack_from(key, 1)[0]
    return len(key) > 1 + _SIZE.size + size


def decode_key(key: bytes) -> BlockKey:
    """Read the key of a block.

    Raises
    ------
    ValueError
        Bytes that no namespace and media have as their key.
    """
    if not isinstance(key, bytes):
        raise TypeError(_wrong_type("key", "bytes", key))
    try:
        return _decoded(key)
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise ValueError(f"key is not that of a block: {key!r}") from error


def _value(name: str, value: str | bytes | int) -> bytes:
    """Frame a value with its type and length, or raise an error that names it."""
    if isinstance(value, str):
        try:
            content = value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} must be valid Unicode, got {value!r}") from error
        _check_size(name, content)
        return b"s" + _framed(content)
    if isinstance(value, bytes):
        _check_size(name, value)
        return b"b" + _framed(value)
    return b"i" + _INTEGER.pack(_integer(name, value, -(2**63), "str, bytes or an integer"))


def _integer(name: str, value: object, minimum: int, expected: str = "an integer") -> int:
    """Return ``value`` as a plain int of 64 bits."""
    try:
        if isinstance(value, bool):  # True equals 1 and means something else
            raise TypeError
        number = index(value)  # type: ignore[arg-type]  # that is what is tried
    except TypeError:
        raise TypeError(_wrong_type(name, expected, value)) from None
    if not minimum <= number < 2**63:
        raise ValueError(f"{name} must be between {minimum} and {2**63 - 1}, got {number}")
    return number


def _framed(content: bytes) -> bytes:
    return _SIZE.pack(len(content)) + content


def _check_size(name: str, content: bytes) -> None:
    if not content:
        raise ValueError(f"{name} must not be empty; absent is None")
    if len(content) > MAX_PART_BYTES:
        raise ValueError(
            f"{name} must be at most {MAX_PART_BYTES} bytes, "
            f"got {len(content)} that begin with {content[:16]!r}"
        )


def _wrong_type(name: str, expected: str, value: object) -> str:
    return f"{name} must be {expected}, got {value!r} of type {type(value).__name__}"


def _sorted_by_name(
    extra: tuple[tuple[str, str | bytes | int], ...],
) -> tuple[tuple[str, str | bytes | int], ...]:
    """``extra`` in the one order that all orders have in common, its names checked."""
    if not extra:
        return ()
    try:
        pairs = [(name, value) for name, value in extra]
    except (TypeError, ValueError):
        expected = "pairs of a name and a value"
        raise TypeError(_wrong_type("extra", expected, extra)) from None
    seen: set[str] = set()
    for name, _ in pairs:
        if not isinstance(name, str):
            raise TypeError(_wrong_type("a name in extra", "str", name))
        _value("a name in extra", name)
        if name in seen:
            raise ValueError(f"extra must name a part once, got {name!r} twice")
        seen.add(name)
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


def _by_start(media: Sequence[Media]) -> list[Media]:
    try:
        items = list(media)
    except TypeError:
        raise TypeError(_wrong_type("media", "a sequence of Media", media)) from None
    for item in items:
        if not isinstance(item, Media):
            raise TypeError(_wrong_type("media", "a sequence of Media", item))
    items.sort(key=attrgetter("start"))
    return items


class _Reader:
    """Takes bytes off the front. That some are missing shows when what it read is rewritten."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0

    def __bool__(self) -> bool:
        return self._position < len(self._content)

    def take(self, size: int) -> bytes:
        piece = self._content[self._position : self._position + size]
        self._position += size
        return piece

    def size(self) -> int:
        number: int = _SIZE.unpack(self.take(_SIZE.size))[0]
        return number

    def framed(self) -> bytes:
        return self.take(self.size())

    def value(self) -> str | bytes | int:
        kind = self.take(1)
        if kind == b"s":
            return self.framed().decode()
        if kind == b"b":
            return self.framed()
        if kind == b"i":
            number: int = _INTEGER.unpack(self.take(_INTEGER.size))[0]
            return number
        raise ValueError(f"no type of value is called {kind!r}")


def _decoded(key: bytes) -> BlockKey:
    reader = _Reader(key)
    namespace = None
    if key[:1] == _NAMESPACE:
        reader.take(1)
        namespace = _decoded_namespace(_Reader(reader.framed()))
    media = tuple(_decoded_media(reader)) if reader else ()
    # One spelling each: what the reader forgave, such as parts out of order, shows here.
    if (b"" if namespace is None else namespace.key()) + _encoded_media(media) != key:
        raise ValueError("not the one way to write it")
    return BlockKey(namespace, media)


def _decoded_namespace(reader: _Reader) -> Namespace:
    fields: dict[str, str | bytes | int] = {}
    extra: list[tuple[str, str | bytes | int]] = []
    while reader:
        number = reader.take(1)[0]
        if number == _EXTRA:
            name = reader.framed().decode()
            extra.append((name, reader.value()))
        else:
            fields[_FIELDS[number]] = reader.value()
    return Namespace(**fields, extra=tuple(extra))  # type: ignore[arg-type]  # it checks


def _decoded_media(reader: _Reader) -> Iterator[MediaPart]:
    if reader.take(1) != _MEDIA:
        raise ValueError("neither a namespace nor media")
    for _ in range(reader.size()):
        digest = reader.framed()
        offset, length = _SPAN.unpack(reader.take(_SPAN.size))
        yield MediaPart(digest, offset, length)


def _encoded_media(media: tuple[MediaPart, ...]) -> bytes:
    if not media:
        return b""
    items = (_framed(part.digest) + _SPAN.pack(part.offset, part.length) for part in media)
    return _MEDIA + _SIZE.pack(len(media)) + b"".join(items)
