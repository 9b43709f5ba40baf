"""Whether a request may enter: never, not now, or at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.admission import Watermark
from kvcore.arguments import at_least
from kvcore.request import Reason, Request, Resumed, Verdict
from kvcore.running_rows import UNLIMITED
from kvcore.running_view import RunningView

if TYPE_CHECKING:
    from kvcore.admission import Admission
    from kvcore.block_manager import BlockManager
    from kvcore.resources import Resource
    from kvcore.roster import Roster
    from kvcore.scheduler_options import SchedulerOptions

__all__ = ["Gate"]

MAX_TOKENS = 2**31 - 1
"""A sequence cannot grow past this; lengths are int32."""


class Gate:
    """Answers whether a request may enter, with a reason and its numbers."""

    def __init__(
        self,
        bm: BlockManager,
        roster: Roster,
        options: SchedulerOptions,
        admission: Admission,
        resources: Sequence[Resource],
    ) -> None:
        self.bm = bm
        self.roster = roster
        self.options = options
        self.admission = admission
        self.resources = resources

    def never(self, request: Request) -> Verdict | None:
        """Why the request can never run, if it cannot."""
        if request.can_run:
            return None
        verdict = self._judge(request)
        request.can_run = verdict is None
        return verdict

    def _judge(self, request: Request) -> Verdict | None:
        num_blocks = self.bm.num_blocks
        resumed = isinstance(request, Resumed)
        try:
            # A preempted fork of nothing may have no token yet.
            n_tokens = at_least(request.n_tokens, 0 if resumed else 1, "n_tokens")
        except (TypeError, ValueError):
            return Verdict(Reason.BAD_LENGTH, 0, num_blocks)
        if n_tokens >= MAX_TOKENS:
            return Verdict(Reason.BAD_LENGTH, 0, num_blocks)
        needed = request.blocks_to_enter(self.bm.block_size)
        if resumed:
            if needed > num_blocks:
                return Verdict(Reason.OUTGREW_POOL, needed, num_blocks)
            return None
        try:
            reserve = self.admission.reserve(request, RunningView(self.roster, []))
        except ValueError:
            # A pair put into the queue may lack what the policy needs; add() says what.
            return Verdict(Reason.BAD_REQUEST, needed, num_blocks)
        if needed > num_blocks - reserve:
            return Verdict(Reason.NEVER_FITS, needed, num_blocks - reserve, reserve=reserve)
        if self.options.max_running is not None and request.width > self.options.max_running:
            return Verdict(Reason.MAX_RUNNING, request.width, self.options.max_running)
        for resource in self.resources:
            if resource.needed(request) > resource.total:
                return Verdict(Reason.RESOURCE, resource.needed(request), resource.total)
        return None

    def not_now(self, request: Request, exact: bool = True, budget: int = UNLIMITED) -> Verdict:
        """Whether the request could enter at once, were it the next.

        What is cached can only help: unless ``exact`` numbers are asked for, nothing is
        looked up for a request that would fit without it.
        """
        needed = request.blocks_to_enter(self.bm.block_size)
        available = self.bm.num_available
        if isinstance(request, Resumed) and not self.roster.running:
            reserve = 0
        else:
            reserve = self.admission.reserve(request, RunningView(self.roster))
        if request.prompt is not None and (exact or needed > available - reserve):
            plan = self.bm.plan_allocate(request.n_tokens, tokens=request.prompt)
            needed -= plan.cached_tokens // self.bm.block_size
            available = plan.available
        reason = Reason.FITS
        lacking = None
        if self.roster.has_live(request.ids):
            reason = Reason.LIVE_ID
        elif (
            self.options.max_running is not None
            and self.roster.width() + request.width > self.options.max_running
        ):
            reason = Reason.MAX_RUNNING
        elif self.roster.swapped or self.roster.going_out:
            reason = Reason.SWAPPED_BEFORE
        elif budget <= 0 and len(self.roster.prefilling) >= self.options.max_partial_prefills:
            reason = Reason.PARTIAL_PREFILLS
        elif self.resources and (lacking := self._lacking(request)) is not None:
            return Verdict(Reason.RESOURCE, lacking.needed(request), lacking.available)
        elif needed > available:
            reason = Reason.BLOCKS
        elif needed > available - reserve:
            keeps_watermark = isinstance(self.admission, Watermark)
            reason = Reason.WATERMARK if keeps_watermark else Reason.RESERVE
        return Verdict(reason, needed, available, 0, reserve)

    def _lacking(self, request: Request) -> Resource | None:
        for resource in self.resources:
            if resource.needed(request) > resource.available:
                return resource
        return None
