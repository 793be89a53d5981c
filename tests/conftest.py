"""Eight fake CPU devices for every test, and the folder with recorded reference behaviour where it exists."""

import importlib.util
import os
import socket
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What XLA leaves out: programs compile in half of the time and compute more slowly.
QUICK_TO_COMPILE = """
    --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
"""


def pytest_configure(config):
    """Nothing has imported jax yet; processes of pytest-xdist are children of the first and share what it sets.

    Most of the time of the fast tests goes to compiling: XLA optimises little there, and what one test
    compiled, another finds on disk. The marked tests compute for long, and want the programs that a user runs.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    compiled = tempfile.TemporaryDirectory(prefix="compiled-")
    config.add_cleanup(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PLATFORMS"] = "cpu"
    quick = config.option.markexpr.startswith("not slow")  # as in pyproject.toml: the fast tests
    flags = ["--xla_force_host_platform_device_count=8", *(QUICK_TO_COMPILE.split() if quick else [])]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


@pytest.fixture
def quick_to_compile(monkeypatch):
    """For the processes that a test starts, whatever this one was told."""
    monkeypatch.setenv("XLA_FLAGS", " ".join(QUICK_TO_COMPILE.split()))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Recorded behaviour of the original, real passages and the Qwen2.5 tokenizer; not part of the package."""
    folder = ROOT.parent / "shared"
    if not (folder / "reference").is_dir():
        pytest.skip(f"no recorded reference data at {folder}")
    return folder


@pytest.fixture
def compilations():
    """A context manager that lists the programs XLA compiles while it is open."""
    import contextlib

    import jax

    @contextlib.contextmanager
    def watch():
        seen = []

        def listen(event, duration, **details):
            if event == "/jax/core/compile/backend_compile_duration":
                seen.append(details.get("fun_name", event))

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield seen
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return watch


@pytest.fixture(scope="module")
def bucket_server(free_port):
    """Cloud Storage on this machine, with one empty bucket called `bucket`; the libraries are told where it is."""
    for package in ("gcsfs", "gcp_storage_emulator"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[gcs,test]'")
    told = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{free_port}",  # for gcsfs
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{free_port}",  # for orbax's arrays
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "NO_GCE_CHECK": "true",  # google-auth would wait for a server that knows who this machine is
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks by gRPC, which the emulator does not speak
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        # After the environment, which the libraries read when they are imported.
        spec = importlib.util.spec_from_file_location("cloud_storage", Path(__file__).with_name("cloud_storage.py"))
        cloud_storage = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cloud_storage)
        server = cloud_storage.start(free_port)
        yield server
    server.stop()


@pytest.fixture(scope="module")
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
