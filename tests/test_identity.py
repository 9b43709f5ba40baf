"""Key bytes of blocks: no two combinations of adapter, salt and media can spell the same."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.identity import (
    MAX_PART_BYTES,
    BlockKey,
    Media,
    MediaPart,
    Namespace,
    block_keys,
    decode_key,
    has_media,
    namespace_key,
)

# Few letters, and those that the layout itself uses: near-collisions are likely.
texts = st.text("abNMs\x00\x01", min_size=1, max_size=3)
contents = st.binary(min_size=1, max_size=3) | texts.map(str.encode)
integers = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 2)
namespaces = st.builds(
    Namespace,
    model=st.none() | texts | contents,
    lora=st.none() | texts | contents,
    lora_version=st.none() | integers,
    salt=st.none() | texts | contents,
    extra=st.dictionaries(texts, texts | contents | integers, max_size=3).map(
        lambda parts: tuple(parts.items())
    ),
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[Media], int, int]:
    """Media that do not overlap, a length that holds them, and a block size."""
    lengths = st.integers(0, 6), st.integers(1, 9), contents
    media = []
    end = 0
    for gap, length, digest in draw(st.lists(st.tuples(*lengths), max_size=4)):
        media.append(Media(end + gap, end + gap + length, digest))
        end += gap + length
    return draw(st.permutations(media)), end + draw(st.integers(0, 3)), draw(st.integers(1, 5))


def by_token(namespace: Namespace, prompt: tuple[list[Media], int, int]) -> dict[int, BlockKey]:
    """What ``block_keys`` says, from looking at every token."""
    media, n_tokens, block_size = prompt
    found: dict[int, list[MediaPart]] = {0: []} if namespace.key() else {}
    for position in range(n_tokens):
        column = position // block_size
        for item in media:
            if item.start <= position < item.stop:
                offset, length = item.start - column * block_size, item.stop - item.start
                part = MediaPart(item.digest, offset, length)
                if part not in found.setdefault(column, []):
                    found[column].append(part)
    return {
        column: BlockKey(namespace if column == 0 and namespace.key() else None, tuple(parts))
        for column, parts in found.items()
    }


# ------------------------------------------------------------------- namespaces


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace(lora="x"), Namespace(salt="x")),
        (Namespace(model="x"), Namespace(lora="x")),
        (Namespace(lora="ab", salt="c"), Namespace(lora="a", salt="bc")),
        (Namespace(model="ab", lora="c"), Namespace(model="abc")),
        (Namespace(salt="x"), Namespace(salt=b"x")),
        (Namespace(salt="1"), Namespace(extra=(("salt", "1"),))),
        (Namespace(extra=(("a", 1),)), Namespace(extra=(("a", "1"),))),
        (Namespace(extra=(("a", "bc"),)), Namespace(extra=(("ab", "c"),))),
        (Namespace(extra=(("a", "b"), ("c", "d"))), Namespace(extra=(("a", "d"), ("c", "b")))),
        (Namespace(salt="a"), Namespace(salt="a\0")),
        (Namespace(salt="\u00e9"), Namespace(salt="e\u0301")),
        (Namespace(salt="x"), Namespace()),
    ],
    ids=lambda value: str(value.key()),
)
def test_parts_of_one_spelling_are_still_different_parts(one: Namespace, other: Namespace) -> None:
    """K5-08: every part carries its name, its type and its length."""
    assert one.key() != other.key()


def test_an_adapter_is_its_value_and_its_version() -> None:
    """K5-01, K5-02, K5-03: none, a, b, and a reloaded in place are four namespaces."""
    four = [
        Namespace(),
        Namespace(lora="a"),
        Namespace(lora="b"),
        Namespace(lora="a", lora_version=1),
        Namespace(lora="a", lora_version=2),
    ]
    assert len({namespace.key() for namespace in four}) == len(four)


def test_a_salt_alone_may_be_given_as_text_or_bytes() -> None:
    assert namespace_key("x") == namespace_key(Namespace(salt="x")) == Namespace(salt="x").key()
    assert namespace_key(b"x") == Namespace(salt=b"x").key()
    assert namespace_key(None) == namespace_key(Namespace()) == b""


def test_further_parts_have_no_order() -> None:
    parts: list[tuple[str, str | bytes | int]]
    parts = [("region", "eu"), ("tenant", 7), ("policy", b"\1")]
    namespaces = [Namespace(extra=order) for order in itertools.permutations(parts)]
    assert len(set(namespaces)) == len({namespace.key() for namespace in namespaces}) == 1


@pytest.mark.parametrize(
    "value",
    [
        Namespace(model="m", lora=b"l", lora_version=2, salt="s", extra=(("a", 1),)),
        Namespace(),
        Media(3, 5, b"d"),
    ],
    ids=repr,
)
def test_namespaces_and_media_are_plain_values(value: Any) -> None:
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), eval(repr(value))):
        assert again == value
        assert hash(again) == hash(value)
        if isinstance(value, Namespace):
            assert again.key() == value.key()
    assert value != tuple(getattr(value, name) for name in value.__match_args__)
    first = value.__match_args__[0]
    with pytest.raises(AttributeError, match=f"{first} of a {type(value).__name__} cannot be cha"):
        setattr(value, first, 1)
    with pytest.raises(AttributeError, match=f"{first} of a {type(value).__name__} cannot be del"):
        delattr(value, first)
    with pytest.raises(AttributeError):
        value.other = 1


def test_a_version_may_be_a_numpy_integer() -> None:
    namespace = Namespace(lora_version=np.int32(3))  # type: ignore[arg-type]
    assert namespace == Namespace(lora_version=3)
    assert type(namespace.lora_version) is int


@given(namespaces, namespaces)
@example(Namespace(extra=(("a", 1), ("b", 2))), Namespace(extra=(("b", 2), ("a", 1))))
@example(Namespace(salt="x"), Namespace(salt=b"x"))
def test_keys_are_equal_exactly_where_namespaces_are(one: Namespace, other: Namespace) -> None:
    assert (one.key() == other.key()) == (one == other)


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ({"salt": 5}, TypeError, "salt must be str or bytes, got 5 of type int"),
        ({"salt": ""}, ValueError, "salt must not be empty"),
        ({"lora": b""}, ValueError, "lora must not be empty"),
        ({"model": bytearray(b"m")}, TypeError, "model must be str or bytes, got bytearray"),
        ({"salt": "x" * (MAX_PART_BYTES + 1)}, ValueError, "salt must be at most 4096 bytes"),
        ({"salt": "\ud800"}, ValueError, "salt must be valid Unicode, got '\\\\ud800'"),
        ({"lora_version": "2"}, TypeError, "lora_version must be an integer, got '2'"),
        ({"lora_version": True}, TypeError, "lora_version must be an integer, got True"),
        ({"lora_version": 2**63}, ValueError, "lora_version must be between .* got 92233"),
        ({"extra": (("a", 1), ("a", 1))}, ValueError, "got 'a' twice"),
        ({"extra": (("", 1),)}, ValueError, "a name in extra must not be empty"),
        ({"extra": ((1, "a"),)}, TypeError, "a name in extra must be str, got 1"),
        ({"extra": ("ab", "c")}, TypeError, "extra must be pairs of a name and a value"),
        ({"extra": (("a", 1.5),)}, TypeError, "extra part 'a' must be str, bytes or an integer"),
        ({"extra": (("a", ""),)}, ValueError, "extra part 'a' must not be empty"),
    ],
)
def test_a_namespace_checks_its_parts(
    parts: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Namespace(**parts)


def test_the_longest_part_is_taken_whole() -> None:
    one, other = "x" * MAX_PART_BYTES, "x" * (MAX_PART_BYTES - 1) + "y"
    assert Namespace(salt=one).key() != Namespace(salt=other).key()


def test_only_a_namespace_or_a_salt_is_a_namespace() -> None:
    with pytest.raises(TypeError, match=r"namespace must be .* got 5 of type int"):
        namespace_key(5)  # type: ignore[arg-type]


# ------------------------------------------------------------------------ media


def test_the_end_of_an_item_is_exclusive() -> None:
    """K5-06: an item over tokens 4 to 7 touches block 1 and no other."""
    keys = block_keys(b"", [Media(4, 8, b"picture")], 12, 4)
    assert set(keys) == {1}
    assert decode_key(keys[1]).media == ((b"picture", 0, 4),)


def test_blocks_before_an_item_have_no_key_and_those_it_touches_do() -> None:
    """K5-04: equal placeholder tokens, but the digest separates from the item's first block."""
    one = block_keys(b"", [Media(5, 9, b"cat")], 12, 4)
    other = block_keys(b"", [Media(5, 9, b"dog")], 12, 4)
    assert set(one) == set(other) == {1, 2}
    assert one[1] != other[1]
    assert one[2] != other[2]


def test_an_item_over_several_blocks_says_where_in_it_each_block_is() -> None:
    keys = block_keys(b"", [Media(2, 11, b"video")], 16, 4)
    assert [decode_key(keys[column]).media for column in (0, 1, 2)] == [
        ((b"video", 2, 9),),
        ((b"video", -2, 9),),
        ((b"video", -6, 9),),
    ]
    assert set(keys) == {0, 1, 2}


def test_one_item_at_two_places_is_two_contents() -> None:
    early = block_keys(b"", [Media(1, 3, b"d")], 4, 4)
    late = block_keys(b"", [Media(2, 4, b"d")], 4, 4)
    assert early[0] != late[0]


def test_where_an_item_ends_is_part_of_the_key() -> None:
    """The tokens after it are looked up in the vocabulary, those in it are not."""
    short = block_keys(b"", [Media(0, 2, b"d")], 4, 4)
    long = block_keys(b"", [Media(0, 4, b"d")], 4, 4)
    assert short[0] != long[0]


def test_two_items_in_one_block_come_in_the_order_of_their_tokens() -> None:
    one, other = Media(0, 2, b"a"), Media(2, 4, b"b")
    keys = block_keys(b"", [one, other], 4, 4)
    assert keys == block_keys(b"", [other, one], 4, 4)
    assert decode_key(keys[0]).media == ((b"a", 0, 2), (b"b", 2, 2))
    assert keys != block_keys(b"", [Media(0, 2, b"b"), Media(2, 4, b"a")], 4, 4)


def test_a_digest_is_compared_whole() -> None:
    """K5-05: digests that differ above bit 16, and only in the last byte of 4,096."""
    low = (5).to_bytes(8, "little")
    high = (5 + (1 << 60)).to_bytes(8, "little")
    long, longer = bytes(MAX_PART_BYTES), bytes(MAX_PART_BYTES - 1) + b"\1"
    keys = {block_keys(b"", [Media(0, 4, digest)], 4, 4)[0] for digest in (low, high, long, longer)}
    assert len(keys) == 4


def test_an_item_in_the_trailing_partial_block_counts_there() -> None:
    assert set(block_keys(b"", [Media(4, 6, b"d")], 6, 4)) == {1}


def test_the_first_block_has_the_namespace_and_its_media() -> None:
    namespace = Namespace(lora="x", salt="y")
    keys = block_keys(namespace.key(), [Media(2, 6, b"d")], 8, 4)
    assert decode_key(keys[0]) == (namespace, ((b"d", 2, 4),))
    assert decode_key(keys[1]) == (None, ((b"d", -2, 4),))
    assert block_keys(namespace.key(), (), 8, 4) == {0: namespace.key()}
    assert block_keys(b"", (), 8, 4) == {}


@given(namespaces, prompts())
@example(Namespace(), ([Media(0, 1, b"d")], 1, 1))
def test_keys_say_what_a_walk_over_all_tokens_says(
    namespace: Namespace, prompt: tuple[list[Media], int, int]
) -> None:
    keys = block_keys(namespace.key(), *prompt)
    expected = by_token(namespace, prompt)
    assert {column: decode_key(key) for column, key in keys.items()} == expected
    assert all(has_media(key) == bool(expected[column].media) for column, key in keys.items())


@given(namespaces, prompts(), namespaces, prompts())
def test_keys_are_equal_exactly_where_what_they_say_is(
    one: Namespace,
    one_prompt: tuple[list[Media], int, int],
    other: Namespace,
    other_prompt: tuple[list[Media], int, int],
) -> None:
    ones, others = by_token(one, one_prompt), by_token(other, other_prompt)
    one_keys, other_keys = (
        block_keys(one.key(), *one_prompt),
        block_keys(other.key(), *other_prompt),
    )
    for column, other_column in itertools.product(ones, others):
        equal = one_keys[column] == other_keys[other_column]
        assert equal == (ones[column] == others[other_column])


@pytest.mark.parametrize(
    ("media", "error", "said"),
    [
        ([Media(0, 3, b"a"), Media(2, 4, b"b")], ValueError, "media .* ends at 3 and 2:4"),
        ([Media(0, 3, b"a"), Media(0, 3, b"a")], ValueError, "media .* ends at 3 and 0:3"),
        ([Media(6, 9, b"a")], ValueError, "media must end within the 8 tokens, .* ends at 9"),
        ([(0, 3, b"a")], TypeError, "media must be a sequence of Media, got .* of type tuple"),
        (Media(0, 3, b"a"), TypeError, "media must be a sequence of Media, got Media"),
    ],
)
def test_media_must_fit_the_prompt_and_each_other(
    media: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        block_keys(b"", media, 8, 4)


@pytest.mark.parametrize(
    ("item", "error", "said"),
    [
        ((-1, 3, b"d"), ValueError, "start must be between 0 and .* got -1"),
        ((3, 3, b"d"), ValueError, "stop must be beyond start, got the empty span 3:3"),
        ((0, 2**63, b"d"), ValueError, "stop must be between .* got 9223372036854775808"),
        (("0", 3, b"d"), TypeError, "start must be an integer, got '0' of type str"),
        ((0, 3, "d"), TypeError, "digest must be bytes, got 'd' of type str"),
        ((0, 3, b""), ValueError, "digest must not be empty"),
        ((0, 3, bytes(MAX_PART_BYTES + 1)), ValueError, "digest must be at most 4096 bytes"),
    ],
)
def test_a_media_item_checks_its_parts(item: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Media(*item)


# --------------------------------------------------------------------- decoding

WHOLE = block_keys(
    Namespace(lora="x", lora_version=1, extra=(("a", b"b"),)).key(), [Media(0, 4, b"d")], 4, 4
)[0]


def test_no_key_says_nothing() -> None:
    assert decode_key(b"") == (None, ())
    assert not has_media(b"")


@pytest.mark.parametrize("size", range(1, len(WHOLE)))
def test_a_key_cut_short_is_none(size: int) -> None:
    # Without its media the key is the namespace's, which is one.
    if WHOLE[:size] == Namespace(lora="x", lora_version=1, extra=(("a", b"b"),)).key():
        assert not has_media(WHOLE[:size])
        return
    with pytest.raises(ValueError, match="key is not that of a block"):
        decode_key(WHOLE[:size])


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_key_with_one_byte_changed_is_none_or_another(position: int, change: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[position] ^= change
    try:
        said = decode_key(bytes(damaged))
    except ValueError:
        return
    assert said != decode_key(WHOLE)


@pytest.mark.parametrize(
    "key",
    [
        WHOLE + b"\0",
        b"x",
        b"N\0\0\0\0",
        b"M\0\0\0\0",
        b"N\0\0\0\7\0q\0\0\0\1m",  # no such type
        b"N\0\0\0\7\7s\0\0\0\1m",  # no such field
        b"N\0\0\0\x0e" + b"\3s\0\0\0\1m" + b"\0s\0\0\0\1m",  # fields out of order
        b"N\0\0\0\x0e" + b"\3s\0\0\0\1m" * 2,  # a field twice
    ],
)
def test_only_one_spelling_is_read(key: bytes) -> None:
    with pytest.raises(ValueError, match="key is not that of a block"):
        decode_key(key)


def test_a_key_is_bytes() -> None:
    with pytest.raises(TypeError, match="key must be bytes, got 'N' of type str"):
        decode_key("N")  # type: ignore[arg-type]
