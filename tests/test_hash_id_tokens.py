"""Stand-in tokens: equal where the ids are, different where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.hash_id_tokens import tokens_of_hash_ids

any_id = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9), st.just(2**31))


def tokens(ids: list[int], block_size: int = 4, n_tokens: int = 10**6) -> list[int]:
    return tokens_of_hash_ids(np.array(ids, np.int64), block_size, n_tokens).tolist()


@given(st.lists(any_id, max_size=6), st.integers(1, 9), st.integers(0, 60))
def test_they_are_the_tokens_of_each_id_one_after_the_other(
    ids: list[int], block_size: int, n_tokens: int
) -> None:
    each = [token for one in ids for token in tokens([one], block_size)]
    assert len(each) == len(ids) * block_size
    assert tokens(ids, block_size, n_tokens) == each[:n_tokens]
    assert all(0 <= token < 2**31 for token in each)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=9, unique=True))
def test_small_ids_differ_at_every_position(ids: list[int]) -> None:
    for at_position in zip(*(tokens([one], 7) for one in ids), strict=True):
        assert len(set(at_position)) == len(ids)


@given(st.lists(any_id, min_size=2, max_size=9, unique=True))
def test_any_ids_differ_over_a_block(ids: list[int]) -> None:
    assert len({tuple(tokens([one], 4)) for one in ids}) == len(ids)


@pytest.mark.parametrize("high", [1, 2, 2**20, 2**31, 2**32 - 1])
def test_ids_that_agree_in_their_low_bits_differ(high: int) -> None:
    other = (5 + (high << 31)) - (2**64 if high >= 2**32 else 0)
    same = sum(a == b for a, b in zip(tokens([5], 512), tokens([other], 512), strict=True))
    assert same < 3


def test_a_position_is_not_mistaken_for_another() -> None:
    assert len(set(tokens([3], 512))) == 512


def test_they_are_an_array_that_the_manager_takes_as_it_is() -> None:
    array = tokens_of_hash_ids(np.array([1, 2], np.int64), 8, 13)
    assert (array.dtype, array.shape) == (np.int32, (13,))
    assert array.flags.c_contiguous


def test_they_are_the_same_in_every_version() -> None:
    """Somebody may have stored what was computed from them."""
    assert tokens([0, 1, 2**40], 2) == GOLDEN


GOLDEN = [0, 99_338_859, 506_952_113, 606_290_972, 85_568_347, 548_610_911]
