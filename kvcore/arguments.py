"""Checks of arguments, done once, at the edge."""

from __future__ import annotations

from collections.abc import Hashable
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["at_least", "number_of", "sequence_ids", "whole_numbers"]


def at_least(value: Any, minimum: int, name: str) -> int:
    """``value`` as an int of at least ``minimum``, or an error naming both."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {value!r} of type {type(value).__name__}"
        ) from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def number_of(tokens: Any) -> int:
    """How many tokens there are, or an error naming them."""
    try:
        return len(tokens)
    except TypeError:
        raise TypeError(f"tokens must be a sequence of token ids, got {tokens!r}") from None


def sequence_ids(values: Any, name: str) -> dict[Hashable, None]:
    """``values`` as a set in their order, or an error naming both."""
    try:
        return dict.fromkeys(values)
    except TypeError:
        raise TypeError(f"{name} must be a collection of ids, got {values!r}") from None


def whole_numbers(values: Any, name: str) -> NDArray[np.integer[Any]]:
    """``values`` as an array of some integer type, or an error naming both."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(array.shape if array.ndim == 1 else 0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array
