"""The MCP tools, used by the official client over HTTP."""

import asyncio
import gc
from importlib.metadata import version
from types import SimpleNamespace

import openai
import pytest
from mcp import Client

from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.data.synthetic.streams import make_streams
from memsearcher_jax.launch import serve_agent
from memsearcher_jax.serving.config import AgentLimits
from memsearcher_jax.serving.tools import make_tools


def call(url, *calls):
    """The results of tool calls, the tools' names, and the progress that was reported."""

    async def run():
        reported = []

        async def progress(done, total, message):
            reported.append(message)

        async with Client(f"{url}/mcp") as client:
            assert client.server_info.version == version("memsearcher_jax")
            names = [tool.name for tool in (await client.list_tools()).tools]
            results = [await client.call_tool(name, given, progress_callback=progress) for name, given in calls]
        return results, names, reported

    return asyncio.run(run())


def test_a_search_agent_answers_with_its_sources(agent, url):
    problem = make_encyclopedia(agent.run.config.data.encyclopedia).test[0]
    (answered, refused), names, reported = call(
        url, ("ask", {"question": problem.question}), ("ask", {"question": "x" * 999})
    )
    assert names == ["ask"]
    result = answered.structured_content
    assert result["answer"] and all(result["answer"] in source["contents"] for source in result["sources"])
    assert reported[0] == "turn 1" and reported[1].startswith("search: ")
    assert refused.is_error and "at most 32 are allowed" in refused.content[0].text


@pytest.mark.slow
def test_a_memory_agent_memorizes_and_recalls(serving, flags, tmp_path, fast_compile):
    more = ["--sampling.slots", "8", "--sampling.decode_batch_sizes"]
    agent = serve_agent.open_agent(flags("tiny_memalpha", *more), tmp_path)
    stream = make_streams(agent.run.config.data.streams)["test"][0].stream
    first, second, *_ = stream.chunks
    with serving(agent) as url:
        results, names, _ = call(
            url,
            ("recall", {"question": "Where?"}),
            ("memorize", {"text": first}),
            ("memorize", {"text": second}),
            ("recall", {"question": "What do you know?"}),
            ("memorize", {"text": first, "memory": "other"}),
            ("memorize", {"text": first, "memory": "third"}),
            ("memorize", {"text": " "}),
        )
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": first}, {"role": "user", "content": "What do you know?"}]
        with pytest.raises(openai.BadRequestError, match="what the agent is to read"):
            client.chat.completions.create(model="tiny", messages=messages[1:])
        whole = client.chat.completions.create(model="tiny", messages=messages)
        cut = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=1).choices[0]
        chunks = list(client.chat.completions.create(model="tiny", messages=messages, stream=True))
        streamed = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(streamed) == whole.choices[0].message.content
    assert (cut.finish_reason, cut.message.content) == ("length", "")
    assert whole.choices[0].message.memsearcher["stop"] == "answered"
    assert whole.choices[0].message.memsearcher["turns"][0]["calls"]
    assert names == ["memorize", "recall"]
    unknown, one, two, recalled, other, third, empty = results
    assert unknown.is_error and "there is no memory 'default': call memorize first" in unknown.content[0].text
    assert one.structured_content == other.structured_content
    assert two.structured_content["items"] > one.structured_content["items"] > 0
    assert not recalled.is_error
    assert third.is_error and "there are 2 memories" in third.content[0].text
    assert empty.is_error and "the text is empty" in empty.content[0].text
    agent.close()


def test_the_names_of_refused_memories_are_not_kept():
    """A client may send any number of them."""
    agent = SimpleNamespace(limits=AgentLimits(max_memories=0), reader=True)

    def locks():
        return sum(type(one) is asyncio.Lock for one in gc.get_objects())

    async def run():
        async with Client(make_tools(agent)) as client:
            before = locks()
            for number in range(50):
                refused = await client.call_tool("memorize", {"text": "x", "memory": f"name {number}"})
                assert "there are 0 memories" in refused.content[0].text
            long = await client.call_tool("memorize", {"text": "x", "memory": "n" * 201})
            assert "at most 200 characters" in long.content[0].text
            return locks() - before

    assert asyncio.run(run()) < 10
