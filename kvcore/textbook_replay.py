"""Replay with textbook steps: whoever is admitted decodes in the same step.

The loop is cheap on purpose, so that the time inside the manager can be told from the
time around it: a step in which nobody comes or goes touches no sequence. Those that
end are found in a calendar, since a running sequence gets one token in every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from time import thread_time_ns
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter
from kvcore.errors import InvariantError
from kvcore.replay_run import Progress, ReplayRun
from kvcore.scheduler import Scheduler, Step, Verdict
from kvcore.step_time import StepTime
from kvcore.trace import Trace

__all__ = ["TextbookRun"]

BLOCKS_TAKEN, COW_COPIES = int(Counter.BLOCKS_TAKEN), int(Counter.COW_COPIES)
CACHED_TOKENS = int(Counter.CACHED_TOKENS)
RESUMED_CACHED_TOKENS = int(Counter.RESUMED_CACHED_TOKENS)


class TextbookRun(ReplayRun):
    """A request with several samples forks them off right after its prefill."""

    def __init__(
        self, trace: Trace, manager: BlockManager, scheduler: Scheduler, step_time: StepTime
    ) -> None:
        super().__init__(trace, manager, scheduler, step_time)
        # An item of a memoryview is an int at once.
        self.counters = memoryview(manager.counters)  # type: ignore[arg-type]
        # Appends to come after the admission that is next or was last.
        self.appends_left = [max(tokens, 1) for tokens in self.output]
        # Step number -> the running sequences that get their last token in it.
        self.calendar: defaultdict[int, list[int]] = defaultdict(list)
        self.last_step: dict[int, int] = {}
        # Children that have not been in a step yet.
        self.forked: list[int] = []
        self.preempted: set[int] = set()
        self.cached_tokens = 0
        self.tokens = 0
        # Table cells that the counters of blocks do not tell of.
        self.cells_beside_counters = 0

    def serve(self, progress: Progress | None) -> None:
        """All requests, from the first arrival until the last has left."""
        scheduler, pool = self.scheduler, self.manager.pool
        counters, taken, copied = self.counters, BLOCKS_TAKEN, COW_COPIES
        while True:
            if self.next_add <= self.now:
                self.add_arrivals()
            if not (scheduler.running or scheduler.waiting):
                if self.await_next_arrival():
                    continue
                break

            start = thread_time_ns()
            step = scheduler.step()
            self.manager_ns += thread_time_ns() - start
            self.steps += 1
            decoded = len(step)
            prefilled = self.prefill_tokens
            admitted: list[int] = []
            if step.prefills or step.preempted or step.rejected:
                admitted = self.account(step)
            if not (decoded or step.rejected):
                raise InvariantError("I8", None, f"step {self.steps} did nothing, yet some wait")
            self.tokens += decoded
            self.generated_tokens += decoded
            seconds = self.seconds_of(self.prefill_tokens - prefilled, decoded, self.tokens)

            used = pool.num_used
            if used > self.peak_used:
                self.peak_used = used
            self.used_block_seconds += used * seconds
            self.used_block_steps += used
            self.token_steps += self.tokens
            self.logical_block_steps += (
                counters[taken] - counters[copied] + self.cells_beside_counters
            )
            if self.next_point <= self.now:
                self.add_point()
            self.now += seconds

            if admitted or self.forked:
                self.start(admitted)
            ending = self.calendar.pop(self.steps, None)
            if ending is not None:
                self.finish(ending)
            self.tell(progress)
        self.timed_calls += self.steps
        self.add_point()
        if progress is not None:
            progress(len(self.samples), len(self.samples))

    def add(self, request: int, tokens: NDArray[np.int32] | None) -> None:
        """Tell the scheduler of a request."""
        sequence = self.first_sequence[request]
        self.scheduler.add(sequence, self.prompt[sequence], tokens=tokens)

    def account(self, step: Step) -> list[int]:
        """Enter who came and who was sent away; returns those who came."""
        prefills = cast("list[tuple[int, int, int]]", step.prefills)
        preempted = cast("list[int]", step.preempted)
        rejected = cast("dict[int, Verdict]", step.rejected)
        if self.hash_ids is not None:
            # Cells that cost no block. The step does not tell of somebody who was admitted
            # and sent away in it, the counters do.
            cached = self.counters[CACHED_TOKENS] + self.counters[RESUMED_CACHED_TOKENS]
            self.cells_beside_counters += (cached - self.cached_tokens) // self.manager.block_size
            self.cached_tokens = cached
        for sequence, cached, computed in prefills:
            self.end_after(sequence, self.steps - 1)
            self.tokens += cached + computed
            self.prefill_tokens += computed
            if sequence in self.preempted:
                self.recomputed_tokens += computed
            elif sequence == self.first_sequence[self.request[sequence]]:
                waited = self.now - self.arrivals[self.request[sequence]]
                self.waiting_seconds.append(waited)
        for sequence in preempted:
            self.preemptions += 1
            self.leave(sequence)
        for sequence, verdict in rejected.items():
            self.rejected[self.request[sequence]] = verdict.reason
            self.leave(sequence)
        return [sequence for sequence, _, _ in prefills]

    def end_after(self, sequence: int, step: int) -> None:
        """Enter into the calendar when a sequence ends that first decodes after ``step``."""
        last_step = step + self.appends_left[sequence]
        self.last_step[sequence] = last_step
        self.calendar[last_step].append(sequence)

    def leave(self, sequence: int) -> None:
        """Undo ``end_after``: the sequence lost its blocks before it decoded in this step."""
        last_step = self.last_step.pop(sequence, None)
        if last_step is not None:
            self.calendar[last_step].remove(sequence)
            self.appends_left[sequence] = last_step - self.steps + 1
            self.preempted.add(sequence)
            self.tokens -= self.length(sequence)
        self.cells_beside_counters -= self.blocks(self.length(sequence))

    def start(self, admitted: Iterable[int]) -> None:
        """Note first tokens; publish the prompts that are now there, and fork their samples."""
        for sequence in self.forked:
            if sequence in self.last_step:
                self.first_token_at[sequence] = self.now
        self.forked.clear()
        if self.hash_ids is not None:
            start = thread_time_ns()
            for sequence in admitted:
                self.manager.commit(sequence)
            self.stop_clock(start)
        for sequence in admitted:
            if self.first_token_at[sequence] is not None:
                continue
            self.first_token_at[sequence] = self.now
            request = self.request[sequence]
            if sequence == self.first_sequence[request]:
                if self.output[sequence]:
                    self.first_token_seconds.append(self.now - self.arrivals[request])
                self.fork(sequence, self.samples[request])

    def fork(self, parent: int, samples: int) -> None:
        """Let the other samples of a prompt run."""
        start = thread_time_ns()
        for child in range(parent + 1, parent + samples):
            self.scheduler.fork(parent, child, self.prompt[parent])
        self.stop_clock(start)
        for child in range(parent + 1, parent + samples):
            self.end_after(child, self.steps)
            self.forked.append(child)
            self.tokens += self.prompt[parent]
            self.cells_beside_counters += self.blocks(self.prompt[parent])

    def finish(self, ending: list[int]) -> None:
        """Let those end that have all their tokens."""
        start = thread_time_ns()
        for sequence in ending:
            self.scheduler.finish(sequence)
        self.stop_clock(start)
        for sequence in ending:
            del self.last_step[sequence]
            self.appends_left[sequence] = 0
            self.tokens -= self.length(sequence)
            self.cells_beside_counters -= self.blocks(self.length(sequence))
            if self.output[sequence] == 0:
                self.generated_tokens -= 1
            self.ended(sequence)

    def length(self, sequence: int) -> int:
        """Tokens of a running sequence."""
        return self.prompt[sequence] + max(self.output[sequence], 1) - self.appends_left[sequence]

    def blocks(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.manager.block_size)
