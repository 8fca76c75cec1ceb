"""TRL: a rollout server as the `rollout_func` of a `GRPOTrainer`, and tools as its `environment_factory`.

with TrlRollouts("localhost:50051", agent="calculator", tokenizer="Qwen/Qwen3-8B", parse=parsers.hermes) as rollouts:
    GRPOTrainer(model=model, args=args, train_dataset=data, rollout_func=rollouts, reward_funcs=rollouts.reward).train()
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, Unpack, cast

from rollout_client._async.client import AsyncClient
from rollout_client.adapters.dataset_rows import Conversation, DatasetRows, dataset_message
from rollout_client.adapters.trl_tools import tool_environment
from rollout_client.export import TrlOutput, to_trl
from rollout_client.spec import Tokenizer
from rollout_client.trainer import Decode, Generated, Parse, Prompt, RolloutFields, SyncTrainer, TryAgainLater, Turn

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from rollout_client.trainer import Finished

__all__ = ["Sample", "TrlRollouts", "draw_key", "tool_environment"]

Sample: TypeAlias = Callable[[Sequence[Turn], "GRPOTrainer"], Sequence[Generated | Exception]]
"""Function `sample(turns, trainer)`: one result per turn, in order, such as those of an inference engine."""

_AT_ONCE: Final = 512
"""Maximum number of rollouts that run at the same time."""
_SEPARATOR: Final = ":"
"""Between the parts of a group's id. The first part is unique to its `TrlRollouts`; the others are the same in each run."""
_log = logging.getLogger(__name__)


class TrlRollouts:
    """A `rollout_func` for `GRPOTrainer` that runs the rollouts of a step on a server. It serves one GRPOTrainer.

    The server runs the agent, its tools and its reward. `rollouts.reward` is the function for `reward_funcs`. The trainer gets
    exactly one row per prompt, in order, with the mask as `env_mask`: the `primary` sample of each rollout. A rollout that failed
    has a row with mask 0 throughout and the reward None, which TRL leaves out of its group's mean.

    The columns of the dataset except `prompt` are the metadata of the rollouts. TRL passes only prompts, so rows are found by them.

    It connects at the first step. `close`, the end of a `with` block, and the end of the program disconnect.

    Args:
        server: address of the server, or an AsyncClient (for API key, TLS and retries) that nothing else uses.
        parse: function `parse(text)` that returns a `ParsedCompletion`, such as `parsers.hermes`.
        decode: function `decode(ids)` that returns the text of ids. Default: that of the trainer's tokenizer.
        sample: samples a batch of turns. Default: `rollout_client.adapters.sampling`, from the trainer's own model.
        metadata_of: function that returns the metadata of a prompt. Default: the other columns of its row in the dataset.
        generating: maximum number of turns in a batch.
        **fields: fields of the spec for all rollouts, as for `Trainer.rollouts`. `tokenizer` must be the trainer's, whose
            `chat_template_kwargs` are sent with it. `sampling` is merged over the temperature, `top_p` and `max_completion_length`
            of the trainer. The last one limits each completion, not the whole row; `limits` has limits of the rollout. `train_on`
            is [] by default, because TRL can score a rollout that failed only with None.
    """

    def __init__(
        self,
        server: str | AsyncClient,
        *,
        parse: Parse,
        decode: Decode | None = None,
        sample: Sample | None = None,
        metadata_of: Callable[[Conversation], Mapping[str, Any] | None] | None = None,
        generating: int = 256,
        **fields: Unpack[RolloutFields],
    ) -> None:
        self._server = server
        self._parse = parse
        self._decode = decode
        self._sample = sample
        self._metadata_of = metadata_of
        self._generating = generating
        self._sampling = dict(cast(Mapping[str, Any], fields.pop("sampling", None) or {}))
        self._fields: RolloutFields = {"train_on": [], **fields}
        self._run = uuid.uuid4().hex[:12]
        self._calls: tuple[str, int] = ("", 0)
        self._rows: dict[str, DatasetRows] = {}
        self._trainer: GRPOTrainer | None = None
        self._link: SyncTrainer | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all running rollouts and disconnect. It can be called again."""
        link, self._link = self._link, None
        if link is not None:
            link.__exit__(None, None, None)

    @staticmethod
    def reward(prompts: object, completions: object, **columns: Any) -> list[float | None]:
        """Return the rewards that the agent gave. None: the rollout failed, or the agent gave no reward."""
        return list(columns["rollout_reward"])

    def __call__(self, prompts: Sequence[Conversation], trainer: GRPOTrainer) -> TrlOutput:
        """Run one rollout per prompt and return the rows. `GRPOTrainer` calls it in each generation step.

        Raises:
            ValueError: the prompts are texts or not whole groups, their metadata are ambiguous, or the trainer has an option that
                the rows cannot serve. The text says what to change.
            RuntimeError: every rollout of a training step failed. It has the text of the first one.
            RolloutError: the server is unreachable or refuses a rollout.
            RecordMismatch: a sample differs from the tokens that were generated.
        """
        link = self._connected(trainer)
        mode = "train" if trainer.model.training else "eval"
        if any(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(
                "the prompts are texts, which TRL gives to the model as they are, and which the server would put into a chat "
                'template; make them messages: [{"role": "user", "content": text}]'
            )
        size = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        groups = whole_groups(prompts, size)
        metadata_of = self._metadata_of or self._rows_of(mode, trainer).columns
        name = _SEPARATOR.join((self._run, self._step(mode, trainer)))
        given = [
            Prompt(
                [dataset_message(each) for each in prompt],
                group_id=f"{name}{_SEPARATOR}{number}",
                metadata=metadata_of(prompt),
            )
            for number, prompt in enumerate(groups)
        ]
        found = link.rollouts(given, n=size, at_once=max(size, _AT_ONCE), in_order=True, **self._fields_of(trainer))
        rollouts = [each for group in found for each in group.rollouts]
        error, self._error = self._error, None
        if error is not None:
            raise error
        _report(rollouts, name, training=mode == "train")
        return to_trl(rollouts, end_id=trainer.eos_token_ids[0])

    def _rows_of(self, mode: str, trainer: GRPOTrainer) -> DatasetRows:
        if mode not in self._rows:
            name = f"{mode}_dataset"
            given = getattr(trainer, name)
            datasets = list(given.values()) if isinstance(given, dict) else [given]
            self._rows[mode] = DatasetRows(datasets, name, "pass TrlRollouts(metadata_of=...)")
        return self._rows[mode]

    def _fields_of(self, trainer: GRPOTrainer) -> RolloutFields:
        sampling: dict[str, Any] = {
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "max_tokens": trainer.max_completion_length,
            "logprobs": True,
        }
        tokenizer = _tokenizer(self._fields.get("tokenizer"), trainer.chat_template_kwargs)
        return cast(RolloutFields, {**self._fields, "tokenizer": tokenizer, "sampling": sampling | self._sampling})

    def _connected(self, trainer: GRPOTrainer) -> SyncTrainer:
        if self._trainer is not None and self._trainer is not trainer:
            raise RuntimeError("a TrlRollouts serves one GRPOTrainer; create another one for this trainer")
        if self._link is None:
            _check_options(trainer)
            if self._sample is None:
                _check_sampling(trainer, self._sampling)
            tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
            decode = self._decode or (lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
            link = SyncTrainer(
                self._server,
                generate_batch=self._generate_batch,
                decode=decode,
                parse=self._parse,
                end_ids=trainer.eos_token_ids,
                generating=self._generating,
                remembered=max(2 * _AT_ONCE, trainer.num_generations, trainer.num_generations_eval),
            )
            self._link = link.__enter__()
            self._trainer = trainer
        return self._link

    def _step(self, mode: str, trainer: GRPOTrainer) -> str:
        """Return a name of this call that is the same in each run: several calls of a mode may belong to one training step."""
        step = _SEPARATOR.join((mode, str(trainer.state.global_step), str(trainer.accelerator.process_index)))
        self._calls = (step, self._calls[1] + 1 if self._calls[0] == step else 0)
        return _SEPARATOR.join((step, str(self._calls[1])))

    def _generate_batch(self, turns: Sequence[Turn]) -> Sequence[Generated | Exception]:
        """Sample turns in the same order in each run, because their order in the batch may change a model's rounding."""
        trainer = cast("GRPOTrainer", self._trainer)
        order = sorted(range(len(turns)), key=lambda at: _sort_key(turns[at]))
        try:
            results = (self._sample or _sample_from_model)([turns[at] for at in order], trainer)
            found = dict(zip(order, (_versioned(each, trainer.state.global_step) for each in results), strict=True))
        except TryAgainLater:
            raise
        except Exception as error:
            self._error = error  # the rollouts fail; then the step raises it, rather than train without them
            raise
        return [found[at] for at in range(len(turns))]


def whole_groups(prompts: Sequence[Conversation], size: int) -> list[Conversation]:
    """Return the prompt of each group of `size` equal prompts. Raises ValueError if they do not come in such groups."""
    wrong = next(
        (at for at in range(0, len(prompts), size) if list(prompts[at : at + size]) != [prompts[at]] * size), None
    )
    if wrong is not None:
        raise ValueError(
            f"prompts {wrong} to {wrong + size - 1} of {len(prompts)} are not {size} times the same prompt, so the groups are "
            "not whole in this process; make per_device_train_batch_size * steps_per_generation (in evaluation "
            "per_device_eval_batch_size) a multiple of num_generations (num_generations_eval)"
        )
    return list(prompts[::size])


def _versioned(result: Generated | Exception, step: int) -> Generated | Exception:
    if isinstance(result, Generated) and not result.policy_version and result.policy_step is None:
        return replace(result, policy_version=str(step), policy_step=step)
    return result


def _tokenizer(given: Any, template_kwargs: Mapping[str, Any]) -> Any:
    """Return the tokenizer of the spec with the trainer's arguments of the chat template."""
    if not template_kwargs:
        return given
    if isinstance(given, str):
        return Tokenizer(given, template_kwargs=template_kwargs)
    if isinstance(given, Tokenizer) and given.template_kwargs in (None, template_kwargs):
        return replace(given, template_kwargs=template_kwargs)
    raise ValueError(
        "chat_template_kwargs of the trainer and the tokenizer of TrlRollouts differ; the server renders, so give these "
        "arguments once: TrlRollouts(tokenizer=Tokenizer(name, template_kwargs=...)), and no chat_template_kwargs"
    )


def _report(rollouts: Sequence[Finished], name: str, *, training: bool) -> None:
    """Log how many rollouts did not complete. Raises RuntimeError if all rollouts of a training step failed."""
    lost = [each for each in rollouts if each.end != "stop"]
    if not lost:
        return
    counts = ", ".join(f"{kind} {count}" for kind, count in Counter(each.failure_class for each in lost).most_common())
    first = next((each for each in lost if each.end == "failure"), lost[0])
    text = f"{len(lost)} of {len(rollouts)} rollouts did not complete ({counts}); rollout {first.uid!r}: {first.error or first.end}"
    if training and all(each.end == "failure" for each in rollouts):
        raise RuntimeError(text)
    _log.warning("step %s: %s", name, text)


def _check_options(trainer: GRPOTrainer) -> None:
    """Raise ValueError for an option that the rows cannot serve."""
    if trainer.tools:
        raise ValueError(
            "GRPOTrainer(tools=...) ignores the mask of a rollout_func; give the tools to the server's agent"
        )


def _sort_key(turn: Turn) -> tuple[object, ...]:
    """Return a key that puts the turns of a step in the same order in each run."""
    number = turn.group_id.rpartition(_SEPARATOR)[2]
    return (int(number) if number.isdecimal() else 0, turn.index, turn.segment_id, turn.turn)


def draw_key(turn: Turn, seed: int) -> str:
    """Return a text that identifies a turn of a `TrlRollouts`: the same in each run with this seed, and unique in the run."""
    where = turn.group_id.partition(_SEPARATOR)[2]
    return f"{seed}/{where}/{turn.index}/{turn.segment_id}/{turn.turn}"


def _check_sampling(trainer: GRPOTrainer, sampling: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of the trainer, or a parameter in `sampling`, that `_sample_from_model` cannot serve."""
    unset = {"top_k": (None, 0), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0), "use_vllm": (False,)}
    names = [name for name, values in unset.items() if getattr(trainer, name) not in values]
    if trainer.args.generation_kwargs:
        names.append("generation_kwargs")
    names += [f"sampling[{name!r}]" for name in ("stop", "extra") if sampling.get(name)]
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        names.append("FSDP or DeepSpeed")
    if names:
        raise ValueError(f"the built-in sampler does not support {names[0]}; pass TrlRollouts(sample=...)")


def _sample_from_model(turns: Sequence[Turn], trainer: GRPOTrainer) -> Sequence[Generated | Exception]:
    """Sample a batch of turns from the trainer's model as it is. Returns one result per turn, in order; see `sample_batch`."""
    from rollout_client.adapters.sampling import sample_batch  # imports torch

    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return sample_batch(
        trainer.accelerator.unwrap_model(trainer.model),
        turns,
        [draw_key(turn, trainer.args.seed) for turn in turns],
        end_ids=trainer.eos_token_ids,
        pad_id=tokenizer.pad_token_id,
        max_tokens=trainer.max_completion_length,
    )
