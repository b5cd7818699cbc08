"""A scheduler whose host is gone: its connection stays open and says nothing, and its lease must not live on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import grpc
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc as pb_grpc

from tests.executor.test_executor_process import Stream, process

LIMIT = 20.0  # seconds: the lease's 10, and room for a busy machine; below the stream's own deadline


class Wire:
    """A connection to `address` that can go silent: nothing passes any more, and nobody is told."""

    def __init__(self, address: str) -> None:
        self._target = address.rpartition(":")
        self._silent = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        self._silent.set()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target[0], int(self._target[2])))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                if not self._silent.is_set():
                    sink.sendall(data)


def test_a_scheduler_that_is_silently_gone_loses_the_lease() -> None:
    with process("--model", "fake") as running:
        address = running.wait_for("ready")
        with (
            contextlib.closing(Wire(address)) as wire,
            grpc.insecure_channel(wire.address) as far,
            grpc.insecure_channel(address) as near,
        ):
            gone = Stream(pb_grpc.ExecutorStub(far))
            stub = pb_grpc.ExecutorStub(near)
            assert stub.Describe(pb.DescribeRequest(), timeout=LIMIT).owner == "one"
            wire.silence()
            deadline = time.monotonic() + LIMIT
            while stub.Describe(pb.DescribeRequest(), timeout=LIMIT).owner:
                assert time.monotonic() < deadline, "the lease outlived its scheduler"
                time.sleep(0.1)
            Stream(stub)  # the lease is anybody's again
            del gone
