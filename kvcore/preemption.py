"""Who yields when blocks run short, decided before anything is appended."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.request import UNKNOWN_TOKEN, Member, Reason, Request, Resumed, Verdict
from kvcore.running_view import RunningView
from kvcore.step import NO_ROWS, Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.admission import Admission
    from kvcore.block_manager import BlockManager
    from kvcore.gate import Gate
    from kvcore.order import Order
    from kvcore.roster import Roster
    from kvcore.scheduler_options import SchedulerOptions
    from kvcore.step import SchedulerCounters
    from kvcore.swapping import Swapping
    from kvcore.victim import Victim
    from kvcore.waiting import WaitingQueue

__all__ = ["Preemption"]

HOLE = -1
"""In a table, where a window has given a block back."""


class Preemption:
    """Takes blocks back from running requests, for others that need them."""

    def __init__(
        self,
        bm: BlockManager,
        roster: Roster,
        waiting: WaitingQueue,
        options: SchedulerOptions,
        gate: Gate,
        swapping: Swapping,
        order: Order,
        victim: Victim,
        admission: Admission,
        counters: SchedulerCounters,
    ) -> None:
        self.bm = bm
        self.roster = roster
        self.waiting = waiting
        self.options = options
        self.gate = gate
        self.swapping = swapping
        self.order = order
        self.victim = victim
        self.admission = admission
        self.counters = counters

    def make_room(
        self,
        step: Step,
        seqs: list[Hashable],
        rows: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
    ) -> tuple[list[Hashable], NDArray[np.int32], NDArray[np.int32] | None]:
        """Decide, before anything is appended, who yields. Returns who is left to decode."""
        plan = self.bm.plan_append(rows, counts)
        if plan.needed <= plan.available:
            return seqs, rows, counts
        seqs = seqs.copy()  # it may be the list of running sequences, which changes below
        for seq in [seq for seq in seqs if self._outgrew(seq)]:
            blocks = self.bm.length(seq) // self.bm.block_size + 1
            step.rejected[seq] = Verdict(Reason.OUTGREW_POOL, blocks, self.bm.num_blocks)
            self.counters.rejected += 1
            self._unschedule(step, [seq])
            self.roster.leave(seq)
        if counts is not None:
            counts = np.ones_like(counts)
        gone: set[Hashable] = set(step.rejected)
        rows, counts = self._without(seqs, rows, counts, gone)
        seqs = [seq for seq in seqs if seq not in gone]

        victims: list[Request] = []
        units = len(
            {
                id(self.roster.by_seq[seq])
                for seq in self.roster.running
                if seq not in self.roster.draining
            }
        )
        needed, available, coming = self.bm.plan_append(rows, counts, self._leaving_rows(victims))
        if needed > available + coming:
            for request in self._in_order():
                if units - len(victims) <= 1:
                    break
                if not self._may_yield(request) or request in victims:
                    continue
                victims.append(request)
                out = {seq for victim in victims for seq in victim.members}
                left, left_counts = self._without(seqs, rows, counts, out)
                needed, available, coming = self.bm.plan_append(
                    left, left_counts, self._leaving_rows(victims)
                )
                if needed <= available + coming:
                    break
            if needed > available + coming and self._end_what_outgrew(step, victims):
                gone = set(step.rejected)
                rows, counts = self._without(seqs, rows, counts, gone)
                return self.make_room(step, [seq for seq in seqs if seq not in gone], rows, counts)
            if needed > available + coming and self.roster.swapped:
                # Those in host memory may keep on the device what is lacking.
                self.swapping.give_up_newest(step)
                return self.make_room(step, seqs, rows, counts)
            if needed > available + coming:
                victims = []  # it would not help
        step.is_short = bool(victims)
        self._preempt_all(step, victims, 0, may_swap=True)
        out = {seq for victim in victims for seq in victim.members} | set(step.preempted)
        out |= set(step.swapped_out) | set(step.rejected)
        rows, counts = self._without(seqs, rows, counts, out)
        return [seq for seq in seqs if seq not in out], rows, counts

    def _in_order(self) -> list[Request]:
        """Victims in the order of the policy; but last whoever could not come back.

        A sequence that a window has let grow longer than the pool is never computed again
        as a whole.
        """
        order = self.victim.order(RunningView(self.roster))
        victims = list(islice(order, len(self.roster.running)))
        if self.options.window is not None and self.swapping.host is None:
            victims.sort(key=self._is_too_long)
        return victims

    def _is_too_long(self, request: Request) -> bool:
        """Whether a sequence of a request, its next token included, is larger than the pool."""
        slots = self.bm.num_blocks * self.bm.block_size
        return any(self.bm.length(seq) >= slots for seq in request.members)

    def push_out(self, step: Step) -> None:
        """Let the next request take the place of running ones, if a policy says so.

        This comes before anything is appended, so that nobody who yields has a part in
        the step. Room for the tokens of those who stay is part of what must suffice.
        """
        place = self.order.first(self.waiting, step.number)
        request = self.waiting[place]
        candidates = list(
            islice(
                self.victim.for_admission(request, RunningView(self.roster)),
                len(self.roster.running),
            )
        )
        if not candidates or self.roster.swapped or self.gate.never(request) is not None:
            return
        verdict = self.gate.not_now(request)
        if verdict.reason not in (
            Reason.BLOCKS,
            Reason.WATERMARK,
            Reason.RESERVE,
            Reason.MAX_RUNNING,
        ):
            return
        victims: list[Request] = []
        for victim in [None, *candidates]:
            if victim is not None:
                if not self._may_yield(victim) or victim in victims:
                    continue
                victims.append(victim)
            out = {seq for one in victims for seq in one.members}
            stay = [seq for seq in self.roster.running if seq not in out]
            rows = self.bm.rows([seq for seq in stay if seq not in self.roster.idle])
            needed, available, coming = self.bm.plan_append(rows, None, self._leaving_rows(victims))
            reserve = self.admission.reserve(request, RunningView(self.roster, stay))
            has_place = (
                self.options.max_running is None
                or self.roster.width()
                - sum(one.width + len(one.members) - 1 for one in victims)
                + request.width
                <= self.options.max_running
            )
            idle_hits = self.bm.num_available - verdict.available
            if has_place and (verdict.needed + needed + reserve <= available + coming - idle_hits):
                # They wait behind it, and not in host memory: from there they would return
                # before it and be pushed out again.
                self._preempt_all(step, victims, place + 1, may_swap=False)
                step.makes_way_for = request if victims else None
                return

    def _without(
        self,
        seqs: list[Hashable],
        rows: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
        out: Collection[Hashable],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
        if not out:
            return rows, counts
        left = np.array([place for place, seq in enumerate(seqs) if seq not in out], np.intp)
        return rows[left], None if counts is None else counts[left]

    def _outgrew(self, seq: Hashable) -> bool:
        """Whether the whole pool cannot hold the next token of a sequence."""
        length = self.bm.length(seq)
        if length % self.bm.block_size or length < self.bm.num_blocks * self.bm.block_size:
            return False
        return len(self._lasting_blocks(seq)) >= self.bm.num_blocks

    def _lasting_blocks(self, seq: Hashable) -> set[int]:
        """Blocks that a sequence holds and that no step in flight is going to give back."""
        table = self.bm.tables[seq].tolist()
        if self.options.window is not None:
            size = self.bm.block_size
            first_seen = self.bm.length(seq) - self.options.window + 1
            sinks = -(-self.options.sink_tokens // size)
            del table[sinks : max(first_seen // size, sinks)]
        return set(table) - {HOLE}

    def _end_what_outgrew(self, step: Step, victims: list[Request]) -> bool:
        """End the newest of a group that the whole pool cannot hold with its next tokens."""
        stays = [
            self.roster.by_seq[seq]
            for seq in self.roster.running
            if self.roster.by_seq[seq] not in victims and seq not in self.roster.draining
        ]
        members = [seq for seq in stays[0].members if seq not in self.roster.idle] if stays else []
        if len(members) < 2:
            return False
        needed = self.bm.plan_append(self.bm.rows(members)).needed
        held = set().union(*(self._lasting_blocks(seq) for seq in stays[0].members))
        blocks = len(held) + needed
        if blocks <= self.bm.num_blocks:
            return False
        step.rejected[members[-1]] = Verdict(Reason.OUTGREW_POOL, blocks, self.bm.num_blocks)
        self.counters.rejected += 1
        self.roster.leave(members[-1])
        return True

    def _may_yield(self, request: Request) -> bool:
        """Whether a request that a policy names runs, and is not about to end anyway."""
        members = getattr(request, "members", ())
        if not members or any(self.roster.by_seq.get(seq) is not request for seq in members):
            return False
        host = self.swapping.host
        if host is not None and any(seq in host for seq in members):
            return False
        return not all(seq in self.roster.draining for seq in members)

    def _leaving_rows(self, victims: list[Request]) -> NDArray[np.int32]:
        """Rows of these, and of those whose blocks are given back without anybody yielding."""
        leaving = dict.fromkeys(self.roster.draining)
        for request in [*self.roster.going_out, *victims]:
            leaving.update(dict.fromkeys(request.members))
        return self.bm.rows(list(leaving)) if leaving else NO_ROWS

    def _preempt_all(self, step: Step, victims: list[Request], place: int, may_swap: bool) -> None:
        """Preempt several, so that they wait in the order in which they had been admitted."""
        positions = {seq: place for place, seq in enumerate(self.roster.running)} if victims else {}
        for request in sorted(
            victims, key=lambda one: min(positions[seq] for seq in one.members), reverse=True
        ):
            request.preemptions += 1
            if not (may_swap and self.swapping.send_out(step, request)):
                self._preempt(step, request, place)

    def _preempt(self, step: Step, request: Request, place: int) -> None:
        """Take the blocks of a request back, to be computed again."""
        members = list(request.members)
        resumed = self._resumed(request)
        self._unschedule(step, members)
        for seq in members:
            self.roster.leave(seq)
        verdict = self.gate.never(resumed)
        if verdict is not None:
            step.rejected.update(dict.fromkeys(members, verdict))
            self.counters.rejected += 1
        else:
            step.preempted.extend(members)
            self.waiting.insert(place, resumed)
            self.counters.preemptions_recompute += len(members)

    def _unschedule(self, step: Step, seqs: list[Hashable]) -> None:
        """With textbook steps, somebody may yield who was admitted in this very step."""
        if "prefills" in step.__dict__:
            step.prefills = [chunk for chunk in step.prefills if chunk[0] not in seqs]

    def _resumed(self, request: Request) -> Resumed:
        """Make the queue entry of a request that is about to lose its blocks."""
        members = [self._member(seq) for seq in request.members]
        changes: dict[str, Any] = {"waited": False}
        if self.bm.prefix_caching:
            changes["retention"] = self.bm.retention(members[0].seq)
        return Resumed.of(request, members, **changes)

    def _member(self, seq: Hashable) -> Member:
        """Keep of a sequence what is known without its blocks."""
        length = self.bm.length(seq)
        row = self.bm.row(seq)
        prompt = None
        if self.bm.prefix_caching and not self.roster.has_holes(seq):
            prompt = self.bm.prompt_of(seq)
        if self.options.token_budget is None:
            return Member(seq, length, prompt, UNKNOWN_TOKEN, length)
        if seq in self.roster.prefilling:
            came = self.roster.by_seq[seq].member(seq)
            if came.prompt is not None and (prompt is None or len(prompt) < len(came.prompt)):
                prompt = came.prompt  # of a fork, the table has only what it shares as yet
            lost = max(self.roster.prefilling[seq], came.lost)
            return Member(seq, length, prompt, came.pending, lost)
        outstanding = sum(
            seq in step.sampled and self.roster.entered[seq] <= step.number
            for step in self.roster.outstanding
        )
        known = length + 1 - outstanding
        return Member(seq, known, prompt, int(self.roster.notes.pending[row]), min(length, known))
