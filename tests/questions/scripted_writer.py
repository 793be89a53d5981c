"""A service with OpenAI's chat completions that writes and answers questions by rules, for tests."""

import contextlib
import json
import re
import threading
import time

from tests.http_server import QuietHandler, serving_http

RELATIONS = "was built by|was born in|lies on"
FACT = re.compile(rf"^(?P<name>[A-Z]\w+) (?P<relation>{RELATIONS}) (?P<object>[A-Z]\w+)\.", re.MULTILINE)


class ScriptedWriter:
    """Writes what `write` returns for the passages, and answers from a passage that states the fact.

    `requests` are the (system, user) messages. `known` answers are given without a passage. `delay` returns the seconds
    before the reply to a user message.
    """

    def __init__(self):
        self.requests = []
        self.known = {}
        self.write = self.chain_question
        self.delay = lambda user: 0.0
        self.status = 200
        self.lock = threading.Lock()

    def chain_question(self, passages):
        """One question along the facts: "What does the builder of Kestrel's ... "."""
        facts = [FACT.search(text) for text in passages]
        path = " then ".join(fact["relation"] for fact in facts)
        return {"question": f"Starting from {facts[0]['name']}, what {path}?", "answer": facts[-1]["object"]}

    def reply(self, system, user):
        if system.startswith("You write questions"):
            passages = re.findall(r"Title: .*\n((?:.|\n)*?)(?=\n\nTitle: |\n\nWrite one question)", user)
            written = self.write(passages)
            return written if isinstance(written, str) else json.dumps(written)
        passage, _, question = user.rpartition("\n\nQuestion: ")
        if not passage:
            return self.known.get(user, "unknown")
        name = re.search(r"Starting from (\w+)", question)
        relations = re.findall(RELATIONS, question)
        fact = FACT.search(passage)
        stated = fact and name and (fact["name"], [fact["relation"]]) == (name[1], relations)
        return fact["object"] if stated else "unknown"


@contextlib.contextmanager
def running_writer():
    """(the writer, the address for --writer.url)"""
    writer = ScriptedWriter()

    class Handler(QuietHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            contents = {message["role"]: message["content"] for message in body["messages"]}
            with writer.lock:
                writer.requests.append((contents.get("system", ""), contents["user"]))
                text = writer.reply(contents.get("system", ""), contents["user"])
            time.sleep(writer.delay(contents["user"]))
            usage = {"prompt_tokens": 10, "completion_tokens": 2}
            answer = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}
            content = json.dumps(answer).encode()
            self.send_response(writer.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with serving_http(Handler) as address:
        yield writer, f"{address}/v1"
