"""What do the steps of an engine cost: planned, run by nobody, and reported?

Each row drives a scheduler with a token budget as an engine does. What an engine does in
between takes no time here: the sampled tokens are the same array in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness import Contender, Row, Target
from bench.reference import ReferenceEngine, ReferenceManager, ReferencePrefixManager
from bench.vllm_scheduler import VllmEngine, is_present
from bench.workload import BLOCK_SIZE, phases, set_free_order, shuffled
from kvcore import BlockManager, Scheduler
from kvcore.admission import PredictedPeak
from kvcore.running_view import RunningView
from kvcore.step import Step

__all__ = ["rows"]

TOKENS = 480
GROWTH = 512
"""Tokens by which sequences may grow before all are queued anew."""
VOCABULARY = 32_000
STEPS = 16

STEADY = {
    256: Target.ns(must=10_000, aim=5_000),
    1_024: Target.ns(must=20_000, aim=10_000),
}

Ids = NDArray[np.int32]


def prompts(lengths: Sequence[int], seed: int = 0) -> list[Ids]:
    """Prompts that share nothing."""
    draw = np.random.default_rng(seed)
    return [draw.integers(VOCABULARY, size=length, dtype=np.int32) for length in lengths]


def pool_for(lengths: Sequence[int], growth: int = GROWTH) -> int:
    """Blocks for sequences of these lengths that grow, and some to spare."""
    return sum((length + growth) // BLOCK_SIZE + 2 for length in lengths)


class Engine:
    """A scheduler with a token budget, the step planned last, and tokens for its results.

    ``extra`` goes to the scheduler. A step that has been planned must be updated before
    the next; ``update`` does so with the same token for everybody.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        running: int,
        budget: int,
        prefix_caching: bool,
        **extra: Any,
    ) -> None:
        self.manager = BlockManager(
            num_blocks, BLOCK_SIZE, rows=running, prefix_caching=prefix_caching
        )
        set_free_order(self.manager, shuffled(num_blocks))
        self.scheduler: Any = Scheduler(
            self.manager,
            extra.pop("watermark_blocks", 1),
            max_running=running,
            token_budget=budget,
            **extra,
        )
        self.tokens = np.full(4 * running, 7, np.int32)
        self.planned: Step | None = None

    def add(self, seq: Hashable, tokens: Ids, max_tokens: int = 20_000, **more: Any) -> None:
        """Queue a request, its prompt hashed."""
        self.scheduler.add(seq, tokens=tokens, max_tokens=max_tokens, **more)

    def step(self) -> None:
        """Plan a step."""
        self.planned = self.scheduler.step()

    def update(self, **more: Any) -> None:
        """Report the results of the step planned last, if that has not been done."""
        if self.planned is not None:
            count = len(self.planned.slots) + len(self.planned.sampled) - len(self.planned)
            self.scheduler.update(self.planned, self.tokens[:count], **more)
            self.planned = None

    def abort(self, seqs: Sequence[Hashable]) -> None:
        """End requests from outside."""
        for seq in seqs:
            self.scheduler.abort(seq)

    def reset(self) -> None:
        """End everything, and forget what is cached."""
        self.update()
        waiting = [request.seq for request in self.scheduler.waiting]
        self.abort([*waiting, *self.scheduler.running, *self.scheduler.swapped])
        self.manager.reset()

    def lengths(self) -> int:
        """Tokens of all that run."""
        return sum(self.manager.length(seq) for seq in self.scheduler.running)


class InPython(ReferenceEngine):
    """The same engine with the textbook in plain Python."""

    def __init__(self, num_blocks: int, *, budget: int, prefix_caching: bool) -> None:
        kind = ReferencePrefixManager if prefix_caching else ReferenceManager
        super().__init__(kind(num_blocks, BLOCK_SIZE), budget)
        self.tokens = [7] * 4_096

    def add(self, seq: Hashable, tokens: Ids, max_tokens: int = 20_000) -> None:
        super().add(seq, tokens.tolist(), max_tokens)

    def update(self, tokens: Any = None) -> list[Hashable]:
        ended = super().update(self.tokens if tokens is None else tokens)
        self.decoded, self.completed = [], []
        return ended

    def abort(self, seqs: Sequence[Hashable]) -> None:
        for seq in seqs:
            self.finish(seq)

    def reset(self) -> None:
        self.update()
        self.waiting.clear()
        self.abort(list(self.running))
        if isinstance(self.manager, ReferencePrefixManager):
            self.manager.evict(len(self.manager.pool.evictable))

    def lengths(self) -> int:
        return sum(self.manager.lens[seq] for seq in self.running)


def engines(num_blocks: int, *, running: int, budget: int, prefix_caching: bool) -> dict[str, Any]:
    """The same empty engine by kvcore, in plain Python, and by vLLM if it is there."""
    made: dict[str, Any] = {
        "kvcore": Engine(
            num_blocks,
            running=running,
            budget=budget,
            prefix_caching=prefix_caching,
            watermark_blocks=0,
        ),
        "reference": InPython(num_blocks, budget=budget, prefix_caching=prefix_caching),
    }
    if is_present():
        made["vllm"] = VllmEngine(
            num_blocks, running=running, budget=budget, prefix_caching=prefix_caching
        )
    return made


class Crowd:
    """Sequences that decode in an engine, queued anew before they have grown too long."""

    def __init__(self, engine: Any, count: int) -> None:
        self.engine = engine
        self.lengths = phases(count, TOKENS)
        self.prompts = prompts(self.lengths)
        self.grown = GROWTH
        self.length = 0

    def prepare(self, steps: int = 1) -> None:
        """Be ready for that many steps."""
        self.engine.update()
        self.grown += steps
        if self.grown > GROWTH:
            self.grown = steps
            self.engine.reset()
            for i, prompt in enumerate(self.prompts):
                self.engine.add(f"seq-{i}", prompt)
            self.run(2)
            self.length = self.engine.lengths()

    def run(self, steps: int) -> None:
        """Steps that nobody times."""
        for _ in range(steps):
            self.engine.step()
            self.engine.update()

    def expect(self) -> None:
        """Fail unless everybody has got a token in every step since all were queued."""
        grown = self.engine.lengths() - self.length
        if grown != self.grown * len(self.prompts):
            raise AssertionError(f"{grown} tokens in {self.grown} steps of {len(self.prompts)}")


def crowds(count: int, prefix_caching: bool, others: bool) -> dict[str, Crowd]:
    """The same sequences in every engine, or in kvcore's alone."""
    blocks = pool_for(phases(count, TOKENS))
    made = engines(
        blocks, running=count, budget=count * (TOKENS + BLOCK_SIZE), prefix_caching=prefix_caching
    )
    return {
        name: Crowd(engine, count) for name, engine in made.items() if others or name == "kvcore"
    }


def planned(count: int, prefix_caching: bool, others: bool) -> Mapping[str, Contender]:
    """A step, planned and not reported."""
    return {
        name: Contender(
            "engine.step()",
            "_ in once",
            {"engine": crowd.engine, "once": (None,)},
            operations=1,
            prepare=crowd.prepare,
            verify=crowd.expect,
        )
        for name, crowd in crowds(count, prefix_caching, others).items()
    }


def whole(count: int, prefix_caching: bool, others: bool) -> Mapping[str, Contender]:
    """A step and its results: every sequence has sampled a token."""
    contenders = {}
    for name, crowd in crowds(count, prefix_caching, others).items():
        steps = 1 if name == "vllm" else STEPS
        names: dict[str, Any] = {"steps": range(steps)}
        if name == "kvcore":
            scheduler = crowd.engine.scheduler
            statement = "update(step(), tokens)"
            names |= {
                "step": scheduler.step,
                "update": scheduler.update,
                "tokens": crowd.engine.tokens[:count],
            }
        elif name == "vllm":
            crowd.prepare()
            crowd.engine.step()
            results = crowd.engine.results()  # the same in every steady step
            scheduler = crowd.engine.scheduler
            statement = "update(schedule(), results)"
            names |= {
                "schedule": scheduler.schedule,
                "update": scheduler.update_from_output,
                "results": results,
            }
        else:
            statement = "engine.step(); engine.update()"
            names |= {"engine": crowd.engine}
        contenders[name] = Contender(
            statement,
            "_ in steps",
            names,
            operations=steps,
            prepare=partial(crowd.prepare, steps),
            verify=crowd.expect,
        )
    return contenders


def once(engine: Any, statement: str, prepare: Callable[[], object], **more: Any) -> Contender:
    """A statement that is run once after each preparation."""
    return Contender(
        statement,
        "_ in once",
        {"engine": engine, "once": (None,), **more},
        operations=1,
        prepare=prepare,
    )


NEW = 8
NEW_TOKENS = 1_024


def admitting(beside: int, after: str = "") -> Mapping[str, Contender]:
    """A step in which 8 prompts of 1,024 tokens enter, all but 16 tokens of which are cached."""
    contenders = {}
    arriving = prompts([NEW_TOKENS] * NEW, seed=1)
    names = [f"new-{i}" for i in range(NEW)]
    blocks = pool_for(phases(beside, TOKENS)) + 2 * NEW * NEW_TOKENS // BLOCK_SIZE
    made = engines(blocks, running=beside + NEW, budget=1 << 18, prefix_caching=True)
    for name, engine in made.items():
        crowd = Crowd(engine, beside)
        state = {"entered": False}

        def prepare(
            engine: Any = engine, crowd: Crowd = crowd, state: dict[str, bool] = state
        ) -> None:
            engine.update()
            if state["entered"]:
                engine.abort(names)
            else:  # let the prompts be computed once, so that they are cached
                crowd.prepare()
            if crowd.grown >= GROWTH - 1 or not state["entered"]:
                crowd.prepare()
                for seq, prompt in zip(names, arriving, strict=True):
                    engine.add(seq, prompt)
                crowd.run(1)
                engine.abort(names)
            else:
                crowd.grown += 1
            for seq, prompt in zip(names, arriving, strict=True):
                engine.add(seq, prompt)
            state["entered"] = True

        contender = once(engine, f"engine.step(){after}", prepare)
        if name == "kvcore":

            def verify(engine: Any = engine) -> None:
                chunks = engine.scheduler.step() if engine.planned is None else engine.planned
                found = [start for _, start, _ in chunks.prefills]
                if found != [NEW_TOKENS - BLOCK_SIZE] * NEW:
                    raise AssertionError(f"cached of the prompts: {found}")

            if not after:
                contender.verify = verify
        contenders[name] = contender
    return contenders


YIELDING_TOKENS = 4_096


def yielding(name: str, engine: Any) -> None:
    """A pool that two sequences fill: the older needs a block, the newer is of 4,096 tokens."""
    engine.reset()
    older, newer = prompts([4 * BLOCK_SIZE, YIELDING_TOKENS - 1], seed=2)
    engine.add("older", older, max_tokens=2)
    engine.add("newer", newer)
    engine.step()
    engine.update()


YIELD_BLOCKS = 4 + YIELDING_TOKENS // BLOCK_SIZE


def recomputing() -> Mapping[str, Contender]:
    """The newer yields, the older ends, the newer comes back and finds its blocks cached."""
    made = engines(YIELD_BLOCKS, running=4, budget=1 << 14, prefix_caching=True)
    contenders = {}
    for name, engine in made.items():
        statement = "engine.step(); engine.update(); engine.step(); engine.update()"
        contenders[name] = once(engine, statement, partial(yielding, name, engine))
    ours = made["kvcore"].scheduler

    def verify() -> None:
        counters = ours.counters
        if not counters.preemptions_recompute or ours.running != ["newer"]:
            raise AssertionError(f"nobody yielded: {counters}, {ours.running}")

    contenders["kvcore"].verify = verify
    return contenders


def recomputing_in_manager() -> Mapping[str, Contender]:
    """What of that is the block manager's: forget the sequence, and find it again."""
    engine = Engine(
        YIELD_BLOCKS, running=4, budget=1 << 14, prefix_caching=True, watermark_blocks=0
    )
    yielding("kvcore", engine)
    manager = engine.manager
    reference = InPython(YIELD_BLOCKS, budget=1 << 14, prefix_caching=True)
    yielding("reference", reference)
    return {
        "kvcore": Contender(
            "prompt = manager.prompt_of(seq); manager.free_seq(seq); "
            "manager.allocate(seq, n_tokens, tokens=prompt, resumed=True); manager.commit(seq)",
            "_ in turns",
            {"manager": manager, "seq": "newer", "n_tokens": 4_095, "turns": range(4)},
            operations=4,
        ),
        "reference": Contender(
            "tokens = manager.known[seq]; manager.free_seq(seq); "
            "manager.allocate_prompt(seq, tokens); manager.commit(seq)",
            "_ in turns",
            {"manager": reference.manager, "seq": "newer", "turns": range(4)},
            operations=4,
        ),
    }


def swapping() -> Mapping[str, Contender]:
    """The newer goes to host memory, 256 blocks, and comes back when the older has ended.

    While the copies run, the older waits; it gets its block, and ends, in the second step.
    """
    contenders = {}
    for prefix_caching in (True, False):
        host = BlockManager(2 * YIELD_BLOCKS, BLOCK_SIZE)
        engine = Engine(
            YIELD_BLOCKS,
            running=4,
            budget=1 << 14,
            prefix_caching=prefix_caching,
            watermark_blocks=0,
            host=host,
        )
        statement = "; ".join(["engine.step(); engine.update()"] * 3)
        contender = once(engine, statement, partial(yielding, "kvcore", engine))

        def verify(engine: Engine = engine) -> None:
            counters = engine.scheduler.counters
            if not 0 < counters.swap_out_blocks == counters.swap_in_blocks:
                raise AssertionError(f"not swapped out and in: {counters}")

        contender.verify = verify
        contenders["kvcore" if prefix_caching else "sharing off"] = contender
    return contenders


def predicting() -> Mapping[str, Contender]:
    """``PredictedPeak.reserve`` over 1,024 running sequences of all ages and limits."""
    engine = predicted_engine(spare=100_000)
    scheduler = engine.scheduler
    scheduler.add("next", tokens=np.arange(NEW_TOKENS, dtype=np.int32), max_tokens=512)
    return {
        "kvcore": Contender(
            "reserve(request, RunningView(roster))",
            "_ in turns",
            {
                "reserve": scheduler.admission.reserve,
                "request": scheduler.waiting[0],
                "roster": scheduler._roster,
                "RunningView": RunningView,
                "turns": range(4),
            },
            operations=4,
        )
    }


def predicted_engine(spare: int) -> Engine:
    """1,024 sequences run under predicted-peak admission, in a pool of some blocks more."""
    count = 1_024
    draw = np.random.default_rng(3)
    lengths = draw.integers(64, 2_048, size=count).tolist()
    blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + spare
    engine = Engine(
        blocks,
        running=count + 1,
        budget=1 << 22,
        prefix_caching=False,
        admission=PredictedPeak(expected_tokens=1),
    )
    for i, prompt in enumerate(prompts(lengths)):
        engine.add(i, prompt, max_tokens=int(draw.integers(1_000, 2_000)))
    engine.step()
    engine.update()
    if len(engine.scheduler.running) != count:
        raise AssertionError(f"{len(engine.scheduler.running)} run")
    engine.scheduler.admission.expected_tokens = 64
    return engine


def kept_out() -> Mapping[str, Contender]:
    """A step of 1,024 running in which the next request is simulated, and kept out."""
    engine = predicted_engine(spare=3_072)
    scheduler, manager = engine.scheduler, engine.manager
    rows = manager.rows(scheduler.running)
    lengths = manager.lengths_of(rows)
    scheduler.add("next", tokens=np.arange(16_384, dtype=np.int32), max_tokens=512)

    def prepare() -> None:
        engine.update()
        manager.truncate_batch(rows, lengths)

    def verify() -> None:
        counters = scheduler.counters
        if not counters.admission_blocked_watermark or len(scheduler.running) != len(rows):
            raise AssertionError(f"nobody was kept out, or somebody has left: {counters}")

    contender = once(engine, "engine.step()", prepare)
    contender.verify = verify
    return {"kvcore": contender}


CHUNK = 256


def chunked(prefix_caching: bool) -> Mapping[str, Contender]:
    """Step and results: 256 sequences decode, and 256 tokens of a long prompt are computed."""
    count, filling = 256, TOKENS + 80
    # The first to be through decode while the prompts of the others are computed.
    blocks = pool_for([*phases(count, TOKENS), 2 * 8_192], filling + GROWTH)
    made = engines(blocks, running=count + 1, budget=count + CHUNK, prefix_caching=prefix_caching)
    contenders = {}
    for name, engine in made.items():
        crowd = Crowd(engine, count)
        steps = 8

        def prepare(engine: Any = engine, crowd: Crowd = crowd, steps: int = steps) -> None:
            engine.update()
            if crowd.grown < GROWTH:
                engine.abort(["long"])
            began = crowd.grown + steps > GROWTH
            crowd.prepare(steps)
            if began:
                crowd.run(filling)
                crowd.grown = steps
            draw = np.random.default_rng(crowd.grown)
            engine.add("long", draw.integers(VOCABULARY, size=8_192, dtype=np.int32))

        contenders[name] = Contender(
            "engine.step(); engine.update()",
            "_ in steps",
            {"engine": engine, "steps": range(steps)},
            operations=steps,
            prepare=prepare,
        )
    return contenders


def drafted(prefix_caching: bool) -> Mapping[str, Contender]:
    """Step and results of 256 sequences with 3 drafts each, 0 to 3 of which are rejected."""
    count, drafts, steps = 256, 3, 8
    lengths = phases(count, TOKENS)
    engine = Engine(
        pool_for(lengths, 2 * GROWTH),
        running=count,
        budget=count * (TOKENS + BLOCK_SIZE),
        prefix_caching=prefix_caching,
        draft_tokens=drafts,
    )
    crowd = Crowd(engine, count)
    rejected = np.random.default_rng(4).integers(drafts + 1, size=count)
    accepted = int(count * (drafts + 1) - rejected.sum())

    def prepare() -> None:
        if crowd.grown + steps * (1 + drafts) > GROWTH:
            crowd.grown = GROWTH
        crowd.prepare(steps * (1 + drafts))
        crowd.length = engine.lengths()

    def verify() -> None:
        if engine.lengths() - crowd.length != steps * accepted:
            raise AssertionError("not as many tokens as were accepted")

    return {
        "kvcore": Contender(
            "update(step(), tokens, rejected=rejected)",
            "_ in steps",
            {
                "step": engine.scheduler.step,
                "update": engine.scheduler.update,
                "tokens": np.full(accepted, 7, np.int32),
                "rejected": rejected,
                "steps": range(steps),
            },
            operations=steps,
            prepare=prepare,
            verify=verify,
        )
    }


def beams(groups: int) -> Mapping[str, Contender]:
    """Step and results of beam searches of width 4: two of four beams go on from others."""
    width, steps = 4, STEPS
    lengths = phases(groups, TOKENS)
    engine = Engine(
        pool_for(lengths, width * 2 * GROWTH),
        running=groups * width,
        budget=groups * width * (TOKENS + BLOCK_SIZE),
        prefix_caching=True,
    )
    ids = [[f"beam-{i}-{k}" for k in range(width)] for i in range(groups)]
    parents = {}
    for own in ids:
        parents |= dict(zip(own, [own[0], own[0], own[2], own[2]], strict=True))
    state = {"grown": GROWTH}

    def prepare() -> None:
        engine.update()
        state["grown"] += steps
        if state["grown"] > GROWTH:
            state["grown"] = steps
            engine.reset()
            for own, prompt in zip(ids, prompts(lengths), strict=True):
                engine.add(own[0], prompt, siblings=own[1:])
            for _ in range(2):
                engine.step()
                engine.update()

    return {
        "kvcore": Contender(
            "update(step(), tokens, parents=parents)",
            "_ in steps",
            {
                "step": engine.scheduler.step,
                "update": engine.scheduler.update,
                "tokens": engine.tokens[: groups * width],
                "parents": parents,
                "steps": range(steps),
            },
            operations=steps,
            prepare=prepare,
            verify=engine.manager.check,
        )
    }


def rows() -> Iterator[Row]:
    """All rows of this file."""
    for count in (256, 1_024):
        for prefix_caching in (False, True):
            sharing = "caching" if prefix_caching else "no caching"
            for build, what in ((planned, "step"), (whole, "step + update")):
                name = f"{what}, {count} decode, {sharing}"
                yield Row(name, partial(build, count, prefix_caching, False), STEADY[count])
                yield Row(f"{name}, beside others", partial(build, count, prefix_caching, True))
    yield Row("step that admits 8 x 1,024 cached", partial(admitting, 248), Target.ns(150_000))
    yield Row("the same + update, which publishes", partial(admitting, 248, "; engine.update()"))
    yield Row("preempt + resume 4,096, manager", recomputing_in_manager, Target.ns(20_000))
    yield Row("preempt + resume 4,096, 2 steps + updates", recomputing)
    yield Row("swap 256 blocks out + in, 3 steps + updates", swapping)
    yield Row("PredictedPeak.reserve, 1,024 running", predicting, Target.ns(100_000, 50_000))
    yield Row("step that keeps one out by it, 1,024 decode", kept_out)
    yield Row("256 decode + chunk of 256, step + update", partial(chunked, True))
    yield Row("256 decode 1 + 3 drafts, no caching", partial(drafted, False))
    yield Row("256 decode 1 + 3 drafts, caching", partial(drafted, True))
    yield Row("1 beam search of 4, step + update(parents)", partial(beams, 1))
    yield Row("64 beam searches of 4, step + update(parents)", partial(beams, 64))
