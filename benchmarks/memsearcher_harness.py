"""MemSearcher as a harness: the agent of examples/openai_client.py, with requests of its own in place of a package.

python benchmarks/host.py --harness benchmarks/memsearcher_harness.py --slots 32 --trajectories 320
"""

from __future__ import annotations

import json
import re
from typing import Any

from memsearcher_jax.rl.harness_programs import HarnessClient
from memsearcher_jax.types import Problem

TURNS = 8
SYSTEM = {"role": "system", "content": r"Think, then search or answer in \boxed{}."}
THINK = {"role": "assistant", "content": "<think>"}


async def memsearcher_harness(problem: Problem, client: HarnessClient) -> str | None:
    """The answer to the problem's question, or None."""
    memory = ""
    for _ in range(TURNS):
        asked = _user("<question> ", problem.question, " </question>\n\n<memory> ", memory, " </memory>")
        reply = "<think>" + await _complete(client, [SYSTEM, asked, THINK], continue_final_message=True)
        said = reply.partition("</think>")[2]
        if box := re.search(r"\\boxed\{(.*?)\}", said):
            return box[1]
        call = re.search(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)
        if call is None:
            return None
        page = await _search(client, call[1])
        shown = _user("<tool_response>", call[1].strip(), "\n", page, "\n</tool_response>\nRewrite the <memory>.")
        rewrite = await _complete(client, [SYSTEM, asked, {"role": "assistant", "content": reply}, shown])
        kept = re.search(r"<memory>(.*?)</memory>", rewrite, re.DOTALL)
        if kept is None:
            return None
        memory = kept[1].strip()
    return None


def _user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


async def _complete(client: HarnessClient, messages: list[dict[str, Any]], **options: Any) -> str:
    body = {"model": client.model, "messages": messages, **options}
    completion = await _post(client, "chat/completions", body)
    return completion["choices"][0]["message"]["content"]


async def _search(client: HarnessClient, call: str) -> str:
    """The best page for the query of a call, or what is wrong with the call."""
    try:
        query = json.loads(call)["arguments"]["query"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    found = await _post(client, "search", {"query": query, "top_n": 1})
    return "\n\n".join(passage["contents"] for passage in found["passages"])


async def _post(client: HarnessClient, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    response = await client.http_client.post(f"{client.base_url}/{path}", headers=headers, json=body)
    return response.raise_for_status().json()
