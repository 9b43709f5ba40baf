"""A request on its way: what it asks for, and why it waits or was refused."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from kvcore.eviction import Retention
    from kvcore.prefix_index import Prompt

__all__ = ["Member", "Reason", "Request", "Resumed", "Verdict"]


UNKNOWN_TOKEN = -1
"""Instead of a token id that nobody has told."""


class Reason(Enum):
    """Why a request waits, was refused, or was ended."""

    BEHIND = "behind others in the queue"
    MAX_RUNNING = "as many sequences run as are allowed"
    PARTIAL_PREFILLS = "as many prompts are under way as are allowed"
    SWAPPED_BEFORE = "sequences in host memory return first"
    RESOURCE = "too little is available of a resource besides blocks"
    BLOCKS = "too few blocks are available"
    WATERMARK = "it fits, but would leave fewer blocks than the watermark"
    RESERVE = "it fits, but would leave fewer blocks than the others are going to need"
    LIVE_ID = "a live sequence has its id"
    PREFIX = "it let a step pass while blocks that it can share were computed, and enters now"
    FITS = "it enters at the next step"
    SWAPPED = "it is in host memory, and too few blocks are available"
    SWAPPING = "its blocks are on their way to host memory or back"
    STALLED = "it runs, and the block of its next token is not available yet"
    NEVER_FITS = "its prompt can never fit under the watermark"
    OUTGREW_POOL = "its next token does not fit into the whole pool"
    BAD_REQUEST = "it lacks what the admission policy needs to know"
    BAD_LENGTH = "its number of tokens is no integer from 1 to 2**31 - 2"


class Verdict(NamedTuple):
    """A reason with its numbers."""

    reason: Reason
    needed: int
    """Blocks that it needs to run; of a resource, how much of it."""
    available: int
    """Blocks that it may use: now while it waits, ever once it is refused or ended."""
    ahead: int = 0
    """Requests before it in the queue."""
    reserve: int = 0
    """Blocks of the available ones that it has to leave."""


class Member(NamedTuple):
    """One sequence of a preempted group, besides its first."""

    seq: Hashable
    n_tokens: int
    prompt: Prompt | None
    pending: int
    lost: int


class _Pair(NamedTuple):
    seq: Hashable
    n_tokens: int


class Request(_Pair):
    """Queue entry that says more than its length; equal to the plain ``(seq, n_tokens)``.

    Attributes
    ----------
    prompt : Prompt or None
        The tokens that are known, hashed once however often the request is tried.
    retention : sequence of Retention
        As for ``BlockManager.allocate``.
    max_tokens : int or None
        Tokens to generate; None until somebody says that it has finished.
    priority : int
        The larger, the more important. Only policies that say so look at it.
    tenant : hashable
        On whose account it runs, for policies that share out.
    siblings : tuple of hashable
        Ids of further sequences that start from the same prompt: samples or beams.
    prompt_tokens : int
        Tokens of the prompt as it was added, also after a preemption.
    arrival : int
        Its place in the order of arrival. Kept over preemptions.
    admitted : int
        Number of the step that admitted it last; -1 before.
    queued : int
        Number of the last step before it began to wait, for the first time or again.
    preemptions : int
        How often it has lost its blocks.
    waited : bool
        Whether it has let a step pass for a prefix; it does so once.
    can_run : bool
        Whether it was found that it can run at all, which does not change.
    members : list of hashable
        Its sequences that have a block table now.
    """

    prompt: Prompt | None = None
    retention: Sequence[Retention] = ()
    max_tokens: int | None = None
    priority: int = 0
    tenant: Hashable = None
    siblings: tuple[Hashable, ...] = ()
    prompt_tokens: int
    arrival: int = -1
    admitted: int = -1
    queued: int = -1
    preemptions: int = 0
    waited: bool = False
    can_run: bool = False
    members: list[Hashable]

    def __new__(
        cls,
        seq: Hashable,
        n_tokens: int,
        prompt: Prompt | None = None,
        retention: Sequence[Retention] = (),
        **more: Any,
    ) -> Self:
        """Make the pair, with what the manager and the policies need besides."""
        request = super().__new__(cls, seq, n_tokens)
        request.prompt_tokens = n_tokens
        request.members = []
        if prompt is not None:
            request.prompt = prompt
        if retention:
            request.retention = retention
        if more:
            request.__dict__.update(more)
        return request

    @property
    def width(self) -> int:
        """Sequences that it is going to run at once."""
        return 1 + len(self.siblings)

    @property
    def ids(self) -> list[Hashable]:
        """The ids of those sequences."""
        return [self.seq, *self.siblings]

    def member(self, seq: Hashable) -> Member:
        """Return what was known of one of its sequences when it was queued."""
        return Member(seq, self.n_tokens, self.prompt, UNKNOWN_TOKEN, 0)

    def blocks_to_enter(self, block_size: int) -> int:
        """Return the blocks that it holds once it has entered, those that it shares included.

        One for each sibling is among them, which writes its first token into its own.
        """
        return -(-self.n_tokens // block_size) + len(self.siblings)

    @property
    def final_tokens(self) -> int | None:
        """Tokens that each of its sequences has written at its end: all but the last."""
        if self.max_tokens is None:
            return None
        return self.prompt_tokens + max(self.max_tokens - 1, 0)


class Resumed(Request):
    """Queue entry of a preempted request: its prompt and everything generated so far.

    Its ``prompt`` ends with the last token that was committed.

    Attributes
    ----------
    others : tuple of Member
        Its other sequences, if they had come apart.
    pending : int
        Its last token, sampled and not yet committed; -1 if not known.
    lost : int
        Its leading tokens that had been computed before.
    """

    others: tuple[Member, ...] = ()
    pending: int = -1
    lost: int = 0

    @property
    def width(self) -> int:
        """Sequences that it is going to run at once."""
        return 1 + len(self.siblings) + len(self.others)

    @property
    def ids(self) -> list[Hashable]:
        """The ids of those sequences."""
        return [self.seq, *self.siblings, *(other.seq for other in self.others)]

    def member(self, seq: Hashable) -> Member:
        """Return what was known of one of its sequences when it was queued."""
        for other in self.others:
            if other.seq == seq:
                return other
        return Member(seq, self.n_tokens, self.prompt, self.pending, self.lost)

    def blocks_to_enter(self, block_size: int) -> int:
        """Return the blocks that it holds once it has entered, those that it shares included.

        Its next token has room too: otherwise it would yield again to the very shortage
        that it made way for.
        """
        blocks = -(-(self.n_tokens + 1) // block_size) + len(self.siblings)
        for other in self.others:
            blocks += -(-(other.n_tokens + 1) // block_size)
            blocks -= self.shared_tokens(other, block_size) // block_size
        return blocks

    def shared_tokens(self, other: Member, block_size: int) -> int:
        """Tokens of ``other`` that are not computed again, but by the first sequence.

        Those of the prompt, in full blocks, and never the last of either: from that they
        sample, in one step.
        """
        last = max(min(self.n_tokens, other.n_tokens) - 1, 0)
        return min(self.prompt_tokens, last) // block_size * block_size

    @classmethod
    def of(cls, request: Request, members: Sequence[Member], **changes: Any) -> Self:
        """Make the queue entry of ``request``, of which these members are to come back."""
        first, *others = members
        resumed = cls(first.seq, first.n_tokens)
        resumed.__dict__.update(
            request.__dict__
            | {
                "prompt": first.prompt,
                "members": [],
                "can_run": False,  # it has grown
                "others": tuple(others),
                "pending": first.pending,
                "lost": first.lost,
            }
            | changes
        )
        return resumed

    def without_first(self) -> Resumed:
        """Return the same request after its first sequence has ended. Needs others."""
        return Resumed.of(self, self.others)
