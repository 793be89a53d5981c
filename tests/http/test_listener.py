"""The socket of the services."""

import asyncio
import http.client
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from memsearcher_jax.http.listener import listen


def test_a_kept_connection_is_answered_at_once():
    """Without TCP_NODELAY each response but the first waited 40 ms for an acknowledgement of its headers."""

    async def hello(request):
        return JSONResponse({"text": "x" * 1_000})

    config = uvicorn.Config(Starlette(routes=[Route("/", hello)]), lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        seconds = []
        for _ in range(9):
            began = time.monotonic()
            connection.request("GET", "/")
            assert len(connection.getresponse().read()) > 1_000
            seconds.append(time.monotonic() - began)
        connection.close()
        server.should_exit = True
        thread.join(10)
    assert min(seconds[1:]) < 0.03
