"""Invented conversations in LongMemEval's layout, read, remembered, answered and judged."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.conversations import TYPES, layout
from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.data.synthetic.streams import SyntheticStreamConfig, make_stories
from memsearcher_jax.launch import evaluate
from memsearcher_jax.runtime.run_dir import located

CONFIG = SyntheticStreamConfig(seed=7, train_chunks=3, statements=2, filler=1, questions=4)


@pytest.fixture
def file(tmp_path):
    entries = [layout(story, number) for number, story in enumerate(make_stories(CONFIG, 4))]
    (tmp_path / "made.json").write_text(json.dumps(entries))
    return tmp_path / "made.json"


def test_the_layout_is_that_of_longmemeval(file):
    problems = read_problems(file)
    assert [len(problem.stream.chunks) for problem in problems] == [3] * 4
    for problem in problems:
        (question,) = problem.stream.questions
        assert question.kind in TYPES.values() and len(question.evidence) == 1
        assert question.answer in question.evidence[0]
        assert any(question.evidence[0] in chunk for chunk in problem.stream.chunks)


@pytest.mark.slow
def test_an_evaluation_is_judged_by_a_service(file, tmp_path, capsys):
    asked = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            user = body["messages"][-1]["content"]
            asked.append(user)
            data = json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    judge = f"--judge.backend openai --judge.url http://127.0.0.1:{server.server_port} --judge.model any"
    room = "--agent.question_tokens 48 --memalpha.chunk_tokens 120 --sampling.context_tokens 448 --training.seq_len 448"
    weights = f"--config tiny_memalpha --checkpoint {located('package:tiny_memalpha')} --data {file}"
    evaluate.main([*f"{weights} {judge} {room}".split(), "--out", str(tmp_path / "out")])
    server.shutdown()
    result = json.loads((tmp_path / "out" / "results.json").read_text())["evaluation"]["benchmarks"]["longmemeval"]
    assert result["scores"]["accuracy"]["mean"] == 1.0 and 0 <= result["scores"]["evidence_recall"]["mean"] <= 1
    assert sum(one["streams"] for one in result["types"].values()) == 4
    assert sum(user.startswith("Question: The date is ") for user in asked) == 4
    output = capsys.readouterr().out
    assert all(kind in output for kind in result["types"])
