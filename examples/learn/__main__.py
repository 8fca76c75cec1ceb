"""A tiny model learns with TRL's GRPOTrainer through a rollout server: see docs/learning.md.

    make learn                                                        one seed, about 5 minutes on one core
    make learn SEEDS="0 1 2 3 4" MASKS="right late early ones"        what the picture shows

It starts the server in a process of its own, needs no network, and repeats exactly: equal seeds give equal tokens and weights.
"""

import argparse
import copy
import json
import os
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rollout_client import Client
from tiny_model import PAIRS, PHASES, QUICK, Pieces, expected_reward, warm_start
from train import MASKS, Settings, grpo, question
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "server/rollout_server/testing/tokenizer"


@contextmanager
def running_server() -> Iterator[str]:
    """Serve the agent in a process of its own, and yield the address."""
    agent = Path(__file__).with_name("adder.py")
    flags = ("--grpc-port", "0", "--http-port", "0", "--tokenizer", "toy=toy", "--json")
    # The server's environment is not this one: it must not see this one's packages.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLOUT_"))}
    command = [ROOT / ".venv/bin/rollout", "serve", agent, *flags]
    log = ROOT / "build/learn/server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        try:
            serving = server.stdout.readline()
            if not serving:
                raise SystemExit(f"the server did not start: see {log}")
            yield f"127.0.0.1:{json.loads(serving)['serving']['grpc_port']}"
        finally:
            server.terminate()


def rendered(address: str, tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the pieces of demonstrations. All but the numbers are rendered by the server, as it renders rollouts."""
    prompts, calls, results = {}, {}, {}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with Client(address) as client:
        for a, b in PAIRS:
            call = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
            later = [
                {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "1", "content": str(a + b)},
            ]
            first = client.render_prompt(messages=question(a, b), agent="adder", tokenizer="toy").ids
            second = client.render_prompt(messages=[*question(a, b), *later], agent="adder", tokenizer="toy").ids
            stop = second.index(end, len(first)) + 1
            prompts[a, b], calls[a, b], results[a, b] = first, second[len(first) : stop], second[stop:]
    numbers = {number: [*tokenizer.encode(str(number), add_special_tokens=False), end] for number in range(19)}
    return Pieces(prompts, calls, results, numbers, tokenizer.pad_token_id)


def main() -> None:
    """Run all seeds with all masks, and append one line of JSON per run to the file of results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--masks", choices=MASKS, nargs="+", default=["right"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--results", type=Path, default=ROOT / "build/learn/results.jsonl")
    parser.add_argument("--quick", action="store_true", help="a short warm start: for tests")
    given = parser.parse_args()
    torch.set_num_threads(1)  # faster for a model of this size, and its sums have one order
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    with running_server() as address, given.results.open("a") as results:
        pieces = rendered(address, tokenizer)
        for seed in given.seeds:
            print(f"seed {seed}: warm start", flush=True)
            model = warm_start(seed, len(tokenizer), pieces, QUICK if given.quick else PHASES)
            before = expected_reward(model, pieces)
            for mask in given.masks:
                print(f"seed {seed}, mask {mask}: expected reward before RL {before:.2f}", flush=True)
                began = time.monotonic()
                run = grpo(address, copy.deepcopy(model), tokenizer, Settings(seed, mask, given.steps), show_step)
                line = {"seed": seed, "mask": mask, "before": round(before, 4), **run}
                print(json.dumps(line | {"seconds": round(time.monotonic() - began)}), file=results, flush=True)
                print(f"seed {seed}, mask {mask}: {summary(run['reward'])}", flush=True)
                print(
                    f"{run['rows']} rows: every mask as the ledger's before it was moved, every row trained", flush=True
                )


def show_step(step: int, reward: float) -> None:
    """Print a line of the text curve."""
    print(f"step {step:3}  {reward:.2f}  {'#' * round(50 * reward)}", flush=True)


def summary(rewards: list[float]) -> str:
    """Return the mean reward of the first step and of the last ten."""
    last = rewards[-10:]
    return f"mean reward {rewards[0]:.2f} in the first step, {sum(last) / len(last):.2f} in the last ten"


main()
