"""Skeleton of a training loop around a rollout server. It trains nothing: the model is a stub, and the optimizer prints.

Start `rollout serve --tokenizer toy=toy`, and then run
`python examples/training_loop.py localhost:50051 toy server/rollout_server/testing/tokenizer/tokenizer.json`
"""

import asyncio
import sys
from collections.abc import Sequence

from rollout_client.trainer import Generated, Prompt, SamplingParams, Trainer, parsers
from tokenizers import Tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'


async def main(server: str, tokenizer_name: str, tokenizer_file: str) -> None:
    """Run two training steps with two groups of four rollouts each."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    (end,) = tokenizer.encode("<|im_end|>").ids
    version = 0

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    async def generate(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:  # your engine goes here
        text = "It is 8.\n#### 8" if "<tool_response>" in decode(prompt_ids) else CALL
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, end]
        return Generated(ids, [-0.5] * len(ids), "stop", f"policy-{version}")

    question = [{"role": "user", "content": "What is 5 plus 3?"}]
    async with Trainer(server, generate=generate, decode=decode, parse=parsers.hermes, end_ids={end}) as trainer:
        for version in range(2):
            prompts = [Prompt(question, metadata={"ground_truth": "8"})] * 2
            async for group in trainer.rollouts(prompts, n=4, tokenizer=tokenizer_name, limits={"turns": 4}):
                judged = [each for each in group.rollouts if each.reward is not None]  # failed ones have no reward
                mean = sum(each.reward for each in judged) / max(len(judged), 1)
                for rollout in judged:
                    for sample in rollout.own:  # your optimizer goes here
                        trained = sum(sample.response_mask)
                        print(
                            f"policy-{version}: advantage {rollout.reward - mean:+.1f} for {trained} of {len(sample.response_ids)}"
                        )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
