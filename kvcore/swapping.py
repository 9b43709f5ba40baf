"""Preempted requests in host memory: who goes there, and when they come back."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.request import Member, Reason, Request, Resumed, Verdict
from kvcore.resume_cost import SwapCandidate
from kvcore.running_view import RunningView
from kvcore.step import Step

if TYPE_CHECKING:
    from kvcore.admission import Admission
    from kvcore.block_manager import BlockManager
    from kvcore.host_tier import HostTier
    from kvcore.resources import Resource
    from kvcore.resume_cost import SwapRule
    from kvcore.roster import Roster
    from kvcore.scheduler_options import SchedulerOptions
    from kvcore.step import SchedulerCounters
    from kvcore.waiting import WaitingQueue

__all__ = ["Swapping"]


class Swapping:
    """Moves whole requests between the device and host memory, a step at a time."""

    def __init__(
        self,
        bm: BlockManager,
        host: HostTier | None,
        roster: Roster,
        waiting: WaitingQueue,
        options: SchedulerOptions,
        rule: SwapRule | None,
        admission: Admission,
        resources: Sequence[Resource],
        counters: SchedulerCounters,
    ) -> None:
        self.bm = bm
        self.host = host
        self.roster = roster
        self.waiting = waiting
        self.options = options
        self.rule = rule
        self.admission = admission
        self.resources = resources
        self.counters = counters

    def send_out(self, step: Step, request: Request) -> bool:
        """Send a request to host memory, if there is room and its rule says so."""
        if self.host is None:
            return False
        members = request.members
        if any(seq in self.roster.prefilling for seq in members):
            return False  # it would come back in the middle of its prompt
        if any(seq in self.host.host for seq in members):
            return False  # somebody else has blocks by that name there
        blocks = self.host.blocks_to_move(members)
        if blocks == 0 or blocks > self.host.host.num_available:
            return False
        # What a group shares is computed once.
        n_tokens = sum(self.bm.length(seq) for seq in members)
        n_tokens = min(n_tokens, blocks * self.bm.block_size)
        if self.rule is not None and not self.rule(SwapCandidate(request, n_tokens, blocks)):
            return False
        pairs = []
        for seq in members:
            pending = int(self.roster.notes.pending[self.bm.row(seq)])
            pairs.append(self.host.begin_out(seq, pending))
            position = self.roster.running.index(seq)
            del self.roster.running[position]
        self.roster.rows.follow(self.roster.running)
        step.swapped_out.extend(members)
        step.swap_out = np.concatenate([step.swap_out, *pairs])
        step.going_out = [*step.going_out, request]
        self.roster.going_out.append(request)
        self.counters.preemptions_swap += len(members)
        self.counters.swap_out_blocks += blocks
        return True

    def bring_in(self, step: Step) -> None:
        """Let those in host memory come back, first those that left first."""
        assert self.host is not None
        if step.swapped_out or step.preempted:
            return
        while self.roster.swapped:
            request = self.roster.swapped[0]
            if any(seq in self.bm for seq in request.members):
                self._reject(step, request)
                continue
            needed = sum(self.host.blocks_to_return(seq) for seq in request.members)
            reserve = 0
            if self.roster.running:
                reserve = self.admission.reserve(request, RunningView(self.roster))
            assert self.options.max_running is not None
            if self.roster.width() + len(request.members) > self.options.max_running:
                return
            if needed > self.bm.num_available - reserve:
                if self.roster.running or self.roster.going_out or self.roster.outstanding:
                    return
                # What others there keep on the device may be what it lacks. Alone, it
                # returns unless it has outgrown the pool.
                blocks = needed + self.host.blocks_kept(request.members)
                if len(self.roster.swapped) == 1 and blocks <= self.bm.num_blocks:
                    return
                self.give_up_newest(step)
                continue
            self.roster.swapped.popleft()
            pairs = []
            for seq in request.members:
                pair, pending = self.host.begin_in(seq)
                pairs.append(pair)
                position = self.roster.insert(seq)
                self.roster.note(seq, request, pending)
                self.roster.idle.add(seq)
                self.roster.rows.entered(position, seq)
            step.swapped_in.extend(request.members)
            step.swap_in = np.concatenate([step.swap_in, *pairs])
            step.coming_in = [*step.coming_in, request]
            self.counters.swap_in_blocks += sum(len(pair) for pair in pairs)

    def _reject(self, step: Step, request: Request) -> None:
        """End a request in host memory whose ids somebody else has taken meanwhile."""
        self.roster.swapped.remove(request)
        verdict = Verdict(Reason.LIVE_ID, 0, self.bm.num_available)
        step.rejected.update(dict.fromkeys(request.members, verdict))
        self._let_go(request)
        self.counters.rejected += 1

    def _let_go(self, request: Request) -> None:
        """Give back all that a request has which is in host memory as a whole."""
        assert self.host is not None
        for seq in request.members:
            self.host.drop(seq)
            self.roster.forget(seq)
        request.members.clear()
        for resource in self.resources:
            resource.give(request)

    def give_up_newest(self, step: Step) -> None:
        """Compute the newest request in host memory again, instead of copying it back.

        For the blocks that it keeps on the device. Needs: there is one.
        """
        assert self.host is not None
        last = self.roster.swapped.pop()
        members = []
        for seq in last.members:
            n_tokens, prompt, pending = self.host.recall(seq)
            members.append(Member(seq, n_tokens + 1, prompt, pending, n_tokens))
        self._let_go(last)
        self.waiting.appendleft(Resumed.of(last, members, waited=False))
        step.preempted.extend(member.seq for member in members)
        self.counters.preemptions_recompute += len(members)

    def report(self, step: Step, failed: Collection[Hashable]) -> None:
        """Note that the copies of a step are done, or have failed."""
        host = self.host
        if host is None:
            return
        for request in step.going_out:
            if request not in self.roster.going_out:
                continue  # all of it has ended
            self.roster.going_out.remove(request)
            if any(seq in failed for seq in request.members):
                for seq in request.members:
                    host.cancel_out(seq)
                    self.roster.insert(seq)
                self.roster.steps_to_limit = 1  # they may be at it, and nobody looked
                self.roster.rows.follow(self.roster.running)
                continue
            for seq in request.members:
                host.end_out(seq, int(self.roster.notes.pending[self.bm.row(seq)]))
            self.roster.swapped.append(request)
        for request in step.coming_in:
            members = [seq for seq in request.members if seq in host]
            if not members:
                continue
            if any(seq in failed for seq in members):
                for seq in members:
                    position = self.roster.running.index(seq)
                    del self.roster.running[position]
                    self.roster.idle.discard(seq)
                    host.cancel_in(seq)
                    self.roster.rows.left(position, seq)
                self.roster.swapped.appendleft(request)
                continue
            for seq in members:
                host.end_in(seq)
                self.roster.idle.discard(seq)
            self.roster.steps_to_limit = 1
