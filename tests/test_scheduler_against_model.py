"""The scheduler and its plain-Python model, step by step, over one stream of requests.

After every call: the same result, the same queues, the same reason for each that waits,
the same blocks. And as an engine would do it: the copies of a step first and in any
order, then its prefills, then its decodes; every live sequence reads back its tokens,
whoever computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from reference_model import ReferenceBlockManager, ReferenceScheduler
from state import PrefixMemory, Uids, outcome, plain, prefix_snapshot, snapshot

from kvcore.block_manager import BlockManager
from kvcore.counters import Counter
from kvcore.errors import RequestRefused
from kvcore.scheduler import Reason, Resumed, Scheduler

index = st.integers(0, 1_000)
prompts = st.lists(st.integers(1, 9), min_size=2, max_size=5)
namespaces = st.sampled_from([None, None, None, "tenant"])
WRONG_LENGTHS = [0, -1, 1.5, "4", None, -(2**70), 2**31 - 1, 2**31, 2**70]


class SchedulerMachine(RuleBasedStateMachine):
    """Few rules, each with many ways, so that steps and forks come often: a pool that is
    short, with shared partial blocks, is where the decisions are."""

    @initialize(
        num_blocks=st.integers(2, 20),
        block_size=st.integers(1, 5),
        watermark=st.sampled_from([0, 0, 1, 1, 2, 3]),
        max_running=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 4)),
        prompts=prompts,
        prefix_caching=st.sampled_from([True, True, False]),
        wait_for_prefix=st.sampled_from([True, True, False]),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        watermark: int,
        max_running: int | None,
        prompts: list[int],
        prefix_caching: bool,
        wait_for_prefix: bool,
    ) -> None:
        self.core = BlockManager(
            num_blocks, block_size, rows=1, columns=1, prefix_caching=prefix_caching
        )
        self.model = ReferenceBlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        watermark = min(watermark, num_blocks - 1)
        self.scheduler = Scheduler(
            self.core, watermark, max_running=max_running, wait_for_prefix=wait_for_prefix
        )
        self.twin = ReferenceScheduler(self.model, watermark, max_running, wait_for_prefix)
        self.memory = PrefixMemory()
        self.texts: dict[Hashable, list[int]] = {}
        self.uids = Uids()
        self.started = 0
        self.fresh_tokens = 0
        self.outsiders: list[Hashable] = []
        self.add_several(prompts)

    # ---------------------------------------------------------------- helpers

    def both(self, call: Callable[[Any], Any]) -> tuple[Any, ...]:
        expected = outcome(call, self.twin)
        assert outcome(call, self.scheduler) == expected
        return expected

    def both_managers(self, call: Callable[[Any], Any]) -> tuple[Any, ...]:
        expected = outcome(call, self.model)
        assert outcome(call, self.core) == expected
        return expected

    def new_name(self) -> int:
        self.started += 1
        return self.started

    def anyone(self, number: int) -> Hashable:
        names = [*self.twin.running, *(seq for seq, _ in self.twin.waiting), "nobody"]
        return names[number % len(names)]

    def most_tokens(self) -> int:
        return (self.model.num_blocks + 1) * self.model.block_size

    # ----------------------------------------------------------------- tokens

    def more(self, text: list[int], count: int, among: int) -> None:
        """Tokens that sequences have in common, or, for ``among`` 0, with nobody."""
        for _ in range(count):
            self.fresh_tokens += 1
            text.append(len(text) % among if among else 100 + self.fresh_tokens)

    def among(self, name: Hashable) -> int:
        return 1 + name % 2 if isinstance(name, int) and self.model.prefix_caching else 0

    def compute(self, name: Hashable, first: int) -> None:
        """Write the tokens from ``first`` on where the manager says they are."""
        knows = self.model.knowledge.get(name)
        contents = self.memory.contents_of(knows.namespace if knows else b"", self.texts[name], ())
        slots = plain(self.core.slots(name, first))
        assert len(slots) == len(contents) - first
        self.memory.compute(name, contents, slots, self.model.block_size)

    # --------------------------------------------------------------- requests

    def add_several(self, prompts: list[int]) -> None:
        """They begin alike."""
        for n_tokens in prompts:
            name = self.new_name()
            tokens = [0] * n_tokens
            self.both(lambda scheduler, name=name, ids=tokens: scheduler.add(name, tokens=ids))

    @rule(size=index, short=st.sampled_from([True, True, True, False]), directly=st.booleans())
    def add(self, size: int, short: bool, directly: bool) -> None:
        limit = 2 * self.model.block_size if short else self.most_tokens()
        name, n_tokens = self.new_name(), size % (limit + 1)
        if directly:
            self.both(lambda scheduler: scheduler.waiting.append((name, n_tokens)))
        else:
            self.both(lambda scheduler: scheduler.add(name, n_tokens))

    @rule(
        size=index,
        common=st.integers(0, 12),
        unknown=st.sampled_from([None, None, None, 0, 1, 5, -1]),
        namespace=namespaces,
    )
    def add_tokens(
        self, size: int, common: int, unknown: int | None, namespace: str | None
    ) -> None:
        """They begin like others, and end with tokens that may not be known yet."""
        n_known = size % (3 * self.model.block_size)
        tokens = [0] * min(common, n_known)
        self.more(tokens, n_known - len(tokens), 2)
        name, n_tokens = self.new_name(), None if unknown is None else n_known + unknown
        self.both(
            lambda scheduler: scheduler.add(name, n_tokens, tokens=tokens, namespace=namespace)
        )

    @rule(
        wrong=st.one_of(st.sampled_from(WRONG_LENGTHS), st.just("known")),
        who=index,
        directly=st.booleans(),
    )
    def add_a_wrong_one(self, wrong: Any, who: int, directly: bool) -> None:
        name, n_tokens = (self.anyone(who), 1) if wrong == "known" else (self.new_name(), wrong)
        if directly:
            self.both(lambda scheduler: scheduler.waiting.append((name, n_tokens)))
        else:
            self.both(lambda scheduler: scheduler.add(name, n_tokens))

    @rule(who=index, share=st.one_of(st.none(), st.none(), index), times=st.integers(1, 3))
    def fork(self, who: int, share: int | None, times: int) -> None:
        running = [*self.twin.running] * 4 + ["nobody"]
        parent = running[who % len(running)]
        for _ in range(times):
            child, n_tokens = self.new_name(), None
            if share is not None and parent in self.model:
                n_tokens = share % (self.model.lens[parent] + 2)
            done = self.both(
                lambda scheduler, child=child, n=n_tokens: scheduler.fork(parent, child, n)
            )
            if done[0] == "returned":
                self.share(parent, child, n_tokens)

    @rule(who=index, verb=st.sampled_from(["finish", "abort", "as in the listing"]))
    def end(self, who: int, verb: str) -> None:
        name = self.anyone(who)
        if verb == "as in the listing":
            if name in self.twin.running:
                for scheduler in (self.twin, self.scheduler):
                    scheduler.running.remove(name)
                    scheduler.bm.free_seq(name)
            if who % 2:
                return
            verb = "finish"  # a late result
        self.both(lambda scheduler: getattr(scheduler, verb)(name))
        # A late result: the second time there is nobody unless the id waits twice.
        self.both(lambda scheduler: getattr(scheduler, verb)(name))

    # ----------------------------------------------------------------- prefixes

    @rule(who=index, count=st.one_of(st.none(), index), unsettled=st.sampled_from([0, 0, 0, 1, 4]))
    def commit(self, who: int, count: int | None, unsettled: int) -> None:
        name = [*self.model, "nobody"][who % (len(self.model) + 1)]
        tokens: list[int] = []
        settled = None
        if self.model.prefix_caching and name in self.model:
            known = self.model.known(name)
            tokens = self.texts[name][known:]
            if count is not None:
                tokens = tokens[: count % (len(tokens) + 1)]
            if unsettled:
                settled = max(0, known + len(tokens) - unsettled)
        self.both_managers(lambda manager: manager.commit(name, tokens, n_settled=settled))

    @rule()
    def commit_all(self) -> None:
        """What an engine does after each step."""
        for who in range(len(self.model)):
            self.commit(who=who, count=None, unsettled=0)

    @rule(act=st.sampled_from(["reset", "epoch", "evict", "forget"]), number=index)
    def drop(self, act: str, number: int) -> None:
        if not self.model.prefix_caching:
            return
        if act == "reset":
            self.both_managers(lambda manager: sorted(manager.reset()))
        elif act == "epoch":
            self.both_managers(lambda manager: sorted(manager.set_epoch(number % 3)))
        elif act == "evict":
            self.both_managers(lambda manager: manager.evict(number % 4))
        else:
            tokens = [0] * (number % self.most_tokens())
            self.both_managers(lambda manager: manager.forget(tokens))

    # --------------------------------------------------------- other holders

    def share(self, parent: Hashable, child: Hashable, n_tokens: int | None) -> None:
        self.texts[child] = self.texts[parent][:n_tokens]
        self.memory.begin(child, self.memory.tokens[parent][:n_tokens])

    def outsider(self, name: Hashable, n_tokens: int) -> None:
        done = self.both_managers(lambda manager: manager.allocate(name, n_tokens))
        if done[0] == "returned":
            self.outsiders.append(name)
            self.texts[name] = []
            self.more(self.texts[name], n_tokens, 0)
            self.compute(name, 0)

    @rule(
        act=st.sampled_from(["come", "go", "fork", "fork", "take a name"]),
        who=index,
        size=index,
    )
    def outsiders_act(self, act: str, who: int, size: int) -> None:
        running, waiting = self.twin.running, [seq for seq, _ in self.twin.waiting]
        if act == "come" and len(self.outsiders) < 2:
            self.outsider(f"outsider {self.new_name()}", size % (self.most_tokens() // 2))
        elif act == "take a name" and waiting:
            self.outsider(waiting[who % len(waiting)], 1)
        elif act == "fork" and running:
            parent, name = running[who % len(running)], f"outsider {self.new_name()}"
            n_tokens = size % (self.model.lens[parent] + 1)
            self.both_managers(lambda manager: manager.fork(parent, name, n_tokens))
            self.outsiders.append(name)
            self.share(parent, name, n_tokens)
        elif self.outsiders:
            name = self.outsiders.pop(who % len(self.outsiders))
            self.both_managers(lambda manager: manager.free_seq(name))

    @rule(
        block=st.integers(0, 19),
        verb=st.sampled_from(["pin", "unpin", "unpin", "keep", "keep", "forget"]),
    )
    def block(self, block: int, verb: str) -> None:
        if verb in ("pin", "unpin"):
            self.both_managers(lambda manager: getattr(manager, verb)(block))
        else:
            self.both_managers(lambda manager: getattr(manager.pool, verb)(block))

    @rule(behind=st.sampled_from([0, 0, 0, 1]))
    def fence_or_settle(self, behind: int) -> None:
        """What is let go while a step is in flight comes back when that has settled."""
        if self.model.newest_step > self.model.settled_step:
            step = self.model.newest_step - behind
            self.both_managers(lambda manager: manager.settle(step))
        else:
            self.both_managers(lambda manager: manager.fence())

    # ------------------------------------------------------------------ steps

    @rule()
    def step(self) -> None:
        expected, step = self.twin.step(), self.scheduler.step()
        assert step == list(expected)
        assert step.prefills == expected.prefills
        assert step.preempted == expected.preempted
        assert step.stalled == expected.stalled
        assert step.rejected == expected.rejected
        assert step.copies.dtype == np.int32
        assert step.copies.shape == (len(expected.copies), 2)
        assert step.copies.tolist() == expected.copies
        assert step.slots.dtype == np.int64
        assert step.slots.tolist() == expected.slots
        assert step.rows.dtype == np.int32
        assert step.rows.tolist() == [self.core.row(seq) for seq in step]
        assert step.lengths.tolist() == [self.core.length(seq) for seq in step]
        assert step == [seq for seq in self.scheduler.running if seq not in step.stalled]
        self.run(step)

    def run(self, step: Any) -> None:
        """What an engine does with a step."""
        self.memory.copy_all(step.copies.tolist(), self.model.block_size)
        first = {}
        for seq, start, count in step.prefills:
            assert count > 0, "the last token is always computed"
            assert self.core.length(seq) == start + count + (seq in step)
            # What the manager knows is what was asked for; nobody has seen the rest yet.
            text = self.core.tokens(seq).tolist() if self.model.prefix_caching else []
            self.more(text, start + count - len(text), self.among(seq))
            self.texts[seq] = text
            first[seq] = start
            if seq not in step:
                self.compute(seq, start)
        for seq, slot in zip(step, step.slots.tolist(), strict=True):
            assert slot == self.core.slots(seq)[-1]
            text = self.texts[seq]
            self.more(text, 1, self.among(seq))
            self.compute(seq, first.get(seq, len(text) - 1))

    @rule(steps=st.integers(2, 6), prompts=prompts, commits=st.sampled_from([True, True, False]))
    def steps(self, steps: int, prompts: list[int], commits: bool) -> None:
        if len(self.twin.waiting) + len(self.twin.running) < 3:
            self.add_several(prompts)
        for _ in range(steps):
            self.step()
            if commits:
                self.commit_all()
            self.equal()

    @rule(
        parents=st.lists(st.tuples(index, st.one_of(st.none(), index)), max_size=4),
        leave=st.integers(0, 4),
        end=st.booleans(),
        who=index,
    )
    def step_when_it_is_tight(
        self, parents: list[tuple[int, int | None]], leave: int, end: bool, who: int
    ) -> None:
        """Forks, then a step with few blocks left: copies and preemptions together."""
        if len(self.twin.running) < 2:
            self.step()
        for parent, share in parents:
            self.fork(who=parent, share=share, times=1)
        if end:
            self.end(who=who, verb="finish")
        taken = self.model.pool.available - leave
        if taken > 0:
            self.outsider(f"outsider {self.new_name()}", taken * self.model.block_size)
        self.step()
        self.equal()
        if taken > 0:
            name = self.outsiders.pop()
            self.both_managers(lambda manager: manager.free_seq(name))

    # ------------------------------------------------------------- comparison

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "core"):
            return
        assert list(self.scheduler.waiting) == list(self.twin.waiting)
        assert [isinstance(entry, Resumed) for entry in self.scheduler.waiting] == [
            isinstance(entry, Resumed) for entry in self.twin.waiting
        ]
        assert self.scheduler.running == self.twin.running
        for seq in [*(seq for seq, _ in self.twin.waiting), *self.twin.running, "nobody"]:
            self.both(lambda scheduler, seq=seq: scheduler.why(seq))
        assert snapshot(self.core) == snapshot(self.model)
        if self.model.prefix_caching:
            prefix_snapshot(self.core, self.model, self.uids)
        self.core.check()
        self.memory.compare(self.core, [(seq, seq) for seq in self.core])

    def teardown(self) -> None:
        """Everything that waits ends, once the others are out of the way (I8)."""
        if not hasattr(self, "core"):
            return
        for name in self.outsiders:
            self.core.free_seq(name)
        self.core.settle(self.core.fence())
        pool = self.core.pool
        for block in range(pool.num_blocks):
            pool.release_many([block] * pool.pins(block))
        work = len(self.scheduler.waiting) + len(self.scheduler.running)
        for _ in range(20 * (work + 1) * self.most_tokens()):
            step = self.scheduler.step()
            assert step or step.rejected or not self.scheduler.waiting, "nothing moved"
            for seq in list(step):
                if self.core.lens[seq] > self.most_tokens() // 2:
                    self.scheduler.finish(seq)
            if not self.scheduler.waiting and not self.scheduler.running:
                break
        assert not self.scheduler.waiting
        assert not self.scheduler.running
        self.core.check()
        assert pool.num_used == 0


TestScheduler = SchedulerMachine.TestCase


def full_pool(running: list[str], tokens_of_d: int) -> tuple[BlockManager, Scheduler]:
    """Six blocks of 4: "b" has [0, 1], "d" [0, 1] or [0, 1, 2]; "x" shares [3] and "z"
    shares [4] with outsiders. All of them append to a shared partial block, but "d"."""
    bm = BlockManager(num_blocks=6, block_size=4)
    bm.allocate("a", 12)
    bm.fork("a", "b", 6)
    bm.fork("a", "d", tokens_of_d)
    bm.free_seq("a")
    for seq in ("x", "z"):
        bm.allocate(seq, 2)
        bm.fork(seq, f"outsider with {seq}")
    bm.pool.take_many(bm.pool.num_free - 1)
    scheduler = Scheduler(bm, watermark_blocks=0)
    scheduler.running[:] = running
    return bm, scheduler


@pytest.mark.parametrize(
    ("running", "tokens_of_d", "copies", "decoded", "preempted"),
    [
        # Without "d", whose block 2 is a free gain, "b" writes in place.
        (["b", "x", "z", "d"], 12, [[3, 5], [4, 2]], ["b", "x", "z"], ["d"]),
        (["b", "x", "z", "d"], 8, [[3, 2]], ["b", "x"], ["d", "z"]),
        (["b", "x", "z", "d"], 7, [[3, 2]], ["b", "x"], ["d", "z"]),
        (["b", "x", "d", "z"], 7, [[3, 2]], ["b", "x"], ["z", "d"]),
        # Of "b" and "d", which share a block with nobody else, the last writes in place.
        (["b", "d", "x", "z"], 7, [[1, 2]], ["b", "d"], ["z", "x"]),
    ],
)
def test_who_yields_is_decided_before_anything_is_copied(
    running: list[str],
    tokens_of_d: int,
    copies: list[list[int]],
    decoded: list[str],
    preempted: list[str],
) -> None:
    """A block that a victim shares needs no copy, and no block is taken for one."""
    bm, scheduler = full_pool(running, tokens_of_d)
    step = scheduler.step()
    assert step.copies.tolist() == copies
    assert step == decoded
    assert step.preempted == preempted
    assert bm.counters[Counter.OUT_OF_BLOCKS] == 0
    bm.check()


def test_nobody_yields_if_that_would_not_help() -> None:
    """An outsider holds what both lack, and what they have they share."""
    bm = BlockManager(num_blocks=2, block_size=2)
    scheduler = Scheduler(bm, watermark_blocks=0)
    scheduler.add("a", 1)
    scheduler.step()
    scheduler.fork("a", "b")
    bm.allocate("outsider", 1)
    step = scheduler.step()
    assert step == []
    assert step.stalled == ["a", "b"]
    assert step.preempted == []
    assert scheduler.why("b") == (Reason.STALLED, 1, 0, 0, 0)
    bm.free_seq("outsider")
    step = scheduler.step()
    assert step == ["a"]
    assert step.preempted == ["b"]
    with pytest.raises(KeyError):
        scheduler.why("a")


def test_what_comes_when_a_step_has_settled_is_waited_for() -> None:
    """Those who need no block decode meanwhile, and nobody yields."""
    bm = BlockManager(num_blocks=3, block_size=2)
    scheduler = Scheduler(bm, watermark_blocks=0)
    bm.allocate("outsider", 2)
    scheduler.add("a", 1)
    scheduler.step()
    scheduler.waiting.append(("b", 1))
    fence = bm.fence()
    bm.free_seq("outsider")
    assert bm.num_available == 1
    step = scheduler.step()
    assert step == ["b"]
    assert step.stalled == ["a"]
    assert scheduler.why("a") == (Reason.STALLED, 1, 0, 0, 0)
    bm.settle(fence)
    step = scheduler.step()
    assert step == ["a"]
    assert step.preempted == ["b"]


def test_one_without_tokens_can_yield() -> None:
    """A child of nothing has no block to give back, and that is no error."""
    bm = BlockManager(num_blocks=3, block_size=2)
    scheduler = Scheduler(bm, watermark_blocks=0)
    scheduler.add("a", 1)
    scheduler.step()
    scheduler.fork("a", "b", 0)
    bm.allocate("outsider", 1)
    step = scheduler.step()
    assert step == ["a"]
    assert step.preempted == ["b"]
    assert list(scheduler.waiting) == [("b", 0)]
    bm.free_seq("outsider")
    step = scheduler.step()
    assert step == ["a", "b"]
    assert step.prefills == []


def test_a_running_one_that_was_begun_anew_is_found_in_its_new_row() -> None:
    """The list of the running is as it was, and still the rows of the last step are not."""
    bm = BlockManager(num_blocks=8, block_size=4)
    scheduler = Scheduler(bm)
    scheduler.add("a", 2)
    scheduler.step()
    old_row = bm.row("a")
    bm.free_seq("a")
    bm.allocate("outsider", 1)
    bm.allocate("a", 5)
    assert bm.row("a") != old_row
    step = scheduler.step()
    assert step.rows.tolist() == [bm.row("a")]
    assert step.slots.tolist() == bm.slots("a", 5).tolist()
    assert bm.lens == {"outsider": 1, "a": 6}


def test_why_names_every_reason() -> None:
    """Each reason, with its numbers, on the smallest case that shows it."""
    bm = BlockManager(num_blocks=4, block_size=4)
    scheduler = Scheduler(bm, watermark_blocks=1, max_running=2)
    scheduler.add("a", 6)
    assert scheduler.why("a") == (Reason.FITS, 2, 4, 0, 1)
    scheduler.step()
    scheduler.add("b", 12)
    scheduler.add("c", 5)
    assert scheduler.why("b") == (Reason.BLOCKS, 3, 2, 0, 1)
    assert scheduler.why("c") == (Reason.BEHIND, 2, 2, 1, 1)
    scheduler.finish("b")
    assert scheduler.why("c") == (Reason.WATERMARK, 2, 2, 0, 1)
    scheduler.finish("c")
    scheduler.add("d", 4)
    scheduler.add("e", 1)
    scheduler.step()
    assert scheduler.why("e") == (Reason.MAX_RUNNING, 1, bm.num_available, 0, 1)
    with pytest.raises(KeyError):
        scheduler.why("d")
    scheduler.waiting.appendleft(("d", 3))
    assert scheduler.why("d").reason is Reason.LIVE_ID
    scheduler.waiting.clear()
    scheduler.waiting.extend([("f", 0), ("g", 13)])
    assert scheduler.why("f") == (Reason.BAD_LENGTH, 0, 4, 0, 0)
    assert scheduler.step().rejected == {
        "f": (Reason.BAD_LENGTH, 0, 4, 0, 0),
        "g": (Reason.NEVER_FITS, 4, 3, 0, 1),
    }
    with pytest.raises(RequestRefused):
        scheduler.add("g", 13)


def test_one_that_outgrows_the_pool_alone_is_ended_with_a_reason() -> None:
    bm = BlockManager(num_blocks=2, block_size=4)
    scheduler = Scheduler(bm, watermark_blocks=0)
    scheduler.add("a", 8)
    step = scheduler.step()
    assert step == []
    assert step.prefills == []
    assert step.rejected == {"a": (Reason.OUTGREW_POOL, 3, 2, 0, 0)}
    assert bm.pool.num_free == 2
    assert not scheduler.waiting
