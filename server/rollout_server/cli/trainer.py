"""`rollout trainer`: the strict trainer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Annotated

import typer

from rollout_server.cli.complain import complaining


def trainer(
    port: Annotated[int, typer.Option(envvar="MOCK_TRAINER_PORT", help="HTTP port; 0: any.")] = 9001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of a tokenizer; none: the built-in one.")] = None,
    tools_from: Annotated[
        str | None, typer.Option(help="Base URL of the gateway whose tools the trainer renders.")
    ] = "http://127.0.0.1:9000",
    api_key: Annotated[
        str | None, typer.Option(envvar="MOCK_TRAINER_API_KEY", help="Demand this bearer token.")
    ] = None,
) -> None:
    """Play a trainer that counts every token itself and refuses a wrong mask, with a scripted model."""
    with contextlib.suppress(KeyboardInterrupt), complaining("trainer"):
        asyncio.run(_trainer(host, port, tokenizer, tools_from, api_key))


async def _trainer(host: str, port: int, tokenizer: Path | None, tools_from: str | None, api_key: str | None) -> None:
    from rollout_server.testing.tokenizer import TOY_TOKENIZER
    from rollout_server.testing.trainer import StrictTrainer

    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").exists():
        raise ValueError(f"there is no tokenizer in {tokenizer}: it has no tokenizer_config.json")
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    strict = StrictTrainer(tokenizer or TOY_TOKENIZER, host=host, port=port, tools_from=tools_from, api_key=api_key)
    async with strict:
        typer.echo(f"strict trainer on {strict.url}; verdicts under /verdicts", err=True)
        await stopped.wait()
