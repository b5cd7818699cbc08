"""Whether a server answers requests, asked by the standard health protocol (grpc.health.v1).

gRPC is imported when the question is put, so that `octavo --help` does not wait for it.
"""

from __future__ import annotations

from octavo.cli.terminal import Failure

GENERATION = "octavo.v1.Generation"


def health(address: str, service: str = GENERATION, timeout: float = 5.0) -> str:
    """The status of a service by its name in the protocol, as "SERVING". Raises Failure where nobody answers."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise Failure(f"the server at {address} has no service {service!r}") from None
            raise Failure(no_server(address)) from None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def is_serving(address: str) -> bool:
    try:
        return health(address, timeout=1.0) == "SERVING"
    except Failure:
        return False


def no_server(address: str) -> str:
    return f"no server at {address}; start one with `octavo serve`"
