"""Which requests go through the proxy that the environment names."""

import pytest

from memsearcher_jax.http.client import JsonClient, ServiceUnavailable, proxy_of
from tests.http_server import QuietHandler, serving_http

PROXY = "http://user:s3cret@proxy.example:3128"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "http://judge.example/v1", None),
        ({"HTTP_PROXY": PROXY}, "http://judge.example/v1", PROXY),
        ({"HTTP_PROXY": PROXY}, "https://judge.example/v1", None),
        ({"HTTPS_PROXY": PROXY}, "https://judge.example/v1", PROXY),
        ({"ALL_PROXY": PROXY}, "https://judge.example/v1", PROXY),
        ({"https_proxy": PROXY, "HTTPS_PROXY": "http://other"}, "https://judge.example/v1", PROXY),
        ({"ALL_PROXY": PROXY, "NO_PROXY": ".example"}, "https://judge.example/v1", None),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "a, judge.example"}, "https://judge.example:8000/v1", None),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "judge"}, "https://judge.example/v1", PROXY),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "*"}, "https://judge.example/v1", None),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8,192.168.1.1"}, "http://10.3.2.1:8000", None),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8,192.168.1.1"}, "http://192.168.1.1", None),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8,192.168.1.1"}, "http://11.3.2.1", PROXY),
        ({"ALL_PROXY": PROXY, "NO_PROXY": "fd00::/8"}, "http://[fd00::1]:8000", None),
        ({"ALL_PROXY": PROXY}, "http://127.0.0.1:8000", None),
        ({"ALL_PROXY": PROXY}, "http://[::1]:8000", None),
        ({"ALL_PROXY": PROXY}, "http://localhost:8000", None),
    ],
)
def test_the_proxy_of_an_address(environment, url, proxy, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


class Proxy(QuietHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = f'"{self.path} {self.headers["Authorization"]}"'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def test_a_service_behind_a_proxy_is_reached(monkeypatch, tmp_path):
    """With the key of the settings, and not that of a .netrc file for the same host."""
    (tmp_path / ".netrc").write_text("machine judge.invalid login me password of-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    client = JsonClient("http://judge.invalid/v1", headers={"Authorization": "Bearer k3y"})
    with serving_http(Proxy) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        assert client.request("POST", "/chat", {}) == "http://judge.invalid/v1/chat Bearer k3y"
    with pytest.raises(
        ServiceUnavailable, match=r"does not respond: .*\(through the proxy that the environment names\)"
    ):
        client.request("POST", "/chat", {})
    for unusable in ("socks4://user:s3cret@host", "nonsense:s3cret"):
        monkeypatch.setenv("HTTP_PROXY", unusable)
        with pytest.raises(ServiceUnavailable, match="HTTP_PROXY") as error:
            client.request("POST", "/chat", {})
        assert "s3cret" not in str(error.value)
