"""Eight simulated CPU devices for all tests, and fixtures that several packages share."""

import contextlib
import gc
import importlib.util
import json
import os
import re
import socket
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

from tests.http_server import QuietHandler, serving_http

ROOT = Path(__file__).resolve().parents[1]
# Fewer XLA optimisations: programs compile in half of the time and run more slowly.
FAST_COMPILE_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if [int(part) for part in version("jaxlib").split(".")[:2]] < [0, 12]:  # later ones do not know it, and abort
    FAST_COMPILE_FLAGS += " --xla_cpu_use_fusion_emitters=false"


# Tracing allocates millions of objects: by default a third of its time goes to looking for garbage among them.
gc.set_threshold(100_000, 20, 20)

# On a busy machine an example may take any time.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


# JAX reads these when it is imported, which the conftest.py of a folder given to pytest does before pytest_configure.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the environment
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"  # a setting that names no directory must not ask the Hub


def pytest_configure(config):
    """Sets how programs are compiled.

    The fast tests spend most of their time on compilation, so they use few XLA optimisations; the slow tests run long
    programs and use the default ones. Processes that tests start share a compilation cache on disk.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    compiled = tempfile.TemporaryDirectory(prefix="compiled-")
    config.add_cleanup(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # The fast tests, as in pyproject.toml, and their variants.
    fast_tests = config.option.markexpr.startswith(("not slow", "variant"))
    flags = ["--xla_force_host_platform_device_count=8", *(FAST_COMPILE_FLAGS.split() if fast_tests else [])]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


@pytest.fixture(scope="session", autouse=True)
def _no_compilation_cache():
    """Not in this process, which has several CPU devices.

    XLA forgets the order of the collectives of a stored program: one device may begin with the second one, while the
    others wait in the first one until the process is aborted. JAX decides at its first compilation whether it has a
    cache, and a test's module may compile when it is collected: it has to decide again.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _environment_of_each_test():
    """Commands set variables of their process, which the next test must not see."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def tpu_compiler(monkeypatch):
    """The compiler for TPUs, beside other processes that use it and without a look for chips."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@pytest.fixture
def fast_compile(monkeypatch):
    """Few XLA optimisations in the processes that a test starts, also for slow tests."""
    import jax

    jax.devices()  # those of this process, which reads the variable once
    monkeypatch.setenv("XLA_FLAGS", " ".join(FAST_COMPILE_FLAGS.split()))


@pytest.fixture
def refused(capsys):
    """Runs a command that must exit with status 2 and a single line on stderr; returns the line."""

    def run(main, argv) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in argv])
        output = capsys.readouterr()
        assert stop.value.code == 2
        assert output.out == ""
        line, *rest = output.err.splitlines()
        assert not rest, output.err
        assert line.startswith("error: ")
        return line

    return run


@pytest.fixture
def misused(capsys):
    """Runs a command whose flags tyro must refuse with status 2; returns its message in one line."""

    def run(main, argv) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in argv])
        assert stop.value.code == 2
        return " ".join(re.sub(r"[│╭╮╰╯─]|---+", " ", capsys.readouterr().err).split())

    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """Recorded behaviour of the reference code, real passages and the Qwen2.5 tokenizer; not part of the package."""
    folder = ROOT.parent / "shared"
    if not (folder / "reference").is_dir():
        pytest.skip(f"no recorded reference data at {folder}")
    return folder


@pytest.fixture
def interpreted():
    """Kernels run on a CPU, as programs of XLA: a simulated TPU, JAX's default here, takes far longer."""
    from jax.experimental.pallas import tpu

    with tpu.force_tpu_interpret_mode(True):
        yield


@pytest.fixture
def fresh_programs():
    """Engines of this test share no compiled programs with those of earlier tests."""
    from memsearcher_jax.sampling import model_runner

    model_runner._program.cache_clear()


@pytest.fixture
def on_one_device():
    from tests.support import one_device

    with one_device():
        yield


@pytest.fixture
def quick_collections():
    """A garbage collection looks at the objects of this test alone; at those of all earlier ones it takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def compilations():
    """A context manager that lists the programs that XLA compiles inside it."""
    import jax

    @contextlib.contextmanager
    def watch():
        compiled = []

        def listen(event, duration, **details):
            if event == "/jax/core/compile/backend_compile_duration":
                compiled.append(details.get("fun_name", event))

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield compiled
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return watch


@pytest.fixture(scope="module")
def bucket_server(free_port):
    """A local Cloud Storage emulator with an empty bucket named `bucket`; sets the environment for its clients."""
    for package in ("gcsfs", "gcp_storage_emulator"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[gcs,test]'")
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{free_port}",  # for gcsfs
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{free_port}",  # for orbax's arrays
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "NO_GCE_CHECK": "true",  # otherwise google-auth waits for a metadata server
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it uses gRPC, which the emulator does not support
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        from tests import cloud_storage  # after the environment is set, because the libraries read it on import

        server = cloud_storage.start(free_port)
        yield server
    server.stop()


@pytest.fixture(scope="module")
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def serving():
    """Starts a chat service that replies with `behave(user message, number of requests with it)`: a status and a body.

    Returns its address and the list of the (path, headers, body) of all requests.
    """
    with contextlib.ExitStack() as stack:

        def serve(behave):
            requests, request_counts = [], Counter()

            class Handler(QuietHandler):
                def do_POST(self):
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    user = body["messages"][-1]["content"]
                    requests.append((self.path, dict(self.headers), body))
                    request_counts[user] += 1
                    status, value = behave(user, request_counts[user])
                    data = value if isinstance(value, bytes) else json.dumps(value).encode()
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            return f"{stack.enter_context(serving_http(Handler))}/v1", requests

        yield serve
