"""REINFORCE on a table of logits: the mean reward rises from about 0.1 to 1.0 in a few seconds, without a GPU.

Run `python examples/reinforce.py`. The policy is ten logits, one for each digit. In every rollout it calls the calculator's `add`
tool and then samples a digit as its final answer; the reward is 1.0 if that digit is the sum.
"""

import asyncio
import math
import random

from rollout_client.trainer import Generated, Prompt, Trainer, parsers
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(f"{TOY_TOKENIZER}/tokenizer.json")
call = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call><|im_end|>').ids
answer, end, tool_result = (tokenizer.encode(text).ids for text in ("#### ", "<|im_end|>", "<tool_response>"))
logits = {tokenizer.token_to_id(str(digit)): 0.0 for digit in range(10)}


def policy():
    total = sum(map(math.exp, logits.values()))
    return {token: math.exp(logit) / total for token, logit in logits.items()}


def decode(ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


async def generate(prompt_ids, sampling):  # your inference engine
    if tool_result[0] not in prompt_ids:
        return Generated(call, [0.0] * len(call), "stop")
    [digit] = random.choices(list(logits), list(policy().values()))
    return Generated([*answer, digit, *end], [*[0.0] * len(answer), math.log(policy()[digit]), 0.0], "stop")


def learn(sample, advantage):  # your optimizer: gradient ascent on advantage * log p(token)
    for token, mask, logprob in zip(sample.response_ids, sample.response_mask, sample.logprobs, strict=True):
        if mask and logprob < 0:  # tool results and template tokens have mask 0
            for each, probability in policy().items():
                logits[each] += 0.1 * advantage * ((each == token) - probability)


async def main():
    settings = Settings(http=False, grpc_port=0, tokenizers={"toy": TOY_TOKENIZER})
    model = {"generate": generate, "decode": decode, "parse": parsers.hermes, "end_ids": end}
    question = Prompt([{"role": "user", "content": "What is 5 plus 3?"}], metadata={"ground_truth": "8"})
    async with Server([Calculator()], settings) as server, Trainer(f"localhost:{server.grpc_port}", **model) as trainer:
        for step in range(15):
            async for group in trainer.rollouts([question], n=64, tokenizer="toy"):
                judged = [each for each in group.rollouts if each.reward is not None]  # failed ones have none
                mean = sum(rollout.reward for rollout in judged) / max(len(judged), 1)
                print(f"step {step:2}: mean reward {mean:.2f}")
                for rollout in judged:
                    for sample in rollout.own:
                        learn(sample, rollout.reward - mean)


asyncio.run(main())
