"""An HTTP server in a thread, and waiting for a server or a page, for tests."""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Logs no request."""

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server with this handler."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def until(condition, seconds=30.0):
    """Waits for a state of a server or a page."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the expected state was not reached"
        time.sleep(0.01)
