"""verl 0.9: an agent loop whose rollouts run on a rollout server, while verl's engines generate the completions.

    - name: rollout_server
      _target_: rollout_client.adapters.verl.RolloutServerLoop
      server: rollouts.internal:50051
      agent: calculator

Such an entry belongs in the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from rollout_client._async.client import AsyncClient
from rollout_client.adapters.dataset_rows import dataset_message, json_value
from rollout_client.adapters.shared_trainer import GenerateTurn, shared_trainer
from rollout_client.adapters.verl_engine import EngineRun, Lengths
from rollout_client.connection import Tls
from rollout_client.errors import RolloutFailed
from rollout_client.retry import DEFAULT_RETRY, Retry
from rollout_client.samples import TrainingSample
from rollout_client.spec import Tokenizer
from rollout_client.trainer.parsers import parser_by_name
from rollout_client.trainer.results import Finished, Prompt
from rollout_client.trainer.trainer import Trainer

_LOG: Final = logging.getLogger("rollout_client")
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
        self._lengths = Lengths.of(rollout)
        end_ids = frozenset(own.pop("end_ids", None) or [self.tokenizer.eos_token_id])
        own.setdefault("parse", rollout.multi_turn.format)
        self._options = _Options(self.tokenizer, end_ids=end_ids, **own)
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
            rollout, the sample with the most trained tokens. Samples of further models have no output.

        Raises:
            RolloutFailed: the rollout failed or was cancelled. Its cause is the exception of verl's engine, if there was one.
            RolloutError: the server is unreachable, refuses the rollout, or lost it.
            RecordMismatch: a sample differs from the generated tokens.
            ValueError, TypeError: the prompt cannot be sent, or the rollout does not fit into rows of verl.
        """
        several = "session_id" in row  # v1 numbers the rollouts of a prompt
        prompt, options = _prompt(row), self._options
        trainer = shared_trainer(options, functools.partial(_connect, options), options.at_once)
        priority = int(row.get("priority") or 0)
        run = EngineRun(self.server_manager, self._lengths, options.end_ids, sampling_params, priority)
        finished = await trainer.run(prompt, run.generate, **self._spec(sampling_params))
        try:
            finished.raise_for_failure()
        except RolloutFailed as error:
            raise error from run.error if error.failure_class == "trainer" else None
        samples = list(finished.own) if several else [_only_sample(finished, self._lengths.prompt)]
        self._check(samples, logprobs=bool(sampling_params.get("logprobs")))
        outputs = [run.output(sample, row) for sample in samples]
        return outputs if several else outputs[0]

    def _spec(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the rollout. verl's budgets are sent as limits, so that nothing has to be cut."""
        own, limits = self._fields.get("sampling") or {}, self._fields.get("limits") or {}
        named = {name: sampling[name] for name in ("temperature", "top_p", "logprobs") if name in sampling}
        return {
            **self._fields,
            "sampling": {"max_tokens": self._lengths.response, **own, **named},
            "limits": {"generated_tokens": self._lengths.response, "turns": self._turns, **limits},
        }

    def _check(self, samples: Sequence[TrainingSample], *, logprobs: bool) -> None:
        """Raise ValueError if verl would cut the samples of a rollout or give them other rewards."""
        for each in samples:
            prompt, response = len(each.prompt_ids), len(each.response_ids)
            if response > self._lengths.response or prompt + response > self._lengths.sequence:
                raise ValueError(
                    f"rollout {each.uid}, segment {each.segment_id}: {prompt} prompt and {response} response tokens exceed "
                    f"rollout.prompt_length={self._lengths.prompt} and response_length={self._lengths.response}"
                )
        if len({each.reward for each in samples}) > 1:
            raise ValueError(
                f"rollout {samples[0].uid}: its samples have different rewards, and verl gives all that of the last one; "
                'use the reward rule "copy" or "split" in the agent'
            )
        missing = [each.logprobs is None for each in samples]
        if any(missing) and (logprobs or not all(missing)):
            raise ValueError(f"rollout {samples[0].uid}: a completion has no logprobs; the engine must return them")


@contextlib.asynccontextmanager
async def _connect(options: _Options, generate: GenerateTurn) -> AsyncIterator[Trainer]:
    """Open the connection that loops with these options share."""
    decode = functools.partial(options.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    async with (
        AsyncClient(options.server, api_key=options.api_key, tls=options.tls, retry=options.retry) as client,
        Trainer(
            client,
            generate=generate,
            decode=lambda ids: decode(list(ids)),
            parse=parser_by_name(options.parse),
            end_ids=options.end_ids,
            generating=options.at_once,
            remembered=options.at_once,
        ) as trainer,
    ):
        yield trainer


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
    return json_value(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)


def _only_sample(finished: Finished, prompt_length: int) -> TrainingSample:
    """Return the sample of a rollout for verl's older trainer: the one with the most trained tokens whose prompt fits.

    A rollout without a trainable sample has a row of mask 0, with its reward: the trainer has no other way to leave it out.
    Raises ValueError if no prompt fits or no sample exists.
    """
    untrainable = [replace(each, reward=finished.reward) for each in finished.own_untrainable]
    samples = finished.own or untrainable
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
