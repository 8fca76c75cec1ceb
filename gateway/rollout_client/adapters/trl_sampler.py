"""The trainer's own model as the sampler of `TrlRollouts`: its order of turns, its draws, and the options that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rollout_client.trainer import Generated, Turn

if TYPE_CHECKING:
    from trl import GRPOTrainer

SEPARATOR: Final = ":"
"""Between the parts of a group's id. The first part is unique to its `TrlRollouts`; the others are the same in each run."""


def sort_key(turn: Turn) -> tuple[object, ...]:
    """Return a key that puts the turns of a step in the same order in each run."""
    number = turn.group_id.rpartition(SEPARATOR)[2]
    return (int(number) if number.isdecimal() else 0, turn.index, turn.segment_id, turn.turn)


def draw_key(turn: Turn, seed: int) -> str:
    """Return a text that identifies a turn of a `TrlRollouts`: the same in each run with this seed, and unique in the run."""
    where = turn.group_id.partition(SEPARATOR)[2]
    return f"{seed}/{where}/{turn.index}/{turn.segment_id}/{turn.turn}"


def check_sampling(trainer: GRPOTrainer, sampling: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of the trainer, or a parameter in `sampling`, that `sample_from_model` cannot serve."""
    unset = {"top_k": (None, 0), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0), "use_vllm": (False,)}
    names = [name for name, values in unset.items() if getattr(trainer, name) not in values]
    if trainer.args.generation_kwargs:
        names.append("generation_kwargs")
    names += [f"sampling[{name!r}]" for name in ("stop", "extra") if sampling.get(name)]
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        names.append("FSDP or DeepSpeed")
    if names:
        raise ValueError(f"the built-in sampler does not support {names[0]}; pass TrlRollouts(sample=...)")


def sample_from_model(turns: Sequence[Turn], trainer: GRPOTrainer) -> Sequence[Generated | Exception]:
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
