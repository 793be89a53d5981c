"""An agent with a memory in plain Python and the openai package, trained as it is.

    pip install -e '.[serve,harness]'
    python launch/tpu_train.py --config tiny --agent.harness examples/openai_client.py

Every turn begins a conversation, so every turn is a context of its own; the answer earns the reward for all of them.
The words are those of the packaged templates `terse`, which the weights of `tiny` know. Texts of questions, memories
and pages are parts of their own, so that each is encoded alike wherever it stands.
"""

import json
import re

from openai import AsyncOpenAI

SYSTEM = {"role": "system", "content": r"Think, then search or answer in \boxed{}."}
THINK = {"role": "assistant", "content": "<think>"}


def user(*texts):
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


async def openai_client(problem, client, turns=8):
    """The answer to the problem's question, or None."""
    memory = ""
    http = client.http_client
    openai = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0, http_client=http)
    key = {"Authorization": f"Bearer {client.api_key}"}
    for _ in range(turns):
        asked = user("<question> ", problem.question, " </question>\n\n<memory> ", memory, " </memory>")
        opened = await openai.chat.completions.create(
            model=client.model, messages=[SYSTEM, asked, THINK], extra_body={"continue_final_message": True}
        )
        reply = "<think>" + opened.choices[0].message.content
        said = reply.partition("</think>")[2]
        if box := re.search(r"\\boxed\{(.*?)\}", said):
            return box[1]
        call = re.search(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)
        if call is None:
            return None
        try:
            query = json.loads(call[1])["arguments"]["query"]
            found = await http.post(f"{client.base_url}/search", headers=key, json={"query": query, "top_n": 1})
            page = "\n\n".join(passage["contents"] for passage in found.raise_for_status().json()["passages"])
        except (ValueError, KeyError, TypeError) as error:
            page = f"{type(error).__name__}: {error}"
        shown = user("<tool_response>", call[1].strip(), "\n", page, "\n</tool_response>\nRewrite the <memory>.")
        rewrite = await openai.chat.completions.create(
            model=client.model, messages=[SYSTEM, asked, {"role": "assistant", "content": reply}, shown]
        )
        kept = re.search(r"<memory>(.*?)</memory>", rewrite.choices[0].message.content, re.DOTALL)
        if kept is None:
            return None
        memory = kept[1].strip()
    return None
