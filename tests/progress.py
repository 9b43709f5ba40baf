"""A small engine that carries out the plans of a scheduler, and looks at all that is promised.

What a token leaves in memory stands for everything before it: so whoever reads a wrong
block, an old one, or one that somebody else wrote into, reads something else than it
expects. Steps are carried out in their order, at once or only when their results are due.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np

from kvcore import BlockManager, Reason, Request, RequestRefused, Scheduler, Step

SPOILED = "spoiled"


class Life:
    """A sequence from its admission until it loses its blocks: what the device knows of it."""

    def __init__(self, text: list[int], salt: Hashable) -> None:
        self.text = text  # sampled tokens included, also those that are not reported yet
        self.salt = salt
        self.planned: int | None = None  # tokens whose computation is planned; None: not entered
        self.asked = len(text)  # what must be computed before it samples
        self.sampling = 0  # results that are outstanding

    def content(self, place: int) -> Hashable:
        return self.salt, tuple(self.text[: place + 1])


class Sequence:
    def __init__(self, seq: Hashable, group: list[Sequence], prompt: list[int], limit: int) -> None:
        self.seq = seq
        self.group = group
        self.prompt = prompt
        self.limit = limit
        self.output: list[int] = []
        self.is_born = False
        self.is_away = False  # in host memory, or on the way there or back
        self.ended: str | None = None
        self.preemptions = 0  # and ways to host memory
        self.lost = 0


class Flight:
    """A step between its plan and its results."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.is_done = False
        self.writes: list[tuple[Life, int, int, list[int]]] = []
        self.lives: dict[Hashable, Life] = {}
        self.counts: list[int] = []
        self.rejected: list[int] = []
        self.tokens: list[list[int]] = []
        self.failed: list[Hashable] = []
        self.tables: dict[Hashable, set[int]] = {}
        self.full: list[Hashable] = []  # whose prompts it completes
        self.copies = step.copies.tolist()
        self.out, self.back = step.swap_out.tolist(), step.swap_in.tolist()


class Engine:
    """Adds requests, plans, carries out, reports; checks after every call."""

    def __init__(self, scheduler: Scheduler, chance: random.Random) -> None:
        self.scheduler, self.bm, self.chance = scheduler, scheduler.bm, chance
        swapping = scheduler._swapping
        self.host: BlockManager | None = None if swapping.host is None else swapping.host.host
        self.options = scheduler.options
        self.size = self.bm.block_size
        self.cells: dict[tuple[int, int], Hashable] = {}
        self.host_cells: dict[tuple[int, int], Hashable] = {}
        self.flights: deque[Flight] = deque()
        self.sequences: dict[Hashable, Sequence] = {}
        self.lives: dict[Hashable, Life] = {}
        self.reject_drafts = 0.5
        self.fail_swaps = 0.2
        self.knows_tokens = True
        self.moves_beams = True
        self.prefilled = self.sampled = self.recomputed = self.steps = 0
        self.log: list[Any] = []

    # --- What an application does -------------------------------------------------------

    def add(
        self,
        seq: Hashable,
        prompt: list[int],
        limit: int,
        siblings: tuple[Hashable, ...] = (),
        **more: Any,
    ) -> bool:
        try:
            self.scheduler.add(seq, tokens=prompt, max_tokens=limit, siblings=siblings, **more)
        except RequestRefused:
            return False
        group: list[Sequence] = []
        for name in (seq, *siblings):
            group.append(Sequence(name, group, prompt, limit))
            self.sequences[name] = group[-1]
        group[0].is_born = True
        self.begin(group[0])
        self.check()
        return True

    def begin(self, one: Sequence) -> Life:
        """Let a sequence wait (again), with all that has been reported of it."""
        salt = None if self.bm.prefix_caching else (one.group[0].seq, self.steps)
        life = self.lives[one.seq] = Life(one.prompt + one.output, salt)
        return life

    def abort(self, seq: Hashable) -> None:
        one = self.sequences[seq]
        was_live = one.ended is None
        assert self.scheduler.abort(seq) == was_live, f"abort({seq!r}) is not {was_live}"
        if was_live:
            self.end(one, "aborted")
        self.check()

    def end(self, one: Sequence, how: str) -> None:
        assert one.ended is None, f"{one.seq!r} ends twice: {one.ended}, {how}"
        one.ended = how
        self.lives.pop(one.seq, None)
        if one is one.group[0]:
            for other in one.group[1:]:
                if not other.is_born and other.ended is None:
                    self.end(other, how)

    # --- A plan ------------------------------------------------------------------------

    def plan(self) -> Step:
        scheduler, bm = self.scheduler, self.bm
        before = list(scheduler.running)
        due = [seq for seq in before if self.decodes(seq)]
        entered = dict(scheduler._roster.prefilling)  # some of them have computed nothing yet
        step = scheduler.step()
        self.steps += 1
        flight = Flight(step)
        plan = [list(step), step.prefills, step.preempted, step.swapped_out, step.swapped_in]
        plan += [step.stalled, list(step.rejected), step.copies.tolist()]
        plan += [step.swap_out.tolist(), step.swap_in.tolist(), step.slots.tolist()]
        self.log.append(plan)
        entering = set(scheduler.running) - {*before, *step.swapped_in}
        if entering - {child for _, child in step.forks}:
            assert not scheduler.swapped, "admitted before the swapped ones"
            assert not step.swapped_out, "admitted in a step that swaps out"
        counts = [1] * len(step) if step.counts is None else step.counts.tolist()
        assert sum(counts) == len(step.slots)
        total = len(step.slots) + sum(count for _, _, count in step.prefills)
        assert total <= self.options.token_budget, f"{total} tokens in a step"
        computing = [seq for seq, _, _ in step.prefills]
        # Somebody's state, each once: nobody who yields has another part in the step.
        parts = [*step, *computing, *step.preempted, *step.swapped_out, *step.swapped_in]
        parts += [*step.stalled, *(seq for seq in step.rejected)]
        assert len(set(parts)) == len(parts), f"named twice: {parts}"
        assert list(step) == [seq for seq in before if seq in set(step)], "not oldest first"
        absent = set(step.preempted) | set(step.swapped_out) | set(step.rejected)
        missing = [seq for seq in due if seq not in {*step, *step.stalled, *absent}]
        assert not missing, f"{missing} neither decode nor stall"
        assert set(step) | set(step.stalled) <= set(due), "decodes what is not ready"

        for seq in step.swapped_out:
            self.sequences[seq].is_away = True
            self.sequences[seq].preemptions += 1
        for seq in step.swapped_in:
            assert self.sequences[seq].is_away
        for seq in step.preempted:
            one, life = self.sequences[seq], self.lives[seq]
            assert one.ended is None
            if life.planned is None:
                assert seq in entered, f"{seq!r} is preempted, and does not run"
                life.planned = entered[seq]
            known = len(one.prompt) + len(one.output)
            whole = life.planned >= life.asked
            one.lost = min(life.planned, known) if whole else max(one.lost, life.planned)
            one.is_away = False
            one.preemptions += 1
            self.begin(one)
        for seq, verdict in step.rejected.items():
            assert isinstance(verdict.reason, Reason)
            self.end(self.sequences[seq], f"rejected: {verdict.reason.value}")

        for seq, start, count in step.prefills:
            life, one = self.lives[seq], self.sequences[seq]
            if life.planned is None:
                assert bm.prefix_caching or start == 0 or len(one.group) > 1
                life.planned = start
            assert start == life.planned
            assert count > 0
            life.planned += count
            assert life.planned <= life.asked == len(one.prompt) + len(one.output)
            self.prefilled += count
            self.recomputed += max(min(life.planned, one.lost) - start, 0)
            flight.writes.append((life, start, count, self.table(seq)))
        flight.full = [seq for seq in computing if self.whole(seq)]
        full = [seq for seq in flight.full if self.sequences[seq].limit]
        assert list(step.completed) == full, f"completed {step.completed}, not {full}"
        for parent, child in step.forks:
            one = self.sequences[child]
            assert one.ended is None
            assert not one.is_born
            assert self.sequences[parent] is one.group[0]
            one.is_born = True
            life = self.begin(one)
            life.planned, life.salt = len(one.prompt), self.lives[parent].salt
        unfinished = [
            seq for seq in scheduler.running if not (self.whole(seq) or self.sequences[seq].is_away)
        ]
        assert not unfinished or step.prefills, f"the prompts of {unfinished} starve"
        ends = np.cumsum(counts).tolist()
        for place, seq in enumerate(step):
            life, count = self.lives[seq], counts[place]
            assert life.planned is not None
            assert count >= 1
            table, start = self.table(seq), life.planned
            places = range(start, start + count)
            slots = [table[p // self.size] * self.size + p % self.size for p in places]
            assert slots == step.slots[ends[place] - count : ends[place]].tolist()
            assert step.lengths[place] == start + count == bm.length(seq)
            life.planned += count
            flight.writes.append((life, start, count, table))
        flight.counts = counts
        for seq in step.sampled:
            flight.lives[seq] = self.lives[seq]
            self.lives[seq].sampling += 1
        assert len(flight.lives) == len(step.sampled)
        self.check_blocks(flight)
        if not step.is_updated:
            flight.failed = [
                seq
                for seq in [*step.swapped_out, *step.swapped_in]
                if self.chance.random() < self.fail_swaps
            ]
            if self.host is not None:
                for seq in flight.failed:
                    flight.tables[seq] = set(np.asarray(self.host.tables[seq]).tolist())
            self.flights.append(flight)
        else:
            assert step.is_empty
        self.check()
        return step

    def whole(self, seq: Hashable) -> bool:
        life = self.lives[seq]
        return life.planned is not None and life.planned >= life.asked

    def decodes(self, seq: Hashable) -> bool:
        """Whether a running sequence must get a token in the next step."""
        one, life = self.sequences[seq], self.lives[seq]
        return self.whole(seq) and not one.is_away and len(one.output) + life.sampling < one.limit

    def table(self, seq: Hashable) -> list[int]:
        return np.asarray(self.bm.tables[seq]).tolist()

    def check_blocks(self, flight: Flight) -> None:
        copies = flight.copies
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets), "two copies into a block"
        assert not set(targets) & {source for source, _ in copies}, "a copy of a copy"
        for pairs in (flight.out, flight.back):
            assert len({target for _, target in pairs}) == len(pairs)
        coming = {target for _, target in flight.back}
        assert not coming & set(targets)
        assert not coming & {source for source, _ in flight.out}
        written: dict[tuple[int, int], Hashable] = {}
        for life, start, count, table in flight.writes:
            for place in range(start, start + count):
                cell = table[place // self.size], place % self.size
                assert cell[0] >= 0
                assert cell not in written, f"two write to {cell}"
                written[cell] = life
        assert not {block for block, _ in written} & {source for source, _ in flight.out}
        assert not {block for block, _ in written} & coming

    # --- The device --------------------------------------------------------------------

    def execute(self) -> None:
        for flight in self.flights:
            if not flight.is_done:
                self.execute_one(flight)

    def execute_one(self, flight: Flight) -> None:
        flight.is_done = True
        spoiled = {block for seq in flight.failed for block in flight.tables[seq]}
        for source, target in flight.out:
            for place in range(self.size):
                value = SPOILED if target in spoiled else self.cells.get((source, place))
                self.host_cells[target, place] = value
        for source, target in flight.back:
            for place in range(self.size):
                value = SPOILED if source in spoiled else self.host_cells.get((source, place))
                self.cells[target, place] = value
        before = {
            (source, place): self.cells.get((source, place))
            for source, _ in flight.copies
            for place in range(self.size)
        }
        for source, target in flight.copies:
            for place in range(self.size):
                self.cells[target, place] = before[source, place]
        guesses: dict[Life, int] = {}
        for life, start, count, table in flight.writes:
            assert len(life.text) > start, "computes a token that nobody knows"
            guesses[life] = len(life.text)
            while len(life.text) < start + count:
                life.text.append(self.chance.randrange(3))  # drafts
            for place in range(start, start + count):
                self.cells[table[place // self.size], place % self.size] = life.content(place)
        for life, start, count, table in flight.writes:
            self.read(life, table, start, start + count)
        for place, seq in enumerate(flight.step.sampled):
            life = flight.lives[seq]
            rejected = 0
            known = len(life.text)
            if place < len(flight.step):
                count, known = flight.counts[place], guesses[life]
                if count > 1 and self.chance.random() < self.reject_drafts:
                    rejected = self.chance.randint(1, count - 1)
                flight.rejected.append(rejected)
                del life.text[len(life.text) - rejected :]
            life.text.append(self.chance.randrange(3))
            flight.tokens.append(life.text[known:])
        for life in guesses:
            assert SPOILED not in life.text

    def read(self, life: Life, table: list[int], start: int, stop: int) -> None:
        """Let the queries from ``start`` on read what they see."""
        window, sinks = self.options.window, self.options.sink_tokens
        for place in range(stop):
            if window is None or place < sinks or place > start - window:
                cell = table[place // self.size], place % self.size
                found, wanted = self.cells.get(cell), life.content(place)
                assert found == wanted, f"token {place} in {cell}: {found}, not {wanted}"

    # --- Results -----------------------------------------------------------------------

    def report(self, finish: float = 0.0) -> list[Hashable]:
        """Carry out what is left to do, and report the oldest step."""
        self.execute()
        flight = self.flights.popleft()
        step = flight.step
        live = {s for s, life in flight.lives.items() if self.lives.get(s) is life}
        finished = [seq for seq in step.sampled if self.chance.random() < finish]
        flat = [token for tokens in flight.tokens for token in tokens]
        for place, seq in enumerate(step.sampled):
            flight.lives[seq].sampling -= 1
            if seq not in live:
                continue
            self.sequences[seq].output += flight.tokens[place]
            self.sampled += len(flight.tokens[place])
            if place < len(step):
                planned = self.lives[seq].planned
                assert planned is not None
                self.lives[seq].planned = planned - flight.rejected[place]
        parents = self.parents(step, live) if self.moves_beams else {}
        drafts = self.options.draft_tokens > 0
        ended = self.scheduler.update(
            step,
            np.array(flat, np.int64) if self.knows_tokens else None,
            finished=finished,
            rejected=np.array(flight.rejected, np.int64) if drafts else None,
            parents=parents or None,
            swap_failed=flight.failed,
        )
        for seq, (output, text, planned) in {
            seq: self.after_move(seq, parent) for seq, parent in parents.items()
        }.items():
            self.sequences[seq].output = output
            self.lives[seq].text, self.lives[seq].planned = text, planned
        expected = {seq for seq in finished if seq in live}
        for seq in live:
            one = self.sequences[seq]
            assert len(one.output) <= one.limit, f"{seq!r} has more than {one.limit} tokens"
            if len(one.output) == one.limit:
                expected.add(seq)
        for seq in flight.full:
            for one in self.sequences[seq].group:
                whole = one.ended is None and one.is_born and self.whole(one.seq)
                if whole and one.limit == 0:
                    expected.add(one.seq)
        assert sorted(map(str, ended)) == sorted(map(str, expected)), (ended, expected)
        for seq in ended:
            self.end(self.sequences[seq], "finished")
        away = set(self.scheduler.swapped)
        for seq in [*step.swapped_out, *step.swapped_in]:
            if seq in self.lives:
                self.sequences[seq].is_away = seq in away
        assert self.scheduler.update(step) == []
        self.check()
        return ended

    def parents(self, step: Step, live: set[Hashable]) -> dict[Hashable, Hashable]:
        """Let some beams of a group go on from another one, all as long as each other."""
        moves: dict[Hashable, Hashable] = {}
        if self.options.in_flight:
            return moves
        for seq in [seq for seq in step if seq in live]:
            others = [
                other.seq
                for other in self.sequences[seq].group
                if other.seq in live.intersection(step)
                and self.lives[other.seq].planned == self.lives[seq].planned
            ]
            if len(others) > 1 and self.chance.random() < 0.3:
                moves[seq] = self.chance.choice(others)
        return moves

    def after_move(self, seq: Hashable, parent: Hashable) -> tuple[list[int], list[int], int]:
        source = self.lives[parent]
        assert source.planned is not None
        text = source.text[: source.planned] + self.lives[seq].text[-1:]
        return text[len(self.sequences[seq].prompt) :], text, source.planned

    # --- What holds between any two calls ----------------------------------------------

    def check(self) -> None:
        self.bm.check()
        if self.host is not None:
            self.host.check()
        scheduler = self.scheduler
        running, away = list(scheduler.running), list(scheduler.swapped)
        waiting = [
            seq for request in scheduler.waiting for seq in getattr(request, "ids", request[:1])
        ]
        unborn = [
            one.seq
            for one in self.sequences.values()
            if one.ended is None and not one.is_born and one.seq not in waiting
        ]
        going = [one for request in scheduler._roster.going_out for one in request.members]
        everybody = running + away + waiting + unborn + going
        live = {one.seq for one in self.sequences.values() if one.ended is None}
        assert len(set(everybody)) == len(everybody), f"twice: {everybody}"
        assert set(everybody) == live, f"lost or left over: {set(everybody) ^ live}"
        width = len(running) + sum(
            one.seq in unborn
            for seq in running
            for one in self.sequences[seq].group[1:]
            if one.group[0].seq == seq
        )
        assert width <= self.options.max_running
        for flight in self.flights:
            for seq in [*flight.step.swapped_out, *flight.step.swapped_in]:
                if seq in self.lives and self.sequences[seq].is_away and not self.is_ended(flight):
                    self.held(flight)
        if all(flight.is_done for flight in self.flights) and not self.flights:
            for seq in running:
                life = self.lives[seq]
                if life.planned is not None and not self.sequences[seq].is_away:
                    self.read(life, self.table(seq), life.planned, life.planned)

    def is_ended(self, flight: Flight) -> bool:
        names = [*flight.step.swapped_out, *flight.step.swapped_in]
        return any(seq not in self.lives for seq in names)

    def held(self, flight: Flight) -> None:
        assert self.host is not None
        for device, host in [*flight.out, *(pair[::-1] for pair in flight.back)]:
            assert self.bm.ref[device] > 0, "a swap lost its device block"
            assert self.host.ref[host] > 0, "a swap lost its host block"

    def check_end(self) -> None:
        """Everybody has ended, once, and nothing is left of anybody."""
        scheduler, roster = self.scheduler, self.scheduler._roster
        assert all(one.ended is not None for one in self.sequences.values())
        assert (len(self.bm), self.bm.pool.num_used) == (0, 0), "blocks are left"
        if self.host is not None:
            assert (len(self.host), self.host.pool.num_used) == (0, 0), "host blocks are left"
            assert scheduler._swapping.host is not None
            assert not scheduler._swapping.host._away
        for name in ("by_seq", "entered", "prefilling", "idle", "draining", "going_out", "swapped"):
            assert not getattr(roster, name), f"{name} keeps {getattr(roster, name)}"
        assert not roster.outstanding
        assert not scheduler.running
        assert not scheduler.waiting
        for resource in scheduler.resources:
            assert resource.available == resource.total, f"{resource.name} is kept"
        counters = scheduler.counters
        assert counters.prefill_tokens == self.prefilled
        assert counters.sampled_tokens == self.sampled
        assert counters.recomputed_tokens == self.recomputed, (
            counters.recomputed_tokens,
            self.recomputed,
        )
        ends = [one.ended for one in self.sequences.values()]
        assert counters.finished == ends.count("finished")
        # Whoever yields lets somebody else get a token in that step, and tokens are not
        # generated again, but for results that came too late. Who has gone to host memory
        # may be given up there too. And policies push out no more than 20 times.
        most = 2 * (self.sampled + counters.ignored_results + 20)
        for one in self.sequences.values():
            assert one.preemptions <= most, f"{one.seq!r} yields {one.preemptions} times"

    @property
    def is_quiet(self) -> bool:
        return not self.flights and all(one.ended is not None for one in self.sequences.values())


__all__ = ["Engine", "Request"]
