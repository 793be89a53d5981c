"""Random schedules: whatever is shared, preempted and computed again, every context equals one computed alone.

The model runner is replaced by one that caches, in place of keys and values, a hash of each token and all before it.
What it draws next is a function of all the hashes that the page table lets it see: a page that is wrong anywhere shows.
"""

from dataclasses import dataclass, field, replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling import engine as engine_module
from memsearcher_jax.sampling import pages
from memsearcher_jax.sampling.config import SamplingConfig, SamplingParams
from memsearcher_jax.sampling.decode import DecodeOutput
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.prefill import CopyPages
from tests.support import NANO

MASK, STOP, VOCABULARY = 2**64 - 1, 0, 4


def mix(value: int, token: int) -> int:
    return (value * 6364136223846793005 + token + 1442695040888963407) & MASK


def hashes(ids, before=0):
    """The hash of each token and all before it."""
    values = []
    for id in ids:
        before = mix(before, id)
        values.append(before)
    return values


def draw(visible: int, position: int, stream, temperature) -> tuple[int, float]:
    """(token, log-probability) after tokens whose hashes add up to `visible`."""
    value = mix(mix(mix(visible & MASK, position), int(stream[0]) * 99 + int(stream[1])), int(temperature * 4))
    return (value >> 33) % VOCABULARY, -float((value >> 40) % 1_000) / 1_000


class FakeModelRunner:
    """The calls of `ModelRunner` on pages of hashes."""

    def __init__(self, model, settings, stop_ids, mesh):
        self.settings, self.shards = settings, mesh.size
        shape = self.shards, settings.pages_per_replica(self.shards), settings.page_tokens
        self.pools = np.random.default_rng(0).integers(0, 2**63, shape, np.uint64)
        self.state = {}  # by slot: last token, length and remaining tokens

    def run(self, step, params, root_key):
        for call in step.calls:
            (self.copy if isinstance(call, CopyPages) else self.prefill)(call)
        return step.decode and self.decode(step.decode)

    def wait(self):
        pass

    def is_done(self, output):
        return True

    def copy(self, call):
        for row, (source, target) in enumerate(zip(call.source_A, call.target_A, strict=True)):
            pool = self.pools[row * self.shards // len(call.source_A)]
            pool[target] = pool[source]

    def prefill(self, call):
        A = len(call.start_A)
        new, width = {}, call.ids_BT.size // A
        ids_AW, segment_AW = call.ids_BT.reshape(A, width), call.segment_BT.reshape(A, width)
        for row in range(A):
            count = int((segment_AW[row] > 0).sum())
            if count:
                shard, start, length = row * self.shards // A, int(call.start_A[row]), int(call.length_A[row])
                # Tokens of the call itself are visible to later chunks of their segment, not by the page table.
                own = new.setdefault((shard, segment_AW[row, 0]), [])
                cached = self.read(shard, call.page_table_AI[row], length)
                assert start == length + len(own)
                values = hashes(ids_AW[row, :count].tolist(), [0, *cached, *own][-1])
                own += values
        for row in range(A):
            count = int((segment_AW[row] > 0).sum())
            if count:
                shard, start, length = row * self.shards // A, int(call.start_A[row]), int(call.length_A[row])
                values = new[shard, segment_AW[row, 0]][start - length :][:count]
                self.write(shard, call.page_table_AI[row], start, values)

    def decode(self, call):
        A, J = len(call.length_A), self.settings.decode_steps_per_call
        token_AJ, logprob_AJ = np.zeros((A, J), np.int32), np.zeros((A, J), np.float32)
        count_A, remaining_A = np.zeros((2, A), np.int32)
        for row in np.flatnonzero(call.remaining_A):
            shard, slot = row * self.shards // A, int(call.slot_A[row])
            told = int(call.token_A[row]), int(call.length_A[row]), int(call.remaining_A[row])
            last, length, remaining = self.state[slot] if call.continues_A[row] else told
            cached = self.read(shard, call.page_table_AI[row], length - 1)
            total, new = sum(cached), []
            while remaining and len(new) < J:
                new.append(mix([0, *cached, *new][-1], last))
                total += new[-1]
                rule = (call.rng_stream_A2[row], call.temperature_A[row])
                last, logprob = draw(total, length + len(new) - 1, *rule)
                token_AJ[row, len(new) - 1], logprob_AJ[row, len(new) - 1] = last, logprob
                remaining = 0 if last == STOP else remaining - 1
            self.write(shard, call.page_table_AI[row], length - 1, new)
            count_A[row], remaining_A[row] = len(new), remaining
            self.state[slot] = last, length + len(new), remaining
        return DecodeOutput(token_AJ, logprob_AJ, count_A, remaining_A, np.ones(A, bool))

    def read(self, shard, pages, length):
        return self.pools[shard, pages].reshape(-1)[:length].tolist()

    def write(self, shard, pages, start, values):
        for position, value in enumerate(values, start=start):
            page, entry = divmod(position, self.settings.page_tokens)
            self.pools[shard, pages[page], entry] = value


@dataclass
class Conversation:
    """What one context is asked to do, and what it then holds when it is computed alone."""

    number: int
    rule: SamplingParams
    prompt: list[int]
    turns: list[tuple[list[int], int, int]]  # text, max_tokens, tokens dropped before it
    has_stop: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def find_stop(self, ids):
        """Ends a generation after two equal tokens."""
        return next((end for end in range(2, len(ids) + 1) if ids[end - 2] == ids[end - 1]), None)

    def compute(self, context_tokens: int) -> None:
        """Every token from all tokens before it, without a cache. Turns that do not fit are removed."""
        for number, (text, max_tokens, drop) in enumerate(self.turns):
            kept = len(self.ids) - drop
            if kept + len(text) >= context_tokens:
                del self.turns[number:]
                return
            self.ids, self.logprobs = [*self.ids[:kept], *text], [*self.logprobs[:kept], *[0.0] * len(text)]
            start = len(self.ids)
            for _ in range(min(max_tokens, context_tokens - start)):
                rule = ((self.number, 7), self.rule.temperature)
                token, logprob = draw(sum(hashes(self.ids)), len(self.ids), *rule)
                self.ids.append(token)
                self.logprobs.append(logprob)
                if token == STOP or (self.has_stop and self.find_stop(self.ids[start:])):
                    break


def random_conversation(rng, number: int, beginning: list[int], context_tokens: int) -> Conversation:
    def text(longest):
        return rng.integers(0, VOCABULARY, rng.integers(1, longest + 1)).tolist()

    prompt = [*beginning[: rng.integers(0, len(beginning) + 1)], *text(4)][: context_tokens - 1]
    turns = [(prompt, int(rng.integers(1, 9)), 0)]
    for _ in range(rng.integers(0, 3)):
        turns.append((text(9), int(rng.integers(1, 9)), int(rng.integers(0, 2))))
    rule = SamplingParams(temperature=float(rng.integers(0, 3)))
    conversation = Conversation(number, rule, prompt, turns, bool(rng.integers(0, 2)))
    conversation.compute(context_tokens)
    return conversation


def random_settings(rng) -> SamplingConfig:
    page_tokens, context_tokens, replicas = int(rng.integers(1, 7)), int(rng.integers(9, 50)), int(rng.integers(1, 3))
    chunk, slots = int(rng.integers(1, 5)), replicas * int(rng.integers(1, 8))
    settings = SamplingConfig(
        slots=slots,
        engine_per_replica=bool(rng.integers(0, 2)),
        async_scheduling=("on", "off")[rng.integers(0, 2)],
        context_tokens=context_tokens,
        page_tokens=page_tokens,
        decode_steps_per_call=int(rng.integers(1, 7)),
        decode_batch_sizes=(1, 3)[: rng.integers(0, 3)],
        prefill_chunk=chunk,
        prefill_buckets=(chunk, 4 * chunk)[: rng.integers(1, 3)],
        prefill_tokens_per_step=int(rng.integers(1, 30)),
    )
    least = settings.context_pages * replicas
    return replace(settings, kv_tokens=int(rng.integers(least, 2 * least)) * page_tokens)


def assert_index_is_complete(pool):
    """Every page is found by its beginnings, and by no others."""
    beginnings = {}
    for page, planned in enumerate(pool._planned_P.tolist()):
        for end in range(pages.BLOCK, planned + 1, pages.BLOCK):
            key = (int(pool._parent_P[page]), pool._ids_PE[page, :end].tobytes())
            beginnings.setdefault(key, set()).add(page)
    assert pool._by_beginning == beginnings


def run_schedule(seed: int, monkeypatch):
    """Opens, extends, leaves idle and pops random contexts; returns the statistics."""
    rng = np.random.default_rng(seed)
    settings = random_settings(rng)
    replicas = 2 if settings.slots % 2 == 0 and rng.integers(0, 2) else 1
    if settings.kv_tokens < replicas * settings.context_pages * settings.page_tokens:
        replicas = 1
    mesh = sharding.make_mesh(MeshConfig(replicas, 1, 1), jax.devices()[:replicas])
    monkeypatch.setattr(engine_module, "ModelRunner", FakeModelRunner)
    monkeypatch.setattr(pages, "BLOCK", 1 + seed % 4)
    monkeypatch.setattr(engine_module, "on_submesh", lambda params, *_: params)
    engine = Engine(NANO, settings, (STOP,), mesh)
    engine.start({}, None)
    beginning = rng.integers(0, VOCABULARY, settings.context_tokens - 2).tolist()
    waiting = [random_conversation(rng, n, beginning, settings.context_tokens) for n in range(rng.integers(1, 15))]
    expected = len(waiting)
    running, idle, done, steps = {}, {}, [], 0
    while waiting or running or idle:
        for slot in engine.scheduler.free_slots:
            if waiting and rng.integers(0, 3):
                conversation = waiting.pop(0)
                running[slot] = conversation, 1
                text, max_tokens, _ = conversation.turns[0]
                stop = conversation.find_stop if conversation.has_stop else None
                engine.scheduler.open_context(slot, text, (conversation.number, 7), max_tokens, conversation.rule, stop)
        for slot in [slot for slot in idle if rng.integers(0, 3)]:
            conversation, turn = idle.pop(slot)
            if turn == len(conversation.turns):
                recorded = engine.scheduler.pop_context(slot)
                assert list(recorded.ids) == conversation.ids, (seed, conversation.number)
                np.testing.assert_allclose(recorded.logprobs, conversation.logprobs, atol=1e-6)
                done.append(conversation.number)
            else:
                text, max_tokens, drop = conversation.turns[turn]
                stop = conversation.find_stop if conversation.has_stop else None
                engine.scheduler.extend_context(slot, text, max_tokens, stop, drop)
                running[slot] = conversation, turn + 1
        for generation in engine.step():
            idle[generation.slot] = running.pop(generation.slot)
            if rng.integers(0, 2):
                engine.keep_busy()
        steps += 1
        assert steps < 5_000, f"schedule {seed} does not end"
    assert len(done) == expected
    for replica in engine.scheduler._replicas:
        assert_index_is_complete(replica.pool)
        assert replica.pool.free == settings.pages_per_replica(replicas), "every page is free again"
    return engine.stop()


def check(seeds, monkeypatch):
    stats = [run_schedule(seed, monkeypatch) for seed in seeds]
    assert sum(one.preempted for one in stats) > len(stats) / 4, "the pools must run out of pages"
    assert sum(one.recomputed_tokens for one in stats) > len(stats)
    assert sum(one.shared_tokens for one in stats) > len(stats)
    assert sum(one.generated_tokens for one in stats) > 10 * len(stats)


def test_random_schedules_equal_contexts_computed_alone(monkeypatch):
    check(range(60), monkeypatch)


@pytest.mark.slow
def test_ten_thousand_random_schedules_equal_contexts_computed_alone(monkeypatch):
    check(range(1_000, 11_000), monkeypatch)
