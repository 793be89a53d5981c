"""An agent in LangGraph that searches, and compacts its messages into a memory, trained as it is.

    pip install -e '.[serve,harness]'
    python launch/tpu_train.py --config tiny --agent.harness examples/langgraph_agent.py

The graph is think -> search -> compact -> think, until the model answers. `compact` replaces all messages by one with
the memory, so the next call of the model begins a context of its own. The words are those of the packaged templates
`terse`, which the weights of `tiny` know.
"""

import json
import re
from typing import TypedDict

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

SYSTEM = SystemMessage(r"Think, then search or answer in \boxed{}.")
TURNS = 8


class State(TypedDict):
    messages: list[BaseMessage]
    question: str
    call: str
    answer: str | None
    turns: int


def user(*texts: str) -> HumanMessage:
    """A message whose texts are encoded apart, as the packaged agents encode theirs."""
    return HumanMessage([{"type": "text", "text": text} for text in texts])


def opening(question: str, memory: str) -> list[BaseMessage]:
    """The messages of a fresh context."""
    return [SYSTEM, user("<question> ", question, " </question>\n\n<memory> ", memory, " </memory>")]


def make_graph(client):
    http = client.http_client
    model = ChatOpenAI(
        base_url=client.base_url, api_key=client.api_key, model=client.model, max_retries=0, http_async_client=http
    )
    thinking = model.bind(extra_body={"continue_final_message": True})
    key = {"Authorization": f"Bearer {client.api_key}"}

    async def think(state: State) -> dict:
        reply = await thinking.ainvoke([*state["messages"], AIMessage("<think>")])
        text = "<think>" + reply.content
        said = text.partition("</think>")[2]
        box = re.search(r"\\boxed\{(.*?)\}", said)
        call = re.search(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)
        return {
            "messages": [*state["messages"], AIMessage(text)],
            "answer": box[1] if box else None,
            "call": call[1].strip() if call and not box else "",
            "turns": state["turns"] + 1,
        }

    async def search(state: State) -> dict:
        try:
            query = json.loads(state["call"])["arguments"]["query"]
            found = await http.post(f"{client.base_url}/search", headers=key, json={"query": query, "top_n": 1})
            page = "\n\n".join(passage["contents"] for passage in found.raise_for_status().json()["passages"])
        except (ValueError, KeyError, TypeError) as error:
            page = f"{type(error).__name__}: {error}"
        shown = user("<tool_response>", state["call"], "\n", page, "\n</tool_response>\nRewrite the <memory>.")
        return {"messages": [*state["messages"], shown]}

    async def compact(state: State) -> dict:
        rewrite = await model.ainvoke(state["messages"])
        memory = re.search(r"<memory>(.*?)</memory>", rewrite.content, re.DOTALL)
        if memory is None:
            return {"turns": TURNS}
        return {"messages": opening(state["question"], memory[1].strip())}

    graph = StateGraph(State)
    graph.add_node("think", think)
    graph.add_node("search", search)
    graph.add_node("compact", compact)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", lambda state: "search" if state["call"] else END)
    graph.add_edge("search", "compact")
    graph.add_conditional_edges("compact", lambda state: "think" if state["turns"] < TURNS else END)
    return graph.compile()


async def langgraph_agent(problem, client):
    """The answer to the problem's question, or None."""
    begin = {"messages": opening(problem.question, ""), "question": problem.question, "call": "", "answer": None}
    end = await make_graph(client).ainvoke({**begin, "turns": 0}, {"recursion_limit": 4 * TURNS})
    return end["answer"]
