"""Servers of objects for tests: on this machine, each a process of its own."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import http.server
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.ports import reserved_port

ROOT = Path(__file__).parents[2]
_MOTO = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1"]
KEY, SECRET = "AKIDNOBODYSHALLSEE", "wJalrSecretNobodyShallSee0123456789abcde"
BUCKET = "bucket"


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """The address of moto's server of S3, with a bucket, in the environment, too."""
    with reserved_port() as port, _running([*_MOTO, "-p", str(port)], port):
        address = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT")).read()
        with environment(**s3_at(address)):
            yield address


def s3_at(address: str) -> dict[str, str]:
    """The environment of who uses that server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def azurite() -> str | None:
    """Where Azurite is; None if it is not installed: `make azurite` does that."""
    own = ROOT / ".cache" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return str(own) if own.exists() else shutil.which("azurite-blob")


@contextlib.contextmanager
def azure() -> Iterator[None]:
    """Azurite's server of Azure, with a container, in the environment."""
    program = azurite()
    assert program is not None
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        command = [program, "--blobPort", str(port), "--location", folder, "--silent"]
        command += ["--skipApiVersionCheck", "--disableTelemetry"]
        with _running(command, port):
            _make_container(port)
            with environment(
                AZURE_STORAGE_USE_EMULATOR="true",
                AZURITE_BLOB_STORAGE_URL=f"http://127.0.0.1:{port}",
            ):
                yield


def _make_container(port: int) -> None:
    account = "devstoreaccount1"  # of every emulator, with this key
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    version = "2021-08-06"
    told = (
        "PUT" + "\n" * 12 + f"x-ms-date:{now}\nx-ms-version:{version}\n"
        f"/{account}/{account}/{BUCKET}\nrestype:container"
    )
    signed = base64.b64encode(
        hmac.new(base64.b64decode(key), told.encode(), hashlib.sha256).digest()
    ).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{account}/{BUCKET}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": now,
            "x-ms-version": version,
            "Authorization": f"SharedKey {account}:{signed}",
            "Content-Length": "0",
        },
    )
    urllib.request.urlopen(request).read()


def fake_google() -> str | None:
    """Where fake-gcs-server is; None if it is not installed: `make fake-gcs` does that."""
    (*own,) = (ROOT / ".cache" / "fake-gcs").glob(f"*/vendor/*/bin/*-{sys.platform}-*")
    return str(own[0]) if own else shutil.which("fake-gcs-server")


@contextlib.contextmanager
def google() -> Iterator[str]:
    """fake-gcs-server's server of Google, with a bucket, in the environment; its address.

    It has no uploads of the kind that obstore makes, so something between them makes another kind.
    """
    program = fake_google()
    assert program is not None
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        (Path(folder) / "data" / BUCKET).mkdir(parents=True)
        here = f"127.0.0.1:{port}"
        command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        command += ["-backend", "memory", "-public-host", here]
        command += ["-data", f"{folder}/data"]
        with (
            _running(command, port),
            proxy(f"http://{here}", lambda *_: "pass", _asked_of_google) as address,
            environment(**_google_at(address, Path(folder) / "account.json")),
        ):
            yield address


def _google_at(address: str, account: Path) -> dict[str, str]:
    """The environment of who uses that server, as nobody."""
    nobody = dict.fromkeys(["client_email", "private_key", "private_key_id"], "")
    account.write_text(json.dumps({"disable_oauth": True, "gcs_base_url": address, **nobody}))
    return {"GOOGLE_BASE_URL": address, "GOOGLE_SERVICE_ACCOUNT": str(account)}


def _asked_of_google(server: str, request: Request) -> Answer:
    """What fake-gcs-server answers to a request of the XML API, which it only has to read."""
    headers = {k.lower(): v for k, v in request.headers.items()}
    if request.method != "PUT":
        return _asked(server, request._replace(headers={**headers, "host": server[7:]}))
    bucket, _, name = request.path.lstrip("/").partition("/")
    query = {"uploadType": "multipart", "name": urllib.parse.unquote(name)}
    condition = headers.get("x-goog-if-generation-match")
    query |= {} if condition is None else {"ifGenerationMatch": condition}
    parts = ("application/json", b"{}"), ("application/octet-stream", request.body)
    ends = secrets.token_hex(16)
    body = b"".join(
        f"--{ends}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n"
        for kind, part in parts
    )
    path = f"/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
    kind = {"Content-Type": f"multipart/related; boundary={ends}"}
    answer = _asked(server, Request("POST", path, kind, body + f"--{ends}--\r\n".encode()))
    if answer.status != 200:
        return answer
    told = json.loads(answer.content)
    return Answer(200, {"ETag": told["etag"], "x-goog-generation": told["generation"]}, b"")


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """The environment has these while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Request(NamedTuple):
    """What a server is asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """What it answers."""

    status: int
    headers: dict[str, str]
    content: bytes


def _asked(server: str, request: Request) -> Answer:
    connection = http.client.HTTPConnection(server.removeprefix("http://"))
    connection.request(request.method, request.path, request.body, request.headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return Answer(answer.status, dict(answer.getheaders()), content)


@contextlib.contextmanager
def proxy(
    server: str, what: Callable[[str, str], str], ask: Callable[[str, Request], Answer] = _asked
) -> Iterator[str]:
    """A server that hands requests to another one.

    Args:
      server: its address.
      what: is told of each request, its method and path, and says what becomes of it: "pass";
        "lose" the answer of one that was done; "cut", without doing it, or "fail"; "slow".
      ask: asks the other server.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits 40 ms

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fate = what(self.command, self.path)
            if fate == "cut":
                self.close_connection = True
                return
            if fate == "fail":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fate == "slow":
                time.sleep(0.3)
            request = Request(self.command, self.path, dict(self.headers), body)
            answer = ask(server, request)
            if fate == "lose":
                self.close_connection = True
                return
            self.send_response(answer.status)
            sizes = [len(answer.content)]
            for name, value in answer.headers.items():
                if name.lower() == "content-length" and self.command == "HEAD":
                    sizes = [int(value)]
                elif name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(sizes[0]))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one

        def log_message(self, *_: object) -> None:
            """Nothing."""

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Nothing: callers that are killed leave connections behind."""

    between = Server(("127.0.0.1", 0), Handler)
    between.daemon_threads = True
    thread = threading.Thread(target=between.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{between.server_address[1]}"
    finally:
        between.shutdown()
        thread.join()
        between.server_close()


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 240
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None, f"{command[0]} ended"
                assert time.monotonic() < end, f"{command[0]} does not begin"
                time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
