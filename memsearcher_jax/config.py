"""One run's configuration: each room's frozen config, and the checks that need more than one room.

The defaults are the paper's settings; a preset in `configs/` states what it changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.retrieval.search import RetrievalConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig
