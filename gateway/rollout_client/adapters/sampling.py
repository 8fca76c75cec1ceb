"""Sampling from a model of transformers in the trainer's own process: batched, with a KV cache, repeatable. Imports torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rollout_client.trainer import Generated, Turn

_MOST: Final = 1.0


@dataclass(slots=True)
class _Row:
    """A turn that is being generated."""

    turn: Turn
    budget: int
    draws: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def sample_batch(
    model: Any,
    turns: Sequence[Turn],
    keys: Sequence[str],
    *,
    end_ids: Collection[int],
    pad_id: int,
    max_tokens: int,
) -> list[Generated | Exception]:
    """Generate one completion per turn with the model as it is: no vLLM, no copy of the weights.

    A completion ends with the first id of `end_ids`, or at `max_tokens` of its turn with the finish reason "length". Each token is
    drawn with a random number of a generator of its own, seeded with the turn's key. So a run with the same keys, batches and
    weights repeats exactly on the same machine.

    The logprobs are those of the model's distribution at the turn's temperature (at 1 if that is 0). They are over the whole
    vocabulary also if `top_p` is below 1, because trainers compute theirs so.

    Args:
        model: a causal language model of transformers. It is in evaluation mode meanwhile.
        turns: the turns.
        keys: one text per turn, unique in the run.
        end_ids: ids of stop tokens.
        pad_id: id of the padding token; any id will do, because padding is masked.
        max_tokens: the limit of turns that have none.

    Returns:
        One result per turn, in the same order: a ValueError for a turn that cannot be generated here, because of an image, texts
        that end it, further parameters, or a prompt that is too long for the model.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    found: list[_Row | Exception] = [
        _row(turn, key, max_tokens, positions) for turn, key in zip(turns, keys, strict=True)
    ]
    rows = [each for each in found if isinstance(each, _Row)]
    if rows:
        training = model.training
        model.eval()  # no dropout, and gradient checkpointing would switch the cache off
        try:
            with torch.no_grad():
                _generate(model, rows, frozenset(end_ids), pad_id)
        finally:
            model.train(training)
    return [_generated(each, end_ids) if isinstance(each, _Row) else each for each in found]


def _row(turn: Turn, key: str, max_tokens: int, positions: int | None) -> _Row | Exception:
    """Return the row of a turn, or why it cannot be generated here."""
    sampling = turn.sampling
    unknown = {"images": turn.images, "sampling.stop": sampling.stop, "sampling.extra_json": sampling.extra_json}
    for name, value in unknown.items():
        if value:
            return ValueError(f"the turn has {name}, which the built-in sampler does not support; pass sample=")
    budget = sampling.max_tokens or max_tokens
    if positions is not None:
        budget = min(budget, positions - len(turn.ids))
    if budget < 1:
        return ValueError(f"the prompt has {len(turn.ids)} tokens, and the model has {positions} positions")
    return _Row(turn, budget, random.Random(key))  # noqa: S311 - draws of tokens


def _generate(model: Any, rows: Sequence[_Row], end_ids: Collection[int], pad_id: int) -> None:
    """Generate all rows together, left-padded, until each has ended."""
    device = model.device
    width = max(len(row.turn.ids) for row in rows)
    padded = [[pad_id] * (width - len(row.turn.ids)) + list(row.turn.ids) for row in rows]
    ids = torch.tensor(padded, device=device)
    begins = torch.tensor([[width - len(row.turn.ids)] for row in rows], device=device)
    mask = (torch.arange(width, device=device) >= begins).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    temperatures = _column([row.turn.sampling.temperature for row in rows], device)
    masses = _column([row.turn.sampling.top_p for row in rows], device)
    last = (getattr(model.config, "max_position_embeddings", None) or sys.maxsize) - 1
    cache, running = None, list(enumerate(rows))
    while running:
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        numbers = _column([row.draws.random() for row in rows], device)
        ids, logprobs = _draw(output.logits[:, -1], temperatures, masses, numbers)
        drawn, given = ids.squeeze(-1).tolist(), logprobs.squeeze(-1).tolist()
        for at, row in running:
            row.ids.append(drawn[at])
            row.logprobs.append(given[at])
        running = [each for each in running if each[1].ids[-1] not in end_ids and len(each[1].ids) < each[1].budget]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], -1)
        positions = (positions[:, -1:] + 1).clamp(max=last)  # a row that has ended runs on beside longer ones


def _column(values: Sequence[float | None], device: Any) -> torch.Tensor:
    """Return values of rows as a float64 column, or float32 where the device has no more; None is 1."""
    kind = torch.float32 if device.type == "mps" else torch.float64
    return torch.tensor([[_MOST if each is None else each] for each in values], dtype=kind, device=device)


def _draw(
    logits: torch.Tensor, temperatures: torch.Tensor, masses: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row.

    Args:
        logits: rows x vocabulary.
        temperatures, masses: rows x 1; temperature 0 takes the most probable id. A mass is `top_p`.
        numbers: rows x 1, uniform in [0, 1).

    Returns:
        ids and their logprobs at the temperature, each rows x 1.
    """
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits.float() / temperatures.masked_fill(greedy, _MOST).float(), -1)
    probabilities = logprobs.to(numbers.dtype).exp()
    if bool((masses < _MOST).any()):
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        before[:, 0] = -_MOST  # the most probable id is always kept
        kept = torch.zeros_like(probabilities).scatter(-1, order, ordered * (before < masses))
        probabilities = torch.where(masses < _MOST, kept, probabilities)
    # In the order of the vocabulary, so that the draw of a row does not depend on the other rows' parameters.
    sums = probabilities.cumsum(-1)
    ids = torch.searchsorted(sums, numbers * sums[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    ids = torch.where(greedy, logprobs.argmax(-1, keepdim=True), ids)
    return ids, logprobs.gather(-1, ids)


def _generated(row: _Row, end_ids: Collection[int]) -> Generated:
    return Generated(row.ids, row.logprobs, "stop" if row.ids[-1] in end_ids else "length")
