"""The emulator of Cloud Storage with what tensorstore needs beside: generations of objects and conditional writes."""

import re
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound

PLACE = re.compile(r"/(?:upload/)?storage/v1/b/([^/]+)/o(?:/(.+))?")


class Handler(server.RequestHandler):
    """https://cloud.google.com/storage/docs/request-preconditions"""

    def do_POST(self):
        query = parse_qs(urlsplit(self.path).query)
        expected, (_, name) = query.get("ifGenerationMatch"), self._place()
        if expected and self._generation(name or query["name"][0]) != expected[0]:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(HTTPStatus.PRECONDITION_FAILED)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super().do_POST()

    def end_headers(self):
        bucket, name = self._place()
        if self.command == "GET" and bucket and name:
            self.send_header("x-goog-generation", self._generation(name))
        super().end_headers()

    def _place(self):
        found = PLACE.fullmatch(urlsplit(self.path).path)
        return (found[1], unquote(found[2] or "")) if found else ("", "")

    def _generation(self, name):
        """0, where there is no such object, is what a condition calls it."""
        try:
            return self.storage.get_file_obj("bucket", name)["generation"]
        except NotFound:
            return "0"


def start(port):
    """A server with one empty bucket called `bucket`."""
    server.RequestHandler = Handler
    started = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    started.start()
    return started
