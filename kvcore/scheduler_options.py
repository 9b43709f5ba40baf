"""The options of a scheduler, checked together."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcore.arguments import at_least

__all__ = ["SchedulerOptions"]


class SchedulerOptions(NamedTuple):
    """What ``Scheduler`` was given besides policies; its docstring says what each means."""

    max_running: int | None
    wait_for_prefix: bool
    token_budget: int | None
    max_partial_prefills: int
    draft_tokens: int
    window: int | None
    sink_tokens: int
    in_flight: int

    @property
    def ahead(self) -> int:
        """Tokens by which a decoding sequence may be ahead of what is settled."""
        return (self.in_flight + 1) * (1 + self.draft_tokens)

    @classmethod
    def checked(cls, **given: Any) -> SchedulerOptions:
        """Options in range that go together, or an error that names one and its value."""
        least = {"max_running": 1, "token_budget": 1, "max_partial_prefills": 1, "window": 1}
        for name, value in given.items():
            if value is not None and name != "wait_for_prefix":
                given[name] = at_least(value, least.get(name, 0), name)
        budget = given["token_budget"]
        if budget is None:
            for name in ("draft_tokens", "window", "in_flight"):
                if given[name]:
                    raise ValueError(f"{name} needs a token_budget, got {given[name]} without")
            return cls(**given)
        each = 1 + given["draft_tokens"]
        if given["max_running"] is None:
            given["max_running"] = budget // each
        if not each <= given["max_running"] * each <= budget:
            raise ValueError(
                f"token_budget is {budget}, too little for {max(given['max_running'], 1)} "
                f"running sequences of {each} tokens a step"
            )
        if given["draft_tokens"] and given["in_flight"]:
            raise ValueError(
                f"draft_tokens is {given['draft_tokens']} with in_flight {given['in_flight']}: "
                "the next step cannot be planned before it is known which drafts were accepted"
            )
        return cls(**given)
