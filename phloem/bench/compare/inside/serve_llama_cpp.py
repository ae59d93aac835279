"""Runs inside llama.cpp's environment: its own server, until the process is told to end."""

from __future__ import annotations

import argparse
import importlib
import signal
import threading
from typing import Any


def main() -> None:
    """Serve and wait for SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    package: Any = importlib.import_module("xllamacpp")
    params: Any = package.CommonParams()
    params.model.path = args.model
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_ctx = args.context
    params.n_parallel = args.parallel
    params.kv_unified = True  # one pool for all requests, as the other engines have
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    print(package.get_system_info(), flush=True)
    server = package.Server(params)
    print(server.listening_address, flush=True)
    stop.wait()
    del server


if __name__ == "__main__":
    main()
