"""Settings of the sampler. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memsearcher_jax.ranges import Count, CountOrZero, Positive, PositiveFraction


@dataclass(frozen=True)
class SamplingParams:
    """The sampling rule of one request, as in `SamplingConfig`; requests that decode together may have others."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class SamplingConfig:
    """The engine's capacity and its sampling rule. The defaults are those of the paper's published code."""

    slots: Count = 64
    """Contexts that decode concurrently, over all devices of a host."""
    tensor: Count = 1
    """Devices that share one copy of the sampler's weights; must divide the devices of a host."""
    weights: Literal["compute_dtype", "int8"] = "compute_dtype"
    """The type of the sampler's copy of the projections; int8: rounded, with a factor for each output, which halves
    what a decoded token reads. The other weights, embeddings among them, have model.compute_dtype."""
    attention: Literal["auto", "xla"] = "auto"
    """xla: attention, the KV cache and the draw without Pallas kernels, the way on if a kernel does not compile on a
    TPU; there it is several times slower. auto: with them on TPUs. model.attention is that of training."""
    engine_per_replica: bool = False
    """Run one engine per data-parallel replica. Replicas then never wait for each other, but each compiles its own
    programs. Recommended on a CPU with several devices (mesh.cpu_devices)."""
    context_tokens: Count = 8_192
    """Tokens of one context, prompt and generations together."""
    kv_tokens: CountOrZero = 0
    """Tokens that the KV cache has room for, over all devices of a host; 0: `slots` full contexts. Contexts take pages
    of it as they grow. Where it is full, the youngest context gives its pages back and is computed again later."""
    page_tokens: Count = 128
    """Tokens of a page of the KV cache. TPUs pad pages to a multiple of 128, GPUs need one of 16."""
    kv: Literal["compute_dtype", "int8"] = "compute_dtype"
    """The type of the KV cache; int8: rounded, with a factor for each token and head. Contexts then take half the
    memory, and a decoded token reads half of it."""
    decode_steps_per_call: Count = 32
    """Maximum tokens that one device call decodes for a slot before the host handles finished generations."""
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Dispatch a call before the host knows the tokens of the call before it, so that the devices work while the host
    handles what has ended; a slot whose generation ended then misses one call. auto: on with accelerators, off on a
    CPU, which is also the host."""
    decode_batch_sizes: tuple[Count, ...] = ()
    """Extra compiled batch sizes per replica, ascending, used when few slots are active. Useful where decoding is
    compute-bound, as on a CPU. Sizes not below a replica's slots are ignored."""
    prefill_chunk: Count = 64
    """Tokens of one prefill chunk; the last chunk of a context is padded."""
    prefill_buckets: tuple[Count, ...] = (256, 1024)
    """Compiled widths of a prefill call in tokens per replica, ascending; a call packs chunks of several contexts."""
    prefill_tokens_per_step: Count = 8_192
    """Tokens per replica after which prefill lets the active contexts decode; the rest follows in the next step."""
    temperature: Positive = 1.0
    """Sampling temperature of training rollouts, above 0; evaluation has its own, where 0 is greedy."""
    top_k: CountOrZero = 10_000
    """Sample from this many most likely tokens; 0 disables the rule."""
    top_p: PositiveFraction = 0.99
    """Sample from the most likely tokens that hold this much probability; 1 disables the rule."""

    @property
    def params(self) -> SamplingParams:
        """The rule of training rollouts."""
        return SamplingParams(self.temperature, self.top_k, self.top_p)

    @property
    def is_quantized(self) -> bool:
        """Whether the sampler's log-probabilities differ from the trainer's by more than rounding."""
        return "int8" in (self.weights, self.kv)

    def weights_dtype(self, compute_dtype: str) -> str:
        """`dtype` of `qwen.publish`."""
        return compute_dtype if self.weights == "compute_dtype" else self.weights

    def kv_bytes(self, head_size: int, compute_itemsize: int) -> int:
        """Bytes of the key and the value of a token in one kv head."""
        return 2 * (head_size + 4 if self.kv == "int8" else head_size * compute_itemsize)

    @property
    def context_pages(self) -> int:
        """Pages of a full context."""
        return -(-self.context_tokens // self.page_tokens)

    def pages_per_replica(self, replicas: int) -> int:
        """Pages of one replica's KV cache. Raises ValueError if they are too few for one context."""
        if not self.kv_tokens:
            return self.slots // replicas * self.context_pages
        pages = self.kv_tokens // self.page_tokens // replicas
        if pages < self.context_pages:
            needed = self.context_pages * self.page_tokens * replicas
            raise ValueError(
                f"sampling.kv_tokens {self.kv_tokens} does not hold one context of sampling.context_tokens "
                f"{self.context_tokens} on each of {replicas} replicas: raise it to {needed}, or set 0"
            )
        return pages

    def prefill_bucket(self, tokens: int) -> int:
        """The narrowest bucket that holds `tokens`, if they fill at least half of it.

        Otherwise the bucket below it, which they fill completely; the rest is left for the next call.
        """
        width = next((width for width in self.prefill_buckets if width >= tokens), self.prefill_buckets[-1])
        filled = [bucket for bucket in self.prefill_buckets if bucket <= tokens]
        return filled[-1] if filled and tokens < width / 2 else width
