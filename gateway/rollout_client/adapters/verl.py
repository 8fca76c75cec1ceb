"""verl 0.9: an agent loop whose rollouts run on a rollout server, while verl's engines generate the completions.

    - name: rollout_server
      _target_: rollout_client.adapters.verl.RolloutServerLoop
      server: rollouts.internal:50051
      agent: calculator

Such an entry belongs into the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import operator
import pkgutil
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from rollout_client._async.client import AsyncClient
from rollout_client.adapters.dataset_messages import dataset_message
from rollout_client.connection import Tls
from rollout_client.errors import RolloutFailed
from rollout_client.export.verl import to_verl
from rollout_client.retry import DEFAULT_RETRY, Retry
from rollout_client.samples import TrainingSample
from rollout_client.spec import Tokenizer
from rollout_client.trainer import parsers
from rollout_client.trainer.completion import Parse
from rollout_client.trainer.generation import Generated, TryAgainLater, Turn
from rollout_client.trainer.results import Finished, Prompt
from rollout_client.trainer.trainer import Trainer

_LOG: Final = logging.getLogger("rollout_client")
_RUN_KEY: Final = "verl_run"
"""Key in the extra sampling parameters of a rollout. Its value says to which call of `run` a turn belongs."""
_OWN: Final = {"server", "parse", "end_ids", "at_once", "api_key", "tls", "retry"}
_INSTEAD: Final = {
    "agent": "the argument agent",
    "tokenizer": "the arguments tokenizer_name and data.apply_chat_template_kwargs",
    "sampling.temperature": "actor_rollout_ref.rollout.temperature",
    "sampling.top_p": "actor_rollout_ref.rollout.top_p",
    "sampling.logprobs": "actor_rollout_ref.rollout.calculate_log_probs",
}
"""Fields that `fields` may not have, and what sets them."""


@dataclass(frozen=True)
class _Options:
    """What a connection depends on. Loops with equal options share one. See `RolloutServerLoop`."""

    tokenizer: Any = field(repr=False)
    parse: str
    end_ids: Collection[int]
    server: str
    api_key: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    retry: Retry = DEFAULT_RETRY
    at_once: int = 1024


class RolloutServerLoop(AgentLoopBase):  # type: ignore[misc]
    """Agent loop of verl that runs one rollout on a rollout server. verl creates one for each trajectory.

    The server applies the chat template, runs the agent and its tools, and gives the reward; `server_manager` generates. All loops
    of a process and event loop share one connection, which is closed with the event loop.

    Args:
        *args: passed on to verl.
        agent: name of the agent. None: the server's default agent.
        tokenizer_name: tokenizer of the server. None: `actor_rollout_ref.model.path`.
        fields: further fields of the rollouts, as for `Trainer.rollouts`, such as `limits` and `labels`. Those that verl or another
            argument sets are refused: the temperature, for example.
        **options: the options below. The others are passed on to verl; a name that verl does not know is logged.
        server: address of the server; required.
        parse: parser of tool calls: the name of one in `rollout_client.trainer.parsers`, which is applied after the reasoning, or
            "package.module:function". Default: `rollout.multi_turn.format`.
        end_ids: stop token ids. Default: that of verl's tokenizer.
        at_once: maximum number of rollouts that run at the same time in this process; further ones wait. Default: 1024.
        api_key: API key of the server, such as `${oc.env:ROLLOUT_API_KEY}`.
        tls: TLS settings, such as `{_target_: rollout_client.Tls, ca: ca.pem}`. Default: no TLS.
        retry: how long a server that is unreachable or at capacity is retried: a `rollout_client.Retry`.

    Raises TypeError and ValueError that name the argument.
    """

    def __init__(
        self,
        *args: Any,
        agent: str | None = None,
        tokenizer_name: str | None = None,
        fields: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        own = {name: options.pop(name) for name in _OWN & options.keys()}
        super().__init__(*args, **options)
        for name in options.keys() - inspect.signature(AgentLoopBase.__init__).parameters.keys() - {"name", "tools"}:
            _warn_once(f"RolloutServerLoop: the argument {name!r} is unknown and has no effect")
        rollout = self.rollout_config
        self.prompt_length, self.response_length = int(rollout.prompt_length), int(rollout.response_length)
        longest = self.prompt_length + self.response_length
        self.sequence_length = min(longest, rollout.get("max_model_len") or longest)
        self.end_ids = frozenset(own.pop("end_ids", None) or [self.tokenizer.eos_token_id])
        own.setdefault("parse", rollout.multi_turn.format)
        self._options = _Options(self.tokenizer, end_ids=self.end_ids, **own)
        tokenizer = tokenizer_name or self.config.actor_rollout_ref.model.path
        switches = _plain(self.apply_chat_template_kwargs) or None
        self._fields = {
            **_checked(_plain(fields) or {}),
            "agent": agent,
            "tokenizer": Tokenizer(tokenizer, template_kwargs=switches),
        }
        self._turns = _turn_limit(rollout.multi_turn)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one rollout.

        Args:
            sampling_params: sampling parameters with verl's keys, such as temperature, top_p, top_k and logprobs.
            **row: columns of the dataset. `raw_prompt` is the prompt, `uid` the id of the group. The metadata for the agent are the
                entries of `extra_info`, and as "ground_truth" the one of `reward_model`.

        Returns:
            In verl's v1 trainer one output per trainable sample; none if no token trains. In the older trainer, which takes one per
            rollout, the sample with the most trained tokens.

        Raises:
            RolloutFailed: the rollout failed or was cancelled. Its cause is the exception of verl's engine, if there was one.
            RolloutError: the server is unreachable, refuses the rollout, or lost it.
            RecordMismatch: a sample differs from the generated tokens.
            ValueError, TypeError: the prompt cannot be sent, or the rollout does not fit into rows of verl.
        """
        several = "session_id" in row  # v1 numbers the rollouts of a prompt
        prompt, connection, run_id = _prompt(row), _connection(self._options), uuid.uuid4().hex
        trainer = await asyncio.shield(connection.trainer)
        run = connection.runs[run_id] = _Run(self, sampling_params, int(row.get("priority") or 0))
        groups = trainer.rollouts([prompt], n=1, at_once=1, **self._spec(sampling_params, run_id))
        try:
            async with connection.slots, contextlib.aclosing(groups):
                (finished,) = (await anext(groups)).rollouts
        finally:
            del connection.runs[run_id]
        try:
            finished.raise_for_failure()
        except RolloutFailed as error:
            raise error from run.error if error.failure_class == "trainer" else None
        samples = list(finished.samples) if several else [_only_sample(finished, self.prompt_length)]
        self._check(samples, logprobs=bool(sampling_params.get("logprobs")))
        outputs = [run.output(sample, row) for sample in samples]
        return outputs if several else outputs[0]

    def _spec(self, sampling: Mapping[str, Any], run_id: str) -> dict[str, Any]:
        """Return the fields of the rollout. verl's budgets are sent as limits, so that nothing has to be cut."""
        own, limits = self._fields.get("sampling") or {}, self._fields.get("limits") or {}
        named = {name: sampling[name] for name in ("temperature", "top_p", "logprobs") if name in sampling}
        extra = {**(own.get("extra") or {}), _RUN_KEY: run_id}
        return {
            **self._fields,
            "sampling": {"max_tokens": self.response_length, **own, **named, "extra": extra},
            "limits": {"generated_tokens": self.response_length, "turns": self._turns, **limits},
        }

    def _check(self, samples: Sequence[TrainingSample], *, logprobs: bool) -> None:
        """Raise ValueError if verl would cut the samples of a rollout or give them other rewards."""
        for each in samples:
            prompt, response = len(each.prompt_ids), len(each.response_ids)
            if response > self.response_length or prompt + response > self.sequence_length:
                raise ValueError(
                    f"rollout {each.uid}, segment {each.segment_id}: {prompt} prompt and {response} response tokens exceed "
                    f"rollout.prompt_length={self.prompt_length} and response_length={self.response_length}"
                )
        if len({each.reward for each in samples}) > 1:
            raise ValueError(
                f"rollout {samples[0].uid}: its samples have different rewards, and verl gives all that of the last one; "
                'use the reward rule "copy" or "split" in the agent'
            )
        missing = [each.logprobs is None for each in samples]
        if any(missing) and (logprobs or not all(missing)):
            raise ValueError(f"rollout {samples[0].uid}: a completion has no logprobs; the engine must return them")


@dataclass
class _Run:
    """One call of `run`: what its turns need, and what they leave for its rows.

    Args:
        loop: the agent loop.
        sampling: verl's sampling parameters.
        priority: verl's priority of the row, for engines that have priorities.
        prompts: length of the first prompt of each segment, in tokens.
        newest: newest policy step of each turn.
        experts: routed experts of each segment, up to its last turn: [tokens, layers, top k].
        preempted: how often the engine preempted the turns; -1: unknown.
        error: the exception that ended the last turn.
    """

    loop: RolloutServerLoop
    sampling: Mapping[str, Any]
    priority: int
    prompts: dict[str, int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    preempted: int = -1
    error: Exception | None = None

    async def generate(self, turn: Turn, extra: Mapping[str, Any]) -> Generated:
        """Generate a turn with verl's engine. `extra` are the agent's further sampling parameters."""
        try:
            return await self._generate(turn, extra)
        except TryAgainLater:
            raise
        except Exception as error:
            self.error = error
            raise

    async def _generate(self, turn: Turn, extra: Mapping[str, Any]) -> Generated:
        if turn.images:
            raise ValueError(f"turn {turn.turn} has images; RolloutServerLoop sends only token ids")
        given, limit = turn.sampling, self._room(turn)
        limit = min(limit, given.max_tokens or limit)
        changed = {"temperature": given.temperature, "top_p": given.top_p, "stop": list(given.stop) or None}
        output = await self.loop.server_manager.generate(
            request_id=turn.uid,  # the same for all turns: the engine that has the prefix in its cache gets them
            prompt_ids=list(turn.ids),
            sampling_params={
                **self.sampling,
                **extra,
                **{name: value for name, value in changed.items() if value is not None},
                "max_tokens": limit,
            },
            **({"priority": self.priority} if self.priority else {}),
        )
        ids, reason = list(output.token_ids), output.stop_reason
        if reason in ("abort", "aborted"):
            if not ids:  # the engine accepts no requests while its weights change
                raise TryAgainLater(1)
            # The server asks for the rest of an aborted completion, and with a full room there is none.
            reason = "abort" if len(ids) < limit else "length"
        elif reason not in ("stop", "length"):  # the server of vLLM reports "completed" for both
            reason = "length" if len(ids) >= limit and ids[-1] not in self.loop.end_ids else "stop"
        if output.num_preempted is not None:
            self.preempted = max(self.preempted, 0) + output.num_preempted
        if output.routed_experts is not None:
            self.experts[turn.segment_id] = output.routed_experts
        step = output.extra_fields.get("global_steps")
        low, high = (output.extra_fields.get(f"{end}_global_steps", step) for end in ("min", "max"))
        if low is not None and high is not None:
            low, self.newest[turn.turn] = operator.index(low), operator.index(high)
        # A client of verl that resumes by itself returns tokens of several policies: none of them is older than the lowest.
        return Generated(ids, output.log_probs, reason, "" if low is None else str(low), low)

    def _room(self, turn: Turn) -> int:
        """Return how many tokens a completion may have. Raise ValueError if none."""
        loop, length = self.loop, len(turn.ids)
        start = self.prompts.setdefault(turn.segment_id, length)
        if turn.turn == 1 and length > loop.prompt_length:
            raise ValueError(
                f"the prompt has {length} tokens, more than rollout.prompt_length={loop.prompt_length}; raise it, or shorten "
                "the prompt or the descriptions of the tools"
            )
        room = min(loop.response_length - (length - start), loop.sequence_length - length)
        if room < 1:
            raise ValueError(
                f"turn {turn.turn} has no room for a completion: segment {turn.segment_id} has {start} prompt tokens and "
                f"{length - start} tokens after them, with rollout.prompt_length={loop.prompt_length} and "
                f"response_length={loop.response_length}; raise response_length, or shorten the results of the tools"
            )
        return room

    def output(self, sample: TrainingSample, row: Mapping[str, Any]) -> AgentLoopOutput:
        """Return verl's output for a sample. `row` are the columns of the dataset."""
        fields: dict[str, Any] = {**to_verl(sample)}
        fields["metrics"] = {**fields["metrics"], "num_preempted": self.preempted}
        trained = {span.turn for span in sample.spans or () if span.trains}
        newest = [step for turn, step in self.newest.items() if turn in trained]
        if newest:
            fields["extra_fields"]["max_global_steps"] = max(newest)
        if sample.reward is not None:
            # verl makes a column of each name, beside those of the dataset, and has one named "reward" itself.
            taken = {"reward", *row}
            scores = {f"rollout_{name}" if name in taken else name: each for name, each in sample.scores.items()}
            fields["extra_fields"]["reward_extra_info"] = scores
        experts = self.experts.get(sample.segment_id)
        if experts is not None:
            fields["routed_experts"] = experts[: len(sample.prompt_ids) + len(sample.response_ids)]
        return AgentLoopOutput(**fields)


class _Connection:
    """What the loops of a process and event loop share: a trainer, its slots, and the calls of `run` by their ids.

    A task holds the trainer open until it is cancelled, as `asyncio.run` does before it closes the event loop.
    """

    def __init__(self, options: _Options) -> None:
        self.runs: dict[str, _Run] = {}
        self.slots = asyncio.Semaphore(options.at_once)
        self.trainer: asyncio.Future[Trainer] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(options))

    async def _hold(self, options: _Options) -> None:
        decode = functools.partial(
            options.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        try:
            async with (
                AsyncClient(options.server, api_key=options.api_key, tls=options.tls, retry=options.retry) as client,
                Trainer(
                    client,
                    generate=self._generate,
                    decode=lambda ids: decode(list(ids)),
                    parse=_parser(options.parse),
                    end_ids=options.end_ids,
                    generating=options.at_once,
                    remembered=options.at_once,
                ) as trainer,
            ):
                self.trainer.set_result(trainer)
                await asyncio.Event().wait()
        except Exception as error:
            if self.trainer.done():
                raise
            self.trainer.set_exception(error)
        finally:
            del _CONNECTIONS[asyncio.get_running_loop(), options]

    async def _generate(self, turn: Turn) -> Generated:
        extra = json.loads(turn.sampling.extra_json)
        return await self.runs[extra.pop(_RUN_KEY)].generate(turn, extra)


_CONNECTIONS: Final[dict[tuple[asyncio.AbstractEventLoop, _Options], _Connection]] = {}


def _connection(options: _Options) -> _Connection:
    """Return the connection of this event loop with these options. Opens it if there is none."""
    key = asyncio.get_running_loop(), options
    if key not in _CONNECTIONS:
        _CONNECTIONS[key] = _Connection(options)
    return _CONNECTIONS[key]


def _checked(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `fields` of the YAML entry. Raises ValueError if it has a field that something else sets."""
    for name, instead in _INSTEAD.items():
        group, _, key = name.rpartition(".")
        if key in ((fields.get(group) or {}) if group else fields):
            raise ValueError(f"fields: {name!r} would have no effect; use {instead} instead")
    return fields


def _turn_limit(multi_turn: Any) -> int | None:
    """Return the limit of completions that verl's own loop of tools has, for `multi_turn` of its configuration; None: none."""
    most, between = multi_turn.max_assistant_turns, multi_turn.max_user_turns
    return min((each for each in (most, between and between + 1) if each), default=None)


def _parser(name: str) -> Parse:
    """Return a parser by its name. Raises ValueError, ImportError and AttributeError that name it."""
    if ":" in name:
        return cast(Parse, pkgutil.resolve_name(name))
    if name not in parsers.__all__ or name == "thinking":
        known = ", ".join(each for each in parsers.__all__ if each != "thinking")
        raise ValueError(
            f'parse: there is no parser {name!r}; use one of {known}, or a function as "package.module:function"'
        )
    return parsers.thinking(getattr(parsers, name))


def _prompt(row: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a row, with the metadata for the agent."""
    metadata = {**(_plain(row.get("extra_info")) or {})}
    model = _plain(row.get("reward_model")) or {}
    if model.get("ground_truth") is not None:
        metadata.setdefault("ground_truth", model["ground_truth"])
    messages = [_message(index, each) for index, each in enumerate(row["raw_prompt"])]
    return Prompt(messages, str(row.get("uid") or ""), metadata)


def _message(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as it is sent. Refuses media by name."""
    message = dataset_message(_plain(given))
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if part.get("type") != "text":
            raise ValueError(
                f"raw_prompt[{index}] has a part of type {part.get('type')!r}; RolloutServerLoop sends only text: the server "
                "renders token ids of text"
            )
    return message


def _plain(value: Any) -> Any:
    """Convert values of OmegaConf and numpy to those of JSON."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _only_sample(finished: Finished, prompt_length: int) -> TrainingSample:
    """Return the sample of a rollout for verl's older trainer: the one with the most trained tokens whose prompt fits.

    A rollout without a trainable sample has a row of mask 0, with its reward: the trainer has no other way to leave it out.
    Raises ValueError if no prompt fits or no sample exists.
    """
    samples = finished.samples or [replace(each, reward=finished.reward) for each in finished.untrainable]
    fitting = [each for each in samples if len(each.prompt_ids) <= prompt_length]
    if len(samples) > 1:
        _warn_once(
            "verl's older trainer trains on one sample of each rollout; the v1 trainer (trainer.use_v1) takes all of them"
        )
    if not fitting:
        longest = max((len(each.prompt_ids) for each in samples), default=0)
        raise ValueError(
            f"rollout {finished.uid} has no row for verl's older trainer: "
            + (
                f"its prompts exceed rollout.prompt_length={prompt_length}: {longest} tokens"
                if samples
                else "nothing was generated"
            )
        )
    return max(fitting, key=lambda each: sum(each.response_mask))


@functools.cache
def _warn_once(text: str) -> None:
    _LOG.warning(text)
