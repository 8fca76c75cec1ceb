"""Run rollouts through the real renderer, in both modes, and judge its environment tokens between completions."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from rollout_server.core.ledger import pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed

from tests.hostile.templates import conversations, grammar
from tests.hostile.templates.conversations import TOOLS, Conversation, Turn
from tests.hostile.templates.framing import FRAMINGS
from tests.hostile.templates.grammar import Template
from tests.hostile.templates.oracle import Exact, Oracle, Refused, Split, Truth, Undecidable
from tests.hostile.templates.vocabulary import PAD, single

DATE = datetime(2026, 2, 3, 14, 5)
PATHS = ("append", "predict")
_EACH = 6  # conversations per template
_T = TypeVar("_T")


class Verdict(Enum):
    """The renderer's result at a boundary, compared with the truth."""

    RIGHT = "right"
    DECLINED = "declined"  # it reports that it cannot decide, although there is a truth
    REFUSED = "refused"  # the template refuses, and so does the renderer
    UNDECIDABLE = "undecidable"  # there is no truth, and the renderer returns none
    CLAIMED = "claimed"  # there is no truth, but the renderer returns the end of the full rendering
    DIFFERENT = "different"  # incorrect ids, returned as correct
    FOREIGN = "foreign"  # there is no truth, and the full rendering does not end with the returned ids
    WENT_ON = "went on"  # the template refuses, the renderer does not
    COUNT = "count"  # the length for a mask is not the growth of the full rendering


SILENT = frozenset({Verdict.DIFFERENT, Verdict.FOREIGN, Verdict.WENT_ON, Verdict.COUNT})


class Renders(Protocol):
    """The methods of the renderer that are judged."""

    async def predict(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """Render the whole conversation."""

    async def append(self, messages: Sequence[Message], last: Answered | None, last_messages: int) -> Rendered:
        """Render only the text after the completion."""


@dataclass(frozen=True, slots=True)
class Case:
    """A reproducible case: a template and a conversation."""

    template: Template
    conversation: Conversation

    @property
    def tools(self) -> Sequence[Any]:
        """The tools of the rollout."""
        return TOOLS if self.conversation.tools else ()

    def oracle(self, date: datetime = DATE, path: str = "predict") -> Oracle:
        """The oracle for this template. On the path `append` results get names if the template needs them."""
        named = path == "append" and self.template.needs_names
        return Oracle(self.template, list(self.tools) or None, date, named=named)


Opens = Callable[[Case, LoadedTokenizer], Renders]
"""Creates the renderer of a rollout."""


def open_renderer(case: Case, loaded: LoadedTokenizer) -> Renders:
    """Create the real renderer."""
    return Renderer(loaded, case.tools, {}, date=DATE)


@dataclass(frozen=True, slots=True)
class Difference:
    """A fault at turn `turn` of a case (0: in its prompt) on one path, with the expected and the actual text."""

    case: Case
    path: str
    turn: int
    verdict: Verdict
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary, and the verdict on each path."""

    traits: tuple[tuple[str, str], ...]
    verdicts: tuple[tuple[str, Verdict], ...]


@dataclass(slots=True)
class Played:
    """Boundaries and differences of the rollouts that were run."""

    boundaries: list[Boundary] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def add(self, other: Played) -> None:
        """Add the results of another run."""
        self.boundaries += other.boundaries
        self.differences += other.differences


class Inline(Executor):
    """An executor that runs work in the calling thread, so that the fuzzer needs no threads."""

    def submit(self, work: Callable[..., _T], /, *arguments: Any, **named: Any) -> Future[_T]:
        """Run the work and return a finished future."""
        future: Future[_T] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)
        return future


def play_numbered(seed: int, number: int) -> Played:
    """Run template `number` of a seed."""
    return play(list(cases(seed, number)))


def cases(seed: int, number: int, each: int = _EACH) -> Iterator[Case]:
    """The conversations for template `number` of a seed."""
    rng = random.Random(f"{seed}:{number}")
    template = grammar.generate(rng)
    for _ in range(each):
        yield Case(template, conversations.generate(rng))


@lru_cache(maxsize=4)
def load(template: Template) -> LoadedTokenizer:
    """Load the template as the server does."""
    tokenizer = copy.copy(template.vocabulary)
    tokenizer.chat_template = template.text
    ends = template.ends if template.traits.config == "known" else ()
    return LoadedTokenizer("fuzzed", tokenizer, Inline(), list(single(tokenizer, ends).values()))


def play(all_of_them: Sequence[Case], opens: Opens = open_renderer) -> Played:
    """Run cases of one template."""
    loaded = load(all_of_them[0].template)
    played = Played()
    for case in all_of_them:
        played.add(asyncio.run(_Game(case, loaded, opens).play()))
    return played


class _Game:
    """One rollout, on all paths."""

    def __init__(self, case: Case, loaded: LoadedTokenizer, opens: Opens) -> None:
        self._case, self._loaded = case, loaded
        self._oracle = case.oracle()
        self._oracles = {path: case.oracle(path=path) for path in PATHS}
        self._renderers = {path: opens(case, loaded) for path in PATHS}
        self._texts: list[str] = []
        self._lengths = 0  # tokens of the previous prompt
        self._played = Played()

    async def play(self) -> Played:
        """Run turn by turn, until the template refuses or the renderer fails."""
        if self._loaded.probed.refusal:
            return self._played  # the server does not load such a template
        self._texts = [self._case.conversation.spelled(message) for message in self._case.conversation.prompt]
        if await self._prompt():
            for number, turn in enumerate(self._case.conversation.turns, 1):
                if not await self._turn(number, turn):
                    break
        return self._played

    async def _prompt(self) -> bool:
        expected = None
        for path, oracle in self._oracles.items():
            try:
                expected = oracle.prompt(self._texts)
            except Refused:
                expected = None
            self._lengths = len(expected or ())
            got = await self._ask(path, None, 0)
            if got is not None and expected is None:
                self._differs(path, 0, Verdict.WENT_ON, "a refusal", got.shown(self._oracle))
            elif got is not None and got.ids != expected:
                self._differs(path, 0, Verdict.DIFFERENT, self._oracle.decode(expected or ()), got.shown(self._oracle))
        return expected is not None

    async def _turn(self, number: int, turn: Turn) -> bool:
        asked = len(self._texts)
        ids, finish = self._generated(turn, asked)
        spelled = self._case.conversation.spelled
        self._texts += [spelled(turn.answer), *map(spelled, turn.environment)]
        last = Answered(number, Message.parse(self._texts[asked]), finish, None if ids is None else pack_tokens(ids))
        verdicts, accepted = [], False
        for path in PATHS:
            split, truth, longer = self._judge(path, asked, ids, finish)
            accepted |= split is not None
            got = await self._ask(path, last, asked)
            verdict = self._verdict(got, split, truth, longer)
            verdicts.append((path, verdict))
            if verdict in SILENT:
                self._differs(
                    path,
                    number,
                    verdict,
                    self._shown(split, truth, longer),
                    "" if got is None else got.shown(self._oracle),
                )
        traits = (*self._case.template.traits.items(), ("ending", turn.ending))
        self._played.boundaries.append(Boundary(tuple(traits), tuple(verdicts)))
        return accepted

    def _judge(
        self, path: str, asked: int, ids: Sequence[int] | None, finish: str
    ) -> tuple[Split | None, Truth | None, int | None]:
        """The rendering, the text after the completion, and the growth of the rendering; None for missing values."""
        try:
            split = self._oracles[path].split(self._texts, asked)
        except Refused:
            return None, None, None
        length = len(self._oracle.encode(split.full))
        longer = None if ids is None else length - self._lengths - len(ids)
        self._lengths = length if path == "predict" else self._lengths
        return (
            split,
            self._oracle.truth(split, ids, cut=finish == "length", message=json.loads(self._texts[asked])),
            longer,
        )

    def _verdict(self, got: _Got | None, split: Split | None, truth: Truth | None, longer: int | None) -> Verdict:
        if split is None or truth is None:
            return Verdict.REFUSED if got is None else Verdict.WENT_ON
        if got is not None and got.counts and got.mask_length != longer:
            return Verdict.COUNT
        nothing = Verdict.UNDECIDABLE if isinstance(truth, Undecidable) else Verdict.DECLINED
        if got is None:
            return nothing
        if not got.exact:
            return nothing if self._ends(split, got.ids) else Verdict.FOREIGN
        if isinstance(truth, Exact):
            return Verdict.RIGHT if got.ids == truth.ids else Verdict.DIFFERENT
        return Verdict.CLAIMED if self._ends(split, got.environment) else Verdict.FOREIGN

    def _ends(self, split: Split, ids: Sequence[int]) -> bool:
        whole = self._oracle.encode(split.full)
        return whole[len(whole) - len(ids) :] == tuple(ids) or split.full.endswith(self._oracle.decode(ids))

    def _shown(self, split: Split | None, truth: Truth | None, longer: int | None) -> str:
        if split is None:
            return "a refusal"
        known = self._oracle.decode(truth.ids) if isinstance(truth, Exact) else f"the end of {split.full!r}"
        return f"{known} ({longer} tokens longer)"

    async def _ask(self, path: str, last: Answered | None, asked: int) -> _Got | None:
        """The renderer's prediction; None if it fails."""
        messages = [Message.parse(text) for text in self._texts]
        renderer = self._renderers[path]
        try:
            rendered = await getattr(renderer, path)(messages, last, asked)
        except RolloutFailed:
            return None
        return _Got.of(rendered, counts=path == "predict" and last is not None)

    def _generated(self, turn: Turn, asked: int) -> tuple[list[int] | None, str]:
        """The ids of a completion, and its finish reason."""
        calls = bool(turn.answer.get("tool_calls"))
        finish = "tool_calls" if calls else "stop"
        if turn.ending == "no_ids":
            return None, finish
        if turn.ending == "nothing":
            return [], finish
        body, template = list(self._body(turn, asked)), self._case.template
        if turn.ending == "unclosed":
            text, closing = self._oracle.decode(body), self._closing(turn, asked)
            end = len(text.removesuffix(closing).rstrip())
            return list(self._oracle.encode(text[: end + int((len(text) - end + 1) * turn.kept)])), "length"
        if turn.ending == "cut":
            return body[: int(len(body) * turn.kept)], "length"
        stop = template.stops[calls] or template.words.eos
        behind = {"eos": template.words.eos, "other_special": PAD}.get(turn.ending, stop)
        if turn.ending in ("more", "space"):
            after = FRAMINGS[template.traits.framing].after if turn.ending == "more" else "\n"
            closed = "" if not any(template.stops) else behind
            return [*body, *self._oracle.encode(closed), *self._oracle.encode(after)], finish
        return body + (
            [] if turn.ending == "stripped" else list(single(template.vocabulary, [behind]).values())
        ), finish

    def _body(self, turn: Turn, asked: int) -> Sequence[int]:
        if turn.free:
            rng = random.Random(f"{turn.kept}")
            plain = min(single(self._case.template.vocabulary, self._case.template.words.every).values())
            return [rng.randrange(plain) for _ in range(rng.randrange(12))]
        text = self._split(turn, asked).answer
        return self._oracle.encode(str(turn.answer.get("content") or "") if text is None else text)

    def _closing(self, turn: Turn, asked: int) -> str:
        return "" if turn.free else self._split(turn, asked).closing

    def _split(self, turn: Turn, asked: int) -> Split:
        """The rendering of the completion as the last message."""
        try:
            messages = [*self._texts, self._case.conversation.spelled(turn.answer)]
            return self._oracles["append"].split(messages, asked, generation_prompt=False)
        except Refused:
            return Split("")

    def _differs(self, path: str, turn: int, verdict: Verdict, expected: str, got: str) -> None:
        self._played.differences.append(Difference(self._case, path, turn, verdict, expected, got))


@dataclass(frozen=True, slots=True)
class _Got:
    """The renderer's prediction: closing and environment together."""

    ids: tuple[int, ...]
    environment: tuple[int, ...] = ()
    exact: bool = True
    mask_length: int | None = None
    counts: bool = False

    @classmethod
    def of(cls, rendered: Rendered, *, counts: bool) -> _Got:
        environment = tuple(rendered.predicted.environment)
        ids = (*rendered.predicted.closing, *environment)
        return cls(ids, environment, rendered.exact, rendered.mask_length, counts)

    def shown(self, oracle: Oracle) -> str:
        """Format it as text."""
        return f"{oracle.decode(self.ids)} ({self.mask_length} tokens longer)"
