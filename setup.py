"""Package metadata. `pip install -e .` is enough to train on a CPU; the extras add accelerators and tests."""

from setuptools import find_packages, setup

# Lower bounds are versions up to that in constraints.txt; upper bounds are the next that may change an interface.
# `.ci/run` tests with the pinned versions and with the newest.
RUNTIME = [
    # The newest for Python 3.11 is 0.10.2. Its jaxlib alone computes one fusion on CPUs wrong (jax issue 39103): a
    # product of contraction 3 with 2 or 3 outputs, and a reduction, from 32,768 rows on. No program here contains it.
    "jax>=0.10.2,<0.13",
    "flax>=0.12.8,<0.13",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "tensorstore>=0.1.86,<0.2",
    "tensorflow-datasets>=4.9.10,<5",
    "pyarrow>=26,<27",
    "array_record>=0.8.6,<0.9",
    'scann>=1.4.2,<2; platform_system == "Linux"',  # there are no wheels for other systems
    "bm25s>=0.3.16,<0.4",
    "sentencex>=1.0.32,<2",
    "huggingface_hub>=2.4,<3",
    "filelock>=4.2,<5",
    "httpx2>=2.16,<3",
    "tokenizers>=0.23.1,<0.24",
    "transformers>=5.23,<6",
    "Jinja2>=3.1.6,<4",
    "pyrsistent>=0.20,<0.21",
    "json-repair>=0.64.5,<0.65",
    "rouge-score>=0.1.2,<0.2",
    "nltk>=3.9,<4",
    "safetensors>=0.8,<0.9",
    "annotated-types>=0.8,<0.9",
    "tyro>=1.0.17,<2",
    "rich>=15,<16",
    "tensorboardX>=2.6.5,<3",
    "matplotlib>=3.11,<4",
    "numpy>=2.4,<3",
    "scipy>=1.17,<2",
]

GCS = ["gcsfs>=2026.9,<2027"]
DOCUMENTS = [
    "markdown-it-py>=4.3,<5",
    "PyYAML>=6.0.3,<7",
    "beautifulsoup4>=4.15,<5",
    "html-to-markdown>=3.21.2,<4",
    "mammoth>=1.13,<2",
    "python-pptx>=1.0.2,<2",
    "pypdfium2>=5.15.2,<6",
]
WANDB = ["wandb>=0.31,<0.32"]
SERVE = ["fastapi>=0.165,<0.166", "uvicorn>=0.54,<0.55", "mcp>=2.3,<3"]
HARNESS = ["openai>=3.54,<4", "langgraph>=1.2.24,<2", "langchain-openai>=1.7.4,<2"]
GGUF = ["gguf>=0.19,<0.20"]
EXTRAS = {
    "tpu": ["jax[tpu]"],
    "cuda": ["jax[cuda12]"],
    "test": [
        *WANDB,
        *(
            "pytest>=9,<10",
            "pytest-xdist>=3.8,<4",
            "hypothesis>=6.170,<7",
            "ruff>=0.17.5,<0.18",
            "pyright>=1.1.414,<2",
            "setuptools>=77",
        ),
        "jsonschema>=4.26,<5",
        *(*SERVE, *HARNESS),
        *(*DOCUMENTS, "pypdf[crypto]>=7.1,<8"),
        *GGUF,
        *(*GCS, "gcp-storage-emulator>=2026.7.19,<2027"),
    ],
    "serve": SERVE,
    "harness": HARNESS,
    "documents": DOCUMENTS,
    "gcs": GCS,
    "browser": ["selenium>=4.51,<5"],
    "docs": ["zensical>=0.0.73,<0.1", "mkdocstrings[python]>=1.0.8,<2"],
    "wandb": WANDB,
    "gguf": GGUF,
    "parity": ["torch>=2.13,<2.14", "accelerate>=1,<2", "peft>=0.21.2,<0.22"],
}

# Presets and commands are top-level directories of a checkout and subpackages of a wheel.
TOP_LEVEL = {
    "memsearcher_jax.configs": "configs",
    "memsearcher_jax.launch": "launch",
    "memsearcher_jax.launch.pod": "launch/pod",
}

setup(
    name="memsearcher_jax",
    version="0.3.0",
    description="Search agents with a compact memory, trained end to end by multi-context GRPO in JAX",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)],
    packages=[*find_packages(include=["memsearcher_jax", "memsearcher_jax.*"]), *TOP_LEVEL],
    package_dir=TOP_LEVEL,
    package_data={
        "memsearcher_jax": ["py.typed", "agent/templates/**", "assets/**", "report/page/web/*", "serving/web/*"],
        "memsearcher_jax.launch.pod": ["*.yaml", "Dockerfile*"],
    },
    entry_points={"console_scripts": ["memsearcher = memsearcher_jax.launch.main:main"]},
    install_requires=RUNTIME,
    extras_require=EXTRAS,
)
