"""What an engine reports of a step: checked first, then settled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.arguments import whole_numbers
from kvcore.request import UNKNOWN_TOKEN
from kvcore.step import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.block_manager import BlockManager
    from kvcore.roster import Roster
    from kvcore.scheduler_options import SchedulerOptions
    from kvcore.step import SchedulerCounters

__all__ = ["Results"]


class Results:
    """Checks the results of a step, and makes what it wrote known to the block manager."""

    def __init__(
        self,
        bm: BlockManager,
        roster: Roster,
        options: SchedulerOptions,
        counters: SchedulerCounters,
    ) -> None:
        self.bm = bm
        self.roster = roster
        self.options = options
        self.counters = counters

    def accepted(self, step: Step, rejected: Any) -> NDArray[np.int64] | None:
        """Tokens that each decoded sequence has got; None if one each."""
        if step.counts is None:
            if rejected is not None and np.any(np.asarray(rejected)):
                raise ValueError(f"rejected is {rejected!r}, but the step has no drafts")
            return None
        counts = step.counts.astype(np.int64)
        if rejected is None:
            return counts
        numbers = whole_numbers(rejected, "rejected")
        if numbers.shape != counts.shape:
            raise ValueError(
                f"rejected must have {len(counts)} entries, one a decoded sequence, "
                f"got shape {numbers.shape}"
            )
        wrong = np.flatnonzero((numbers < 0) | (numbers >= counts))
        if len(wrong):
            raise ValueError(
                f"rejected: entry {wrong[0]} must be between 0 and {counts[wrong[0]] - 1}, "
                f"got {numbers[wrong[0]]}"
            )
        accepted: NDArray[np.int64] = counts - numbers
        return accepted

    def token_ids(
        self, step: Step, tokens: Any, accepted: NDArray[np.int64] | None
    ) -> NDArray[np.int32] | None:
        """Check the sampled tokens; None if they are of no use."""
        completed = len(step.sampled) - len(step) if "completed" in step.__dict__ else 0
        expected = completed + (len(step) if accepted is None else int(accepted.sum()))
        ids = self.bm.token_ids(tokens) if self.bm.prefix_caching else None
        shape = whole_numbers(tokens, "tokens").shape if ids is None else ids.shape
        if shape != (expected,):
            raise ValueError(
                f"tokens must have {expected} entries for step {step.number}, got shape {shape}"
            )
        return ids

    def moves(
        self, step: Step, parents: Mapping[Hashable, Hashable]
    ) -> tuple[list[Hashable], list[Hashable]] | None:
        """Check the moves of a beam search: the beams, and those they go on from."""
        try:
            moves = dict(parents)
        except (TypeError, ValueError):
            raise TypeError(
                f"parents must map each beam to the one it goes on from, got {parents!r}"
            ) from None
        if moves and self.options.in_flight:
            raise ValueError("parents: beams cannot be moved while the next step is in flight")
        by_seq, idle, bm = self.roster.by_seq, self.roster.idle, self.bm
        for seq in [seq for seq in moves if seq not in bm and seq in step.sampled]:
            del moves[seq]
        for seq, parent in moves.items():
            request = by_seq.get(seq)
            if (
                request is None
                or by_seq.get(parent) is not request
                or request in self.roster.going_out
                or seq in idle
                or parent in idle
                or seq not in bm
                or parent not in bm
            ):
                raise ValueError(f"parents: {parent!r} is no running beam beside {seq!r}")
        return (list(moves), list(moves.values())) if moves else None

    def move(self, step: Step, beams: list[Hashable], parents: list[Hashable]) -> None:
        """Let beams go on from others. What was sampled follows the tokens of those."""
        notes = self.roster.notes
        self.bm.reorder(beams, parents)
        rows = self.bm.rows(beams)
        if self.bm.prefix_caching:
            # What is pending of a sequence tells that all before it is known.
            unknown = notes.pending[self.bm.rows(parents)] < 0
            notes.pending[rows[unknown]] = UNKNOWN_TOKEN
        left = notes.limits[rows] - self.bm.lengths_of(rows)
        at_limit = [beams[place] for place in np.flatnonzero(left <= 0)]
        step.ending = list(dict.fromkeys([*step.ending, *at_limit]))
        self.roster.steps_to_limit = min(self.roster.steps_to_limit, max(int(left.min()), 1))

    def settle_prompts(self, step: Step) -> None:
        """Publish the blocks that the prefills of a step have filled."""
        for seq, start, count in step.prefills:
            if not self.roster.is_current(seq, step):
                continue
            came = self.roster.by_seq[seq].member(seq)
            stop, text = start + count, came.prompt
            known = self.bm.known(seq)
            if text is not None and known < len(text):
                # A beam that was recomputed: its own tokens follow those of the prompt.
                self.bm.commit(seq, text.tokens[known:], n_settled=min(stop, len(text)))
            elif known:
                self.bm.commit(seq, n_settled=min(stop, known))
            is_complete = seq not in self.roster.prefilling
            if came.pending >= 0 and self.bm.known(seq) == stop - 1 and is_complete:
                self.bm.commit(seq, [came.pending])

    def settle_tokens(
        self, step: Step, ids: NDArray[np.int32] | None, accepted: NDArray[np.int64] | None
    ) -> None:
        """Cut off rejected drafts, publish what was written, and note what was sampled."""
        places: NDArray[np.intp] | None = None
        if step.departures != self.roster.departures:
            current = [self.roster.is_current(seq, step) for seq in step]
            if not all(current):
                places = np.flatnonzero(current)
        count = len(step) if places is None else len(places)
        self.counters.ignored_results += len(step) - count
        if step.counts is not None:
            assert accepted is not None
            self._settle_drafts(step, ids, accepted, places)
        else:
            self.counters.sampled_tokens += count
            if self.bm.prefix_caching and count:
                rows = step.rows if places is None else step.rows[places]
                sampled = None
                if ids is not None:
                    sampled = ids[: len(step)] if places is None else ids[places]
                self.bm.commit_pending(rows, self.roster.notes.pending, sampled)
        if "completed" in step.__dict__:
            last = len(step) if accepted is None else int(accepted.sum())
            self._settle_completed(step, None if ids is None else ids[last:])

    def _settle_drafts(
        self,
        step: Step,
        ids: NDArray[np.int32] | None,
        accepted: NDArray[np.int64],
        places: NDArray[np.intp] | None,
    ) -> None:
        assert step.counts is not None
        chosen = np.arange(len(step)) if places is None else places
        if not len(chosen):
            return
        rows, kept = step.rows[chosen], accepted[chosen]
        rejected = step.counts[chosen] - kept
        self.counters.sampled_tokens += int(kept.sum())
        self.counters.draft_tokens += int(step.counts[chosen].sum()) - len(chosen)
        self.counters.rejected_draft_tokens += int(rejected.sum())
        short = np.flatnonzero(rejected)
        if len(short):
            lengths = step.lengths[chosen][short] - rejected[short]
            self.bm.truncate_batch(rows[short], lengths.astype(np.int32))
        if not self.bm.prefix_caching:
            return
        pending = self.roster.notes.pending
        going_on = pending[rows] >= 0
        chosen, rows, kept = chosen[going_on], rows[going_on], kept[going_on]
        if ids is None:
            self.bm.commit_pending(rows, pending)
            return
        # What was written: of each sequence the pending token, and all that it sampled but
        # the last, which is pending now.
        ends = np.cumsum(accepted)[chosen]
        written = np.empty_like(ids)
        written[1:] = ids[:-1]
        written[ends - kept] = pending[rows]
        is_chosen = np.zeros(len(step), np.bool_)
        is_chosen[chosen] = True
        told = np.repeat(is_chosen, accepted)
        self.bm.commit_batch(np.repeat(rows, kept), written[: len(told)][told])
        pending[rows] = ids[ends - 1]

    def _settle_completed(self, step: Step, ids: NDArray[np.int32] | None) -> None:
        """Note the first token of every sequence whose prompt was completed."""
        for place, seq in enumerate(step.sampled[len(step) :]):
            if not self.roster.is_current(seq, step):
                self.counters.ignored_results += 1
                continue
            self.counters.sampled_tokens += 1
            if self.bm.prefix_caching and ids is not None and seq in self.bm:
                written = self.bm.length(seq) - self._planned_since(seq)
                if self.bm.known(seq) == written:
                    self.roster.notes.pending[self.bm.row(seq)] = ids[place]

    def _planned_since(self, seq: Hashable) -> int:
        """Slots that steps in flight have given to a sequence. They have no drafts."""
        return sum(seq in step for step in self.roster.outstanding)

    def slide(self, step: Step) -> None:
        """Give back the blocks that no later token can see. Only what is settled counts."""
        assert self.options.window is not None
        rows, lengths = [], []
        for place, seq in enumerate(step):
            if self.roster.is_current(seq, step) and seq in self.bm:
                rows.append(step.rows[place])
                # A beam may have gone on from a shorter one.
                lengths.append(min(step.lengths[place], self.bm.length(seq)))
        computed = {seq: start + count for seq, start, count in step.prefills}
        computed |= {child: computed[parent] for parent, child in step.forks}
        for seq, length in computed.items():
            if self.roster.is_current(seq, step) and seq in self.bm:
                rows.append(self.bm.row(seq))
                lengths.append(length)
        if rows:
            self.bm.release_outside_window(
                np.array(rows, np.int32),
                np.array(lengths, np.int32),
                self.options.window,
                self.options.sink_tokens,
            )

    def is_at_limit(self, seq: Hashable) -> bool:
        """Whether all but the last token that the sequence may have are written."""
        final = self.roster.by_seq[seq].final_tokens
        return final is not None and self.bm.length(seq) >= final

    def generated(self, seq: Hashable) -> int:
        """Count the tokens that a running sequence has generated."""
        if seq not in self.bm or seq in self.roster.prefilling:
            return 0
        # With engine steps the last token has been sampled, and is never written.
        unwritten = self.options.token_budget is not None
        return self.bm.length(seq) + unwritten - self.roster.by_seq[seq].prompt_tokens
