"""Programs that are started while gRPC is in use: neither they nor the connections of the server come to harm."""

from __future__ import annotations

import asyncio
import os
import sys

SCRIPT = """
import asyncio
from collections import Counter

import rollout_server
import grpc
import uvloop
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import rollout_service_pb2_grpc


class Service(rollout_service_pb2_grpc.RolloutServiceServicer):
    async def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse()


async def main():
    server = grpc.aio.server()
    rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    stub, over, codes = rollout_service_pb2_grpc.RolloutServiceStub(channel), asyncio.Event(), Counter()

    async def call():
        while not over.is_set():
            await stub.GetServerInfo(pb.GetServerInfoRequest())

    async def start():
        process = await asyncio.create_subprocess_exec("/bin/true", start_new_session=True)
        codes[await process.wait()] += 1

    calls = [asyncio.create_task(call()) for _ in range(4)]
    for _ in range(50):
        await asyncio.gather(*(start() for _ in range(4)))
    over.set()
    await asyncio.gather(*calls)
    await channel.close()
    await server.stop(0)
    print(dict(codes))


uvloop.run(main())
"""


async def test_a_program_that_is_started_during_calls() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, stdout=pipe, stderr=pipe, env=environment
    )
    output, errors = await process.communicate()
    assert (output.decode(), process.returncode) == ("{0: 200}\n", 0), errors.decode()[-2000:]
