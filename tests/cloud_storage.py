"""A Cloud Storage emulator with the features that tensorstore needs: object generations and conditional writes."""

import contextlib
import json
import re
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound

OBJECT_PATH = re.compile(r"/(?:upload/)?storage/v1/b/([^/]+)/o(?:/(.+))?")
MOVE = re.compile(r"/storage/v1/b/[^/]+/o/(.+)/moveTo/o/(.+)")  # with which gcsfs renames


class Handler(server.RequestHandler):
    """https://cloud.google.com/storage/docs/request-preconditions"""

    def handle(self):
        with contextlib.suppress(ConnectionError):  # a client may leave before it has read a response
            super().handle()

    def do_POST(self):
        if move := MOVE.fullmatch(urlsplit(self.path).path):
            self._move(unquote(move[1]), unquote(move[2]))
            return
        query = parse_qs(urlsplit(self.path).query)
        expected, (_, name) = query.get("ifGenerationMatch"), self._object()
        if expected and self._generation(name or query["name"][0]) != expected[0]:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(HTTPStatus.PRECONDITION_FAILED)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super().do_POST()

    def end_headers(self):
        bucket, name = self._object()
        if self.command == "GET" and bucket and name:
            self.send_header("x-goog-generation", self._generation(name))
        super().end_headers()

    def _move(self, old, new):
        try:
            stored = self.storage.get_file_obj("bucket", old) | {"name": new, "id": f"bucket/{new}"}
        except NotFound:  # a prefix: gcsfs tries to move the folders, too
            self._respond(HTTPStatus.NOT_FOUND, {"error": {"code": 404, "message": f"no object {old}"}})
            return
        self.storage.create_file("bucket", new, self.storage.get_file("bucket", old), stored)
        self.storage.delete_file("bucket", old)
        self._respond(HTTPStatus.OK, stored)

    def _respond(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _object(self):
        match = OBJECT_PATH.fullmatch(urlsplit(self.path).path)
        return (match[1], unquote(match[2] or "")) if match else ("", "")

    def _generation(self, name):
        """The generation of an object; "0" if it does not exist, as in request preconditions."""
        try:
            return self.storage.get_file_obj("bucket", name)["generation"]
        except NotFound:
            return "0"


def start(port):
    """Starts a server with an empty bucket named `bucket`."""
    server.RequestHandler = Handler
    emulator = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    emulator.start()
    return emulator
