"""The slow, obvious twin of the scheduler's engine steps: lists and dicts, one sequence at a time.

It is the oracle of ``test_engine_scheduler_against_model.py``. The blocks are those of the
reference manager. Policies are the default ones: first come, first served; the newest yields;
a watermark. Nothing is remembered to save work: who is at its limit, whose tokens are known,
how many blocks somebody lacks is asked anew each time.

Verdicts are tuples: reason, needed, available, ahead, reserve.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reference_model import HOLE, ReferenceBlockManager, ReferencePrompt, blocks_for

from kvcore.errors import OutOfBlocks
from kvcore.scheduler import Reason

__all__ = ["ReferenceEngineScheduler", "ReferenceEngineStep", "ReferenceRequest"]

LARGEST_LENGTH = 2**31 - 2

COUNTERS = (
    "requests_added",
    "finished",
    "aborted",
    "rejected",
    "preemptions_recompute",
    "preemptions_swap",
    "recomputed_tokens",
    "swap_out_blocks",
    "swap_in_blocks",
    "prefill_tokens",
    "sampled_tokens",
    "draft_tokens",
    "rejected_draft_tokens",
    "ignored_results",
    "admission_blocked_watermark",
    "admission_blocked_blocks",
    "admission_blocked_max_running",
    "admission_blocked_budget",
    "admission_blocked_resource",
)

BLOCKED = {
    Reason.MAX_RUNNING: "admission_blocked_max_running",
    Reason.PARTIAL_PREFILLS: "admission_blocked_budget",
    Reason.BLOCKS: "admission_blocked_blocks",
    Reason.WATERMARK: "admission_blocked_watermark",
}

VerdictParts = tuple[Reason, int, int, int, int]


@dataclass
class Away:
    """What is kept of a sequence that is in host memory, or on its way there or back."""

    n_tokens: int
    kept_columns: list[int]
    """Of its table: what somebody else holds too stays where it is."""
    kept_blocks: list[int]
    prompt: ReferencePrompt | None
    pending: int | None
    is_returning: bool = False


@dataclass(eq=False)
class Life:
    """A sequence from when it waits, or is forked, until it ends or loses its blocks."""

    name: Hashable
    request: ReferenceRequest
    n_tokens: int
    """Tokens that must be computed before it samples."""
    prompt: ReferencePrompt | None = None
    """Those of them whose ids were known and written when it began to wait."""
    brought: int | None = None
    """The id of the token after those, if it had been sampled and not yet written."""
    lost: int = 0
    """Leading tokens that an earlier life had computed."""
    entered: int = 0
    """The step in which it got its blocks."""
    computed: int = 0
    """Tokens whose computation is planned or done, or that were found cached."""
    leans_on: Life | None = None
    """Who computes the first ``shared`` tokens for it, in blocks that both have."""
    shared: int = 0
    in_prompt: bool = True
    pending: int | None = None
    """The id of its last token, sampled and not yet written; None if that or one before it
    is not known, so that nothing that follows can be published."""
    at_limit: bool = False
    """Its last token is on its way."""
    away: Away | None = None


@dataclass(eq=False)
class ReferenceRequest:
    """What was asked for, wherever it is."""

    prompt_tokens: int
    max_tokens: int | None
    waiting: list[Life]
    """While it waits: those that come back. One, unless a group has come apart."""
    siblings: list[Hashable] = field(default_factory=list)
    """Names of those that start when its prompt is computed."""
    members: list[Life] = field(default_factory=list)
    """Those that have blocks, here or in host memory."""
    admitted: int = -1
    """The step in which it entered last."""
    came_back: bool = False
    """Whether it was preempted and has not entered since, or entered as such."""
    let_a_step_pass: bool = False
    queued_in: int = -1
    """The step in which it lost its blocks."""

    @property
    def name(self) -> Hashable:
        return self.waiting[0].name

    @property
    def names(self) -> list[Hashable]:
        return [*(life.name for life in self.waiting), *self.siblings]

    @property
    def entry(self) -> tuple[Hashable, int]:
        """As it stands in the queue."""
        return self.waiting[0].name, self.waiting[0].n_tokens

    @property
    def final_length(self) -> int | None:
        """The last token that is generated is never written."""
        if self.max_tokens is None:
            return None
        return self.prompt_tokens + max(self.max_tokens - 1, 0)


class ReferenceEngineStep:
    """What one step decided."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fence: int | None = None
        self.decoded: list[Life] = []
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.lengths: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.chunks: list[tuple[Life, int, int]] = []
        self.completed: list[Life] = []
        self.forks: list[tuple[Life, Life]] = []
        self.preempted: list[Hashable] = []
        self.stalled: list[Life] = []
        self.rejected: dict[Hashable, VerdictParts] = {}
        self.may_end: list[Life] = []
        self.somebody_yielded = False
        self.going_out: list[ReferenceRequest] = []
        self.coming_in: list[ReferenceRequest] = []
        self.swapped_out: list[Hashable] = []
        self.swapped_in: list[Hashable] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.host_fence: int | None = None
        self.is_reported = False

    @property
    def sampled(self) -> list[Life]:
        """The decoded, then those whose prompt is completed, each before its siblings."""
        lives = list(self.decoded)
        for parent in self.completed:
            lives.append(parent)
            lives += [child for one, child in self.forks if one is parent]
        return lives

    @property
    def is_empty(self) -> bool:
        return not (self.decoded or self.chunks or self.swap_out or self.swap_in)


class ReferenceEngineScheduler:
    """Engine steps, by their rules."""

    def __init__(
        self,
        bm: ReferenceBlockManager,
        watermark_blocks: int = 1,
        *,
        token_budget: int,
        max_running: int | None = None,
        wait_for_prefix: bool = True,
        max_partial_prefills: int = 4,
        draft_tokens: int = 0,
        window: int | None = None,
        sink_tokens: int = 0,
        in_flight: int = 0,
        host: ReferenceBlockManager | None = None,
    ) -> None:
        self.bm = bm
        self.watermark = watermark_blocks
        self.token_budget = token_budget
        self.each = 1 + draft_tokens
        self.max_running = token_budget // self.each if max_running is None else max_running
        self.wait_for_prefix = wait_for_prefix
        self.max_partial_prefills = max_partial_prefills
        self.window = window
        self.sink_tokens = sink_tokens
        self.in_flight = in_flight
        self.host = host
        self.going_out: list[ReferenceRequest] = []
        self.away: list[ReferenceRequest] = []  # in host memory, in the order of their return
        self.queue: list[ReferenceRequest] = []
        self.lives: list[Life] = []  # those that run, in the order in which they came
        self.outstanding: list[ReferenceEngineStep] = []
        self.last: ReferenceEngineStep | None = None
        self.number = 0
        self.counters = dict.fromkeys(COUNTERS, 0)

    # Looking.

    @property
    def waiting(self) -> list[tuple[Hashable, int]]:
        return [request.entry for request in self.queue]

    @property
    def running(self) -> list[Hashable]:
        return [life.name for life in self.lives]

    @property
    def swapped(self) -> list[Hashable]:
        return [life.name for request in self.away for life in request.members]

    def _anywhere(self, name: Hashable) -> Life | None:
        """Also in host memory."""
        for request in [*self._requests(), *self.going_out, *self.away]:
            for life in request.members:
                if life.name == name:
                    return life
        return None

    @staticmethod
    def _is_here(life: Life) -> bool:
        """It has not ended, and did not lose what was computed."""
        return life in life.request.members

    def _life(self, name: Hashable) -> Life | None:
        for life in self.lives:
            if life.name == name:
                return life
        return None

    def _requests(self) -> list[ReferenceRequest]:
        """Those that run, in the order of their oldest sequence."""
        requests: list[ReferenceRequest] = []
        for life in self.lives:
            if life.request not in requests:
                requests.append(life.request)
        return requests

    def _rows(self, lives: Collection[Life]) -> list[int]:
        return self.bm.rows([life.name for life in lives])

    def _length(self, life: Life) -> int:
        return self.bm.lens[life.name]

    # Requests come.

    def add(
        self,
        name: Hashable,
        n_tokens: int | None = None,
        *,
        tokens: Sequence[int] | None = None,
        max_tokens: int | None = None,
        siblings: Sequence[Hashable] = (),
    ) -> VerdictParts | None:
        """Returns why it is refused, if it is."""
        if n_tokens is None:
            assert tokens is not None
            n_tokens = len(tokens)
        if any(one in self.bm.lens for one in (name, *siblings)):
            raise ValueError(f"one of {[name, *siblings]} is live")
        if len({name, *siblings}) != 1 + len(siblings):
            raise ValueError(f"twice the same: {[name, *siblings]}")
        request = self._new(name, n_tokens, tokens, max_tokens, siblings)
        never = self._never(request)
        if never is None:
            self.queue.append(request)
            self.counters["requests_added"] += 1
        return never

    def put(self, name: Hashable, n_tokens: int) -> None:
        """A pair that goes into the queue without being looked at."""
        self.queue.append(self._new(name, n_tokens, None, None, ()))

    def _new(
        self,
        name: Hashable,
        n_tokens: int,
        tokens: Sequence[int] | None,
        max_tokens: int | None,
        siblings: Sequence[Hashable],
    ) -> ReferenceRequest:
        request = ReferenceRequest(n_tokens, max_tokens, [], list(siblings))
        prompt = None
        if tokens is not None and self.bm.prefix_caching:
            prompt = self.bm.prompt(tokens)
        request.waiting = [Life(name, request, n_tokens, prompt)]
        return request

    # May it enter?

    def _shared_tokens(self, request: ReferenceRequest, other: Life) -> int:
        """What the first of a group that comes back computes for another one, too."""
        size = self.bm.block_size
        first = request.waiting[0]
        last = min(first.n_tokens, other.n_tokens) - 1
        return min(request.prompt_tokens, last) // size * size

    def _blocks_to_enter(self, request: ReferenceRequest) -> int:
        """Whoever comes back needs room for its next token; a sibling to come, one block."""
        size = self.bm.block_size
        first, *others = request.waiting
        blocks = blocks_for(first.n_tokens + request.came_back, size) + len(request.siblings)
        for other in others:
            shared = self._shared_tokens(request, other)
            blocks += blocks_for(other.n_tokens + 1, size) - shared // size
        return blocks

    def _never(self, request: ReferenceRequest) -> VerdictParts | None:
        everything = self.bm.num_blocks
        if not 1 <= request.waiting[0].n_tokens <= LARGEST_LENGTH:
            return Reason.BAD_LENGTH, 0, everything, 0, 0
        needed = self._blocks_to_enter(request)
        width = len(request.names)
        if request.came_back:
            if needed > everything:
                return Reason.OUTGREW_POOL, needed, everything, 0, 0
        elif needed + self.watermark > everything:
            can_have = everything - self.watermark
            return Reason.NEVER_FITS, needed, can_have, 0, self.watermark
        elif width > self.max_running:
            return Reason.MAX_RUNNING, width, self.max_running, 0, 0
        return None

    def _hits(self, request: ReferenceRequest) -> list[Any]:
        first = request.waiting[0]
        return [] if first.prompt is None else self.bm._hits(first.prompt, first.n_tokens)

    def _not_now(self, request: ReferenceRequest, tokens_left: int | None = None) -> VerdictParts:
        """``tokens_left``: of the step, when all prompts under way have got theirs."""
        hits = self._hits(request)
        needed = self._blocks_to_enter(request) - len(hits)
        # An idle hit stops being available and needs no other block.
        idle = sum(1 for node in hits if self.bm.ref[node.copies[0]] == 0)
        available = self.bm.num_available - idle
        comes_back_alone = request.came_back and not self.lives
        reserve = 0 if comes_back_alone else self.watermark
        unborn = sum(len(life.request.siblings) for life in self.lives if life.in_prompt)
        under_way = sum(life.in_prompt for life in self.lives)
        if any(name in self.bm.lens or name in self.swapped for name in request.names):
            reason = Reason.LIVE_ID
        elif len(self.lives) + unborn + self._num_leaving() + len(request.names) > self.max_running:
            reason = Reason.MAX_RUNNING
        elif self.going_out or self.away:
            reason = Reason.SWAPPED_BEFORE
        elif (
            tokens_left is not None and tokens_left <= 0 and under_way >= self.max_partial_prefills
        ):
            reason = Reason.PARTIAL_PREFILLS
        elif needed > available:
            reason = Reason.BLOCKS
        elif needed + reserve > available:
            reason = Reason.WATERMARK
        else:
            reason = Reason.FITS
        return reason, needed, available, 0, reserve

    def _num_leaving(self) -> int:
        return sum(len(request.members) for request in self.going_out)

    def why(self, name: Hashable) -> VerdictParts:
        for place, request in enumerate(self.away):
            if name in [life.name for life in request.members]:
                needed = self._blocks_to_return(request)
                return Reason.SWAPPED, needed, self.bm.num_available, place, 0
        moving = [life for request in self.going_out for life in request.members]
        moving += [life for life in self.lives if life.away is not None]
        if name in [life.name for life in moving]:
            return Reason.SWAPPING, 0, self.bm.num_available, 0, 0
        for place, request in enumerate(self.queue):
            if name in request.names:
                decodes = [
                    life
                    for life in self.lives
                    if not life.in_prompt and not life.at_limit and life.away is None
                ]
                left = self.token_budget - self.each * len(decodes) - self._under_way()
                reason, needed, available, _, reserve = self._never(request) or self._not_now(
                    request, left
                )
                if place:
                    reason = Reason.BEHIND
                elif reason is Reason.FITS and request.let_a_step_pass:
                    reason = Reason.PREFIX
                return reason, needed, available, place, reserve
        life = self._life(name)
        if life is not None and self.last is not None and life in self.last.stalled:
            needed, _, _ = self.bm.plan_append(self._rows([life]))
            return Reason.STALLED, needed, self.bm.num_available, 0, 0
        raise KeyError(name)

    # A step: decodes, then who enters, then prompts.

    def step(self) -> ReferenceEngineStep:
        if len(self.outstanding) > self.in_flight:
            raise ValueError("results are missing")
        self.number += 1
        step = self.last = ReferenceEngineStep(self.number)
        if self.in_flight:
            step.fence = self.bm.fence()
            if self.host is not None:
                step.host_fence = self.host.fence()
        self._decode(step)
        budget = self.token_budget - len(step.slots)
        self._bring_in(step)
        self._admit(step, budget)
        self._prefill(step, budget)
        for life in step.decoded:
            self._note_limit(step, life)
        self.outstanding.append(step)
        self._pass_over_empty_steps()
        return step

    def _pass_over_empty_steps(self) -> None:
        while self.outstanding and self.outstanding[0].is_empty:
            self._settle(self.outstanding.pop(0))

    def _settle(self, step: ReferenceEngineStep) -> None:
        step.is_reported = True
        if step.fence is not None:
            self.bm.settle(step.fence)
        if self.host is not None and step.host_fence is not None:
            self.host.settle(step.host_fence)

    def _note_limit(self, step: ReferenceEngineStep, life: Life) -> None:
        if self._is_long_enough(life):
            step.may_end.append(life)
            life.at_limit = self.in_flight > 0

    def _is_long_enough(self, life: Life) -> bool:
        final = life.request.final_length
        return final is not None and self._length(life) >= final

    # Decodes.

    def _count(self, life: Life) -> int:
        """Its next token and drafts, as far as it may still grow."""
        final = life.request.final_length
        left = self.each if final is None else final - self._length(life)
        return max(1, min(left, self.each))

    def _decode(self, step: ReferenceEngineStep) -> None:
        lives = [
            life
            for life in self.lives
            if not life.in_prompt and not life.at_limit and life.away is None
        ]
        counts = [self._count(life) for life in lives]
        needed, available, _ = self.bm.plan_append(self._rows(lives), counts)
        if needed > available:
            lives = self._make_room(step, lives)
            counts = [1] * len(lives)
        for life, count in zip(lives, counts, strict=True):
            try:
                slots, copy = self.bm.append_slots(life.name, count)
            except OutOfBlocks:
                step.stalled.append(life)
                continue
            step.decoded.append(life)
            step.slots += slots
            step.counts.append(count)
            step.lengths.append(self._length(life))
            if copy is not None:
                step.copies.append(copy)

    def _make_room(self, step: ReferenceEngineStep, lives: list[Life]) -> list[Life]:
        """Returns who is left to decode, each one token."""
        while True:
            lives = [life for life in lives if life in self.lives]
            needed, available, _ = self.bm.plan_append(self._rows(lives))
            if needed <= available:
                return lives
            for life in lives:
                if self._outgrew_alone(life):
                    blocks = self._length(life) // self.bm.block_size + 1
                    self._end_outgrown(step, life, blocks)
            lives = [life for life in lives if life in self.lives]
            # Who is about to end anyway does not yield, and keeps nobody else from it.
            staying = [
                request
                for request in self._requests()
                if not all(life.at_limit for life in request.members)
            ]
            victims: list[ReferenceRequest] = []
            for request in self._victims(staying):
                if self._suffices(lives, victims) or len(staying) - len(victims) == 1:
                    break
                if request.members[0].away is None:
                    victims.append(request)
            if self._suffices(lives, victims):
                break
            if self._group_outgrew(step, [one for one in staying if one not in victims]):
                continue
            if not self.away:
                victims = []  # it would not help
                break
            # Those in host memory may keep here what is lacking.
            self._give_up_newest(step)
        step.somebody_yielded = bool(victims)
        for request in victims:
            if not self._send_out(step, request):
                self._preempt(step, request)
        return [life for life in lives if life in self.lives]

    def _victims(self, requests: list[ReferenceRequest]) -> list[ReferenceRequest]:
        """The newest first; but last who could not be computed again as a whole."""
        slots = self.bm.num_blocks * self.bm.block_size
        newest_first = requests[::-1]
        if self.window is None or self.host is not None:
            return newest_first
        too_long = [
            one for one in newest_first if any(self._length(life) >= slots for life in one.members)
        ]
        return [one for one in newest_first if one not in too_long] + too_long

    def _suffices(self, lives: list[Life], victims: list[ReferenceRequest]) -> bool:
        """Whether the others get their tokens, now or when steps in flight have settled."""
        leaving = [life for life in self.lives if life.request in victims or life.at_limit]
        leaving += [life for request in self.going_out for life in request.members]
        others = [life for life in lives if life not in leaving]
        needed, available, coming = self.bm.plan_append(
            self._rows(others), without=self._rows(leaving)
        )
        return needed <= available + coming

    def _stays(self, lives: list[Life]) -> set[int]:
        """Blocks that they still hold when all steps in flight are reported."""
        blocks = set()
        for life in lives:
            for column, block in enumerate(self.bm.tables[life.name]):
                if not self._is_outside_window(column, self._length(life)):
                    blocks.add(block)
        return blocks - {HOLE}

    def _is_outside_window(self, column: int, length: int) -> bool:
        """Whether a sequence of that length does not see the column any more."""
        size = self.bm.block_size
        if self.window is None or column < blocks_for(self.sink_tokens, size):
            return False
        return (column + 1) * size <= length - (self.window - 1)

    def _outgrew_alone(self, life: Life) -> bool:
        """Its next token needs one more block than there are."""
        is_full = self._length(life) % self.bm.block_size == 0
        return is_full and len(self._stays([life])) == self.bm.num_blocks

    def _group_outgrew(self, step: ReferenceEngineStep, staying: list[ReferenceRequest]) -> bool:
        """End the newest of a group that alone needs more than the whole pool."""
        if not staying:
            return False
        members = [
            life
            for life in staying[0].members
            if not life.in_prompt and not life.at_limit and life.away is None
        ]
        if len(members) < 2:
            return False
        needed, _, _ = self.bm.plan_append(self._rows(members))
        blocks = len(self._stays(staying[0].members)) + needed
        if blocks <= self.bm.num_blocks:
            return False
        self._end_outgrown(step, members[-1], blocks)
        return True

    def _end_outgrown(self, step: ReferenceEngineStep, life: Life, blocks: int) -> None:
        step.rejected[life.name] = (Reason.OUTGREW_POOL, blocks, self.bm.num_blocks, 0, 0)
        self.counters["rejected"] += 1
        self._leave(life)

    def _preempt(self, step: ReferenceEngineStep, request: ReferenceRequest) -> None:
        """Back to the front of the queue, with all that is known of it."""
        lives = list(request.members)
        request.waiting = [self._next_life(life) for life in lives]
        for life in lives:
            self._leave(life)
        request.came_back = True
        request.let_a_step_pass = False
        request.queued_in = step.number
        never = self._never(request)
        if never is not None:
            self.counters["rejected"] += 1
            step.rejected.update({life.name: never for life in lives})
            return
        step.preempted += [life.name for life in lives]
        self.counters["preemptions_recompute"] += len(lives)
        self.queue.insert(0, request)

    def _next_life(self, life: Life) -> Life:
        """As it comes back: its prompt, and what has been reported of what it generated."""
        prompt: Any = None
        if self.bm.prefix_caching and HOLE not in self.bm.tables[life.name]:
            prompt = self.bm.prompt_of(life.name)
        length = self._length(life)
        if life.in_prompt:
            if life.prompt is not None and (prompt is None or len(prompt) < len(life.prompt)):
                prompt = life.prompt
            lost = max(life.lost, life.computed)
            return Life(life.name, life.request, length, prompt, life.brought, lost)
        unreported = sum(life in step.sampled for step in self.outstanding)
        known = length + 1 - unreported
        return Life(life.name, life.request, known, prompt, life.pending, min(length, known))

    def _leave(self, life: Life) -> None:
        """The one way out."""
        if life.away is not None:
            self._forget_copies(life)
        if life.name in self.bm.lens:
            self.bm.free_seq(life.name)
        if life in self.lives:
            self.lives.remove(life)
        life.request.members.remove(life)
        if not life.request.members:
            for requests in (self.going_out, self.away):
                if life.request in requests:
                    requests.remove(life.request)
        heir: Life | None = None
        for other in life.request.members:
            if other.leans_on is not life:
                continue
            other.leans_on = heir
            if life.in_prompt and life.computed < other.computed <= other.shared:
                if heir is None:  # computes now what the others were to share with both
                    heir, shared = other, other.computed
                    other.computed = life.computed
                other.computed = min(other.computed, shared)

    # Host memory.

    def _send_out(self, step: ReferenceEngineStep, request: ReferenceRequest) -> bool:
        """Copy what its sequences have for themselves to host memory, if that holds it."""
        if self.host is None or any(life.in_prompt for life in request.members):
            return False
        moved = sum(len(self.bm.exclusive_blocks(life.name)) for life in request.members)
        if not 0 < moved <= self.host.num_available:
            return False
        for life in request.members:
            table, columns = self.bm.tables[life.name], self.bm.exclusive_blocks(life.name)
            kept = [column for column in range(len(table)) if column not in columns]
            self.host.allocate(life.name, len(columns) * self.host.block_size)
            prompt = None
            if self.bm.prefix_caching and HOLE not in table:
                prompt = self.bm.prompt_of(life.name)
            life.away = Away(self._length(life), kept, [], prompt, None)
            blocks = [table[column] for column in columns]
            step.swap_out += zip(blocks, self.host.tables[life.name], strict=True)
            step.swapped_out.append(life.name)
            self.lives.remove(life)
        step.going_out.append(request)
        self.going_out.append(request)
        self.counters["preemptions_swap"] += len(request.members)
        self.counters["swap_out_blocks"] += moved
        return True

    def _blocks_to_return(self, request: ReferenceRequest) -> int:
        """With room for the next token of each."""
        return sum(
            blocks_for(life.away.n_tokens + 1, self.bm.block_size) - len(life.away.kept_columns)
            for life in request.members
        )

    def _bring_in(self, step: ReferenceEngineStep) -> None:
        """Who left first returns first; alone, it may use what admission keeps back."""
        if step.swapped_out or step.preempted:
            return
        while self.away:
            request = self.away[0]
            reserve = self.watermark if self.lives else 0
            width = len(self.lives) + self._num_leaving() + len(request.members)
            width += sum(len(life.request.siblings) for life in self.lives if life.in_prompt)
            if width > self.max_running:
                return
            needed = self._blocks_to_return(request)
            if needed + reserve > self.bm.num_available:
                if self.lives or self.going_out or self.outstanding:
                    return
                kept = {block for life in request.members for block in life.away.kept_blocks}
                outgrew = needed + len(kept - {HOLE}) > self.bm.num_blocks
                if len(self.away) == 1 and not outgrew:
                    return  # somebody outside has what it lacks
                # What others there keep here may be what it lacks.
                self._give_up_newest(step)
                continue
            self.away.pop(0)
            for life in request.members:
                self._return(step, life)
            step.coming_in.append(request)

    def _return(self, step: ReferenceEngineStep, life: Life) -> None:
        away = life.away
        fresh = self.bm.restore(
            life.name, away.n_tokens, away.kept_columns, away.kept_blocks, tokens=away.prompt
        )
        self._unpin(away)
        away.is_returning = True
        # Only after tokens that are all known another one can be published.
        is_known = self.bm.known(life.name) == away.n_tokens
        life.pending = away.pending if is_known else None
        self._insert(life)
        step.swapped_in.append(life.name)
        step.swap_in += zip(self.host.tables[life.name], fresh, strict=True)
        self.counters["swap_in_blocks"] += len(fresh)

    def _insert(self, life: Life) -> None:
        """Among those that run, in the order of admission."""
        later = [one for one in self.lives if one.request.admitted > life.request.admitted]
        place = len(self.lives)
        while place and self.lives[place - 1] in later:
            place -= 1
        self.lives.insert(place, life)

    def _unpin(self, away: Away) -> None:
        for block in away.kept_blocks:
            if block != HOLE:
                self.bm.unpin(block)

    def _pin(self, away: Away) -> None:
        for block in away.kept_blocks:
            if block != HOLE:
                self.bm.pin(block)

    def _forget_copies(self, life: Life) -> None:
        if life.name not in self.bm.lens:
            self._unpin(life.away)
        self.host.free_seq(life.name)
        life.away = None

    def _give_up_newest(self, step: ReferenceEngineStep) -> None:
        """It is computed again, and what it keeps here is given back."""
        request = self.away.pop()
        request.waiting = []
        for life in list(request.members):
            away = life.away
            count = away.n_tokens + 1
            request.waiting.append(
                Life(life.name, request, count, away.prompt, away.pending, away.n_tokens)
            )
            self._leave(life)
            step.preempted.append(life.name)
            self.counters["preemptions_recompute"] += 1
        request.came_back = True
        request.let_a_step_pass = False
        request.queued_in = step.number
        self.queue.insert(0, request)

    def _report_swaps(self, step: ReferenceEngineStep, failed: Collection[Hashable]) -> None:
        """Copies are done; or they failed, and everything is as before the swap."""
        for request in step.going_out:
            if request not in self.going_out:
                continue
            self.going_out.remove(request)
            if any(life.name in failed for life in request.members):
                for life in request.members:
                    self.host.free_seq(life.name)
                    life.away = None
                    self._insert(life)
                continue
            for life in request.members:
                table = self.bm.tables[life.name]
                life.away.kept_blocks = [table[column] for column in life.away.kept_columns]
                if life.away.prompt is not None:
                    known = None if HOLE in table else self.bm.prompt_of(life.name)
                    life.away.prompt = known
                life.away.pending = life.pending
                self._pin(life.away)
                self.bm.free_seq(life.name)
            self.away.append(request)
        for request in step.coming_in:
            lives = [life for life in request.members if life.away is not None]
            if any(life.name in failed for life in lives):
                for life in lives:
                    self._pin(life.away)
                    self.bm.free_seq(life.name)
                    self.lives.remove(life)
                    life.away.is_returning = False
                self.away.insert(0, request)
                continue
            for life in lives:
                self.host.free_seq(life.name)
                if life.away.prompt is not None:
                    self.bm.commit(life.name)  # found again
                life.away = None

    # Admission.

    def _under_way(self) -> int:
        """Tokens that are still to be computed of prompts."""
        return sum(self._length(life) - life.computed for life in self.lives if life.in_prompt)

    def _admit(self, step: ReferenceEngineStep, budget: int) -> None:
        if step.somebody_yielded or self.going_out or self.away:
            return
        left = budget - self._under_way()
        entered: list[ReferencePrompt] = []
        while self.queue:
            head = self.queue[0]
            if head.queued_in == step.number and (self.lives or step.preempted):
                return
            never = self._never(head)
            if never is not None:
                self._reject(step, head, never)
                continue
            verdict = self._not_now(head, left)
            reason = verdict[0]
            if reason is Reason.LIVE_ID and any(
                name in self.bm.lens and self._anywhere(name) is None for name in head.names
            ):
                # Nothing says when somebody outside the scheduler ends.
                self._reject(step, head, verdict)
                continue
            if reason in BLOCKED:
                self.counters[BLOCKED[reason]] += 1
            if reason is not Reason.FITS:
                return
            if self._waits_for_prefix(head, entered):
                head.let_a_step_pass = True
                return
            self.queue.pop(0)
            first = head.waiting[0]
            self._enter(head)
            left -= first.n_tokens - first.computed
            if first.prompt is not None:
                entered.append(first.prompt)

    def _reject(
        self, step: ReferenceEngineStep, request: ReferenceRequest, verdict: VerdictParts
    ) -> None:
        self.queue.remove(request)
        self.counters["rejected"] += 1
        step.rejected.update({life.name: verdict for life in request.waiting})

    def _waits_for_prefix(self, request: ReferenceRequest, entered: list[ReferencePrompt]) -> bool:
        """Whether somebody who enters in this step computes a block that it could share."""
        first = request.waiting[0]
        if first.prompt is None or not self.wait_for_prefix or request.let_a_step_pass:
            return False
        usable = (first.n_tokens - 1) // self.bm.block_size
        hits = len(self._hits(request))
        return any(min(first.prompt.common_blocks(other), usable) > hits for other in entered)

    def _enter(self, request: ReferenceRequest) -> None:
        first, *others = request.waiting
        first.computed = self.bm.allocate(
            first.name, first.n_tokens, tokens=first.prompt, resumed=request.came_back
        )
        for other in others:
            other.leans_on = first
            other.shared = other.computed = self._shared_tokens(request, other)
            self.bm.fork(first.name, other.name, other.computed)
            self.bm.append_slots(other.name, other.n_tokens - other.computed)
        for life in request.waiting:
            life.entered = self.number
        request.admitted = self.number
        self.lives += request.waiting
        request.members = request.waiting
        request.waiting = []

    # Prompts.

    def _prefill(self, step: ReferenceEngineStep, budget: int) -> None:
        size = self.bm.block_size
        ready = [life for life in self.lives if life.in_prompt and self._can_compute(life)]
        left = [self._length(life) - life.computed for life in ready]
        shares = self._shares(budget, left)
        completing = [
            one for one, need, got in zip(ready, left, shares, strict=True) if got == need
        ]
        for life, share in zip(ready, shares, strict=True):
            unready = [
                one for one in life.request.members if one.in_prompt and one not in completing
            ]
            if life in completing and unready:
                share -= 1  # a group goes on together
            start, length = life.computed, self._length(life)
            stop = start + share
            if stop < length and stop - stop % size > start:
                stop -= stop % size  # it ends with a block that can be published
            if stop > start:
                step.chunks.append((life, start, stop - start))
                self.counters["prefill_tokens"] += stop - start
                self.counters["recomputed_tokens"] += max(0, min(stop, life.lost) - start)
                life.computed = stop
                if stop == length:
                    self._complete(step, life)

    def _can_compute(self, life: Life) -> bool:
        """Of a group that comes back, the first computes what the others share."""
        one = life.leans_on
        return one is None or not one.in_prompt or one.computed >= life.computed

    @staticmethod
    def _shares(budget: int, remaining: list[int]) -> list[int]:
        """The oldest gets an equal share; one after the other the shortest get what is left."""
        shares = [0] * len(remaining)
        if not remaining:
            return shares
        equal = blocks_for(budget, len(remaining))
        shares[0] = min(equal, remaining[0])
        for place in sorted(range(len(remaining)), key=lambda one: (remaining[one], one)):
            shares[place] += min(budget - sum(shares), remaining[place] - shares[place])
        return shares

    def _complete(self, step: ReferenceEngineStep, life: Life) -> None:
        """It samples its first token in this step, and so do its siblings."""
        life.in_prompt = False
        request = life.request
        started = [life]
        for name in request.siblings:
            if name in self.bm.lens or name in self.swapped:
                step.rejected[name] = (Reason.LIVE_ID, 0, 0, 0, 0)
                continue
            self.bm.fork(life.name, name)
            child = Life(name, request, life.n_tokens, entered=self.number, in_prompt=False)
            self.lives.append(child)
            request.members.append(child)
            step.forks.append((life, child))
            started.append(child)
        request.siblings = []
        if request.max_tokens != 0:
            step.completed.append(life)
        for one in started:
            self._note_limit(step, one)

    # Results.

    def update(
        self,
        step: ReferenceEngineStep,
        tokens: Sequence[int] | None = None,
        *,
        finished: Collection[Hashable] = (),
        rejected: Sequence[int] | None = None,
        parents: Mapping[Hashable, Hashable] | None = None,
        swap_failed: Collection[Hashable] = (),
    ) -> list[Hashable]:
        """Of results only those count that are about a life that still goes on."""
        if step.is_reported:
            return []
        assert self.outstanding[0] is step
        self.outstanding.pop(0)
        self._settle(step)
        self._report_swaps(step, swap_failed)
        for life, start, count in step.chunks:
            if self._is_here(life):
                self._publish_prompt(life, start + count)
        rejected = rejected or [0] * len(step.decoded)
        told = None if tokens is None else list(tokens)
        for place, life in enumerate(step.decoded):
            kept = step.counts[place] - rejected[place]
            new = None if told is None else [told.pop(0) for _ in range(kept)]
            if not self._is_here(life):
                self.counters["ignored_results"] += 1
                continue
            self.counters["sampled_tokens"] += kept
            self.counters["draft_tokens"] += step.counts[place] - 1
            self.counters["rejected_draft_tokens"] += rejected[place]
            if rejected[place]:
                self.bm.truncate(life.name, step.lengths[place] - rejected[place])
            self._publish_decoded(life, new)
        for life in step.sampled[len(step.decoded) :]:
            new = None if told is None else [told.pop(0)]
            if not self._is_here(life):
                self.counters["ignored_results"] += 1
                continue
            self.counters["sampled_tokens"] += 1
            # What steps in flight have planned since is not written yet.
            written = self._length(life) - sum(life in one.decoded for one in self.outstanding)
            if self.bm.prefix_caching and new and self.bm.known(life.name) == written:
                life.pending = new[0]
        moved = self._move_beams(parents or {})
        self._slide(step)
        ended = [life for life in step.may_end if self._is_here(life)]
        ended += [life for life in moved if life not in ended]
        if not self.in_flight:  # drafts may have been rejected, beams may be longer or shorter
            ended = [life for life in ended if self._is_long_enough(life)]
        for name in finished:
            life = self._anywhere(name)
            if life is not None and life not in ended and life.entered <= step.number:
                ended.append(life)
        ended.sort(key=[*step.sampled, *ended].index)
        for life in ended:
            self._leave(life)
        self.counters["finished"] += len(ended)
        self._pass_over_empty_steps()
        return [life.name for life in ended]

    def _publish_prompt(self, life: Life, stop: int) -> None:
        """Tokens up to ``stop`` are written."""
        if not self.bm.prefix_caching:
            return
        known = self.bm.known(life.name)
        text = [] if life.prompt is None else life.prompt.tokens
        if known < len(text):
            # A beam that comes back: its own tokens follow those of the prompt.
            self.bm.commit(life.name, text[known:], n_settled=min(stop, len(text)))
        elif known:
            self.bm.commit(life.name, n_settled=min(stop, known))
        follows = self.bm.known(life.name) == stop - 1
        if life.brought is not None and follows and not life.in_prompt:
            self.bm.commit(life.name, [life.brought])

    def _publish_decoded(self, life: Life, new: list[int] | None) -> None:
        """Its pending token is written now, and all that it has sampled but the last."""
        if not self.bm.prefix_caching or life.pending is None:
            return
        tokens = [life.pending, *(new or [])]
        if new is None:
            self.bm.commit(life.name, tokens)
            life.pending = None
        else:
            self.bm.commit(life.name, tokens[:-1])
            life.pending = tokens[-1]

    def _move_beams(self, parents: Mapping[Hashable, Hashable]) -> list[Life]:
        """What was sampled follows the tokens of the one that a beam goes on from."""
        beams = [self._life(name) for name in parents]
        unknown = [self._life(parent).pending is None for parent in parents.values()]
        self.bm.reorder(list(parents), list(parents.values()))
        for beam, is_unknown in zip(beams, unknown, strict=True):
            if is_unknown:
                beam.pending = None
        return beams

    def _slide(self, step: ReferenceEngineStep) -> None:
        """Blocks that no later token sees are given back."""
        if self.window is None:
            return
        settled = [
            (life, min(length, self._length(life)))
            for life, length in zip(step.decoded, step.lengths, strict=True)
            if self._is_here(life) and life.name in self.bm.lens
        ]
        ends = {life: at + count for life, at, count in step.chunks}
        ends |= {child: ends[parent] for parent, child in step.forks}
        settled += [
            (life, length)
            for life, length in ends.items()
            if self._is_here(life) and life.name in self.bm.lens
        ]
        self.bm.release_outside_window(
            self._rows([life for life, _ in settled]),
            [length for _, length in settled],
            self.window,
            self.sink_tokens,
        )

    # Ends.

    def finish(self, name: Hashable) -> bool:
        ended = self._end(name)
        self.counters["finished"] += ended
        return ended

    def abort(self, name: Hashable) -> bool:
        ended = self._end(name)
        self.counters["aborted"] += ended
        return ended

    def _end(self, name: Hashable) -> bool:
        life = self._anywhere(name)
        if life is not None:
            self._leave(life)
            return True
        for request in self.queue:
            if name not in request.names:
                continue
            others = [other for other in request.waiting if other.name != name]
            request.siblings = [sibling for sibling in request.siblings if sibling != name]
            if not others:
                self.queue.remove(request)  # siblings that have no life yet go with it
            else:
                request.waiting = others
            return True
        for one in self.lives:
            if one.in_prompt and name in one.request.siblings:
                one.request.siblings.remove(name)
                return True
        return False
