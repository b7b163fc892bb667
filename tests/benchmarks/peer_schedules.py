"""How other regeneration drivers schedule requests, described faithfully and run with this project's own HTTP client.

DESCRIPTIONS of published scheduling, not the packages themselves (their own HTTP costs are left out, in their favour).
SpecForge `regenerate_train_data.py`: servers in a fixed rotation; a full list of the server whose turn it is blocks all
(it spins over `done()`; here it sleeps a millisecond); finished answers are harvested only on that server's turn.
Automodel `regenerate.py`: a shard of 300 rows at a time, a barrier behind each, at most 100 connections.
"""

import asyncio
from collections.abc import Sequence

from tasks.client.chat import ChatClient, ChatRequest
from tasks.records import Server

SHARD, CONNECTIONS = 300, 100


async def specforge(servers: Sequence[Server], requests: Sequence[ChatRequest], slots: int) -> None:
    clients = [await ChatClient(server, slots).__aenter__() for server in servers]
    lists: list[list[asyncio.Task[object]]] = [[] for _ in servers]
    turn = 0
    for request in requests:
        mine = lists[turn]
        while len(mine) >= slots:
            lists[turn] = mine = [task for task in mine if not task.done()]
            if len(mine) >= slots:
                await asyncio.sleep(0.001)
        mine.append(asyncio.create_task(clients[turn].send(request, 3600)))
        turn = (turn + 1) % len(servers)
    for tasks in lists:
        await asyncio.gather(*tasks)
    for client in clients:
        await client.__aexit__(None, None, None)


async def automodel(servers: Sequence[Server], requests: Sequence[ChatRequest], slots: int) -> None:
    clients = [await ChatClient(server, slots).__aenter__() for server in servers]
    gate = asyncio.Semaphore(min(CONNECTIONS, slots * len(servers)))

    async def one(index: int, request: ChatRequest) -> None:
        async with gate:
            await clients[index % len(clients)].send(request, 3600)

    for at in range(0, len(requests), SHARD):
        await asyncio.gather(*(one(at + i, request) for i, request in enumerate(requests[at : at + SHARD])))
    for client in clients:
        await client.__aexit__(None, None, None)
