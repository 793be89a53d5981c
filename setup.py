"""Package metadata. `pip install -e .` runs the main job on a CPU; the extras add accelerators and tests."""

from setuptools import find_packages, setup

# The lower bound is the version that the tests run with; the upper bound is the next one that may break an interface.
RUNTIME = [
    "jax>=0.10.2,<0.11.1",
    "flax>=0.12.8,<0.13",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "tensorstore>=0.1.86,<0.2",
    "tensorflow-datasets>=4.9.10,<5",
    "pyarrow>=26,<27",
    "array_record>=0.8.6,<0.9",
    'scann>=1.4.2,<2; platform_system == "Linux"',  # there are no wheels for other systems
    "bm25s>=0.3.16,<0.4",
    "tokenizers>=0.23.1,<0.24",
    "json-repair>=0.64.5,<0.65",
    "safetensors>=0.8,<0.9",
    "tyro>=1.0.17,<2",
    "rich>=15,<16",
    "tensorboardX>=2.6.5,<3",
    "matplotlib>=3.11,<4",
    "numpy>=2.4,<3",
]

GCS = ["gcsfs>=2026.9,<2027"]
SERVE = ["fastapi>=0.165,<0.166", "uvicorn>=0.54,<0.55"]
EXTRAS = {
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda12]"],
    "test": [
        *("pytest>=9,<10", "pytest-xdist>=3.8,<4", "hypothesis>=6.170,<7", "ruff>=0.17.5,<0.18", "setuptools>=77"),
        *("jsonschema>=4.26,<5", "PyYAML>=6.0.3,<7"),
        *SERVE,
        *(*GCS, "gcp-storage-emulator>=2026.7.19,<2027"),
    ],
    "serve": SERVE,
    "gcs": GCS,
    "browser": ["selenium>=4.51,<5"],
    "bench": ["faiss-cpu>=1.15.1,<2"],
    "parity": ["torch>=2.13,<2.14", "transformers>=5.23,<6"],
}

setup(
    name="memsearcher_jax",
    version="0.1.0",
    description="Search agents with a compact memory, trained end to end by multi-context GRPO in JAX",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["memsearcher_jax", "memsearcher_jax.*"]),
    package_data={"memsearcher_jax": ["agent/templates/**", "assets/**", "report/web/*"]},
    install_requires=RUNTIME,
    extras_require=EXTRAS,
)
