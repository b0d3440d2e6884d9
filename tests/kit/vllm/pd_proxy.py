"""An HTTP proxy for two vLLM servers, one for prefill and one for decode."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen


def ask(address: str, body: dict[str, Any]) -> Any:
    """Send a request to the completions API of a server; return the answer."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = Request(f"{address}/v1/completions", data, headers)  # noqa: S310 - on loopback.
    with urlopen(request, timeout=120) as answer:  # noqa: S310
        return json.load(answer)


@contextmanager
def pd_proxy(prefill: str, decode: str) -> Generator[str]:
    """Run a proxy that sends each prompt to `prefill` and then to `decode`; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            first = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            computed = ask(prefill, request | first)
            answer = ask(decode, request | {"kv_transfer_params": computed["kv_transfer_params"]})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
