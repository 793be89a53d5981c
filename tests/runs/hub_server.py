"""A Hugging Face Hub on loopback, with the HTTP interface that huggingface_hub uses to read repositories."""

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tests.http_server import QuietHandler, serving_http

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/.*)?)?")
FILE = re.compile(r"(/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """Repositories "models/OWNER/NAME" and "datasets/OWNER/NAME": for each revision a commit, for each commit files."""

    address: str = ""
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Commits files to a repository; returns the commit."""
        commit = hashlib.sha1(json.dumps([repo, *sorted(map(repr, files.items()))]).encode()).hexdigest()
        self.revisions.setdefault(repo, {}).update({revision: commit, commit: commit})
        self.files[repo, commit] = files
        return commit


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        api, file = API.fullmatch(path), FILE.fullmatch(path)
        if not (api or file):
            return self.send(404, b"{}", {})
        repo = f"{api[1]}/{api[2]}" if api else f"{'datasets' if file[1] else 'models'}/{file[2]}"
        if repo not in self.hub.revisions:
            return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = self.hub.revisions[repo].get((api[4] or "main") if api else file[3])
        if commit is None:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.files[repo, commit]
        if api and api[3] != "tree":
            siblings = [{"rfilename": name} for name in files]
            return self.send_json({"id": api[2], "sha": commit, "siblings": siblings, "private": False, "tags": []})
        if api:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self.send_json(entries)
        if repo in self.hub.gated:
            return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if file[4] not in files:
            return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        data = files[file[4]]
        self.send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def send_json(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status, body, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running_hub():
    hub = Hub()
    with serving_http(type("Bound", (Handler,), {"hub": hub})) as hub.address:
        yield hub
