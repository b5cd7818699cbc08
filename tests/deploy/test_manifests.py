"""The manifests mean what they should: against Kubernetes' schemas, against each other, and against the processes."""

from __future__ import annotations

from typing import Any

import grpc
import kubernetes_validate
import pytest
import yaml

from executor.config import ExecutorConfig, parse_arguments
from executor.server import LIVENESS, SERVICE
from scheduler.config import SchedulerConfig, parse_config
from scheduler.discovery import split_target
from scheduler.outputs import EndReason, ExecutorState
from scheduler.readiness import LIVENESS_NAME, READINESS_NAMES
from scheduler.server import LAST_WORDS_SECONDS
from tests.deploy.manifests import (
    DEPLOY,
    OVERLAYS,
    arguments,
    container,
    deployment,
    everything,
    pod,
    values_of,
)
from tests.deploy.metrics import read_query, served_series

VERSIONS = ("1.35", "1.37")
FOREIGN_GROUPS = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1"}  # of no schema here
OWN_CLAIMS = {"octavo-models"}  # that the cluster's owner makes: docs/operations.md says how
UID = 10001
SCHEDULER_HEALTH = {LIVENESS_NAME, *READINESS_NAMES}
EXECUTOR_HEALTH = {LIVENESS, SERVICE, ""}

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_process = pytest.mark.parametrize("process", ["scheduler", "executor"])


def scheduler_config(overlay: str) -> SchedulerConfig:
    return parse_config(arguments(overlay, "scheduler"))


def executor_config(overlay: str) -> ExecutorConfig:
    return parse_arguments(arguments(overlay, "executor"), {})


def config(overlay: str, process: str) -> SchedulerConfig | ExecutorConfig:
    return scheduler_config(overlay) if process == "scheduler" else executor_config(overlay)


def labels_of_pods(overlay: str) -> dict[str, dict[str, str]]:
    """By Deployment."""
    return {
        name: document["spec"]["template"]["metadata"]["labels"]
        for (kind, name), document in everything(overlay).items()
        if kind == "Deployment"
    }


def selected(overlay: str, selector: dict[str, str]) -> list[str]:
    """Deployments whose pods a selector takes."""
    return [name for name, labels in labels_of_pods(overlay).items() if selector.items() <= labels.items()]


def bytes_of(quantity: str) -> int:
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(quantity[:-2]) * units[quantity[-2:]]


@each_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(overlay: str, version: str) -> None:
    known = [found for found in everything(overlay).values() if found["apiVersion"] not in FOREIGN_GROUPS]
    assert len(known) >= 11
    for document in known:
        kubernetes_validate.validate(document, version, strict=True)


@each_overlay
def test_a_wrong_field_would_be_found(overlay: str) -> None:
    broken = yaml.safe_load(yaml.safe_dump(deployment(overlay, "executor")))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


@each_overlay
def test_all_is_in_one_namespace(overlay: str) -> None:
    spaces = {
        document["metadata"].get("namespace")
        for (kind, _), document in everything(overlay).items()
        if kind != "Namespace"
    }
    assert spaces == {"octavo"}
    assert ("Namespace", "octavo") in everything(overlay)


# --- who is meant


@each_overlay
def test_every_selector_takes_the_pods_of_one_process(overlay: str) -> None:
    """A Service, a budget or a policy that selects nobody is no error to Kubernetes, and does nothing."""
    taken = {}
    for (kind, name), document in everything(overlay).items():
        spec = document.get("spec", {})
        match kind:
            case "Service":
                selector = spec["selector"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case "Deployment" | "PodDisruptionBudget" | "PodMonitor":
                selector = spec["selector"]["matchLabels"]
            case _:
                continue
        taken[kind, name] = selected(overlay, selector)
    process = {key: key[1].removesuffix("-metrics") for key in taken}
    assert taken == {key: [process[key]] for key in taken}
    kinds = sorted(kind for kind, _ in taken)
    assert kinds == sorted(
        ["Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"] * 2 + ["NetworkPolicy", "PodMonitor"]
    )


@each_overlay
def test_executors_are_spread_by_their_own_label(overlay: str) -> None:
    [spread] = pod(overlay, "executor")["topologySpreadConstraints"]
    assert selected(overlay, spread["labelSelector"]["matchLabels"]) == ["octavo-executor"]


@each_overlay
def test_only_the_scheduler_reaches_executors(overlay: str) -> None:
    policy = everything(overlay)["NetworkPolicy", "octavo-executor"]["spec"]
    [rule] = policy["ingress"]
    [peer] = rule["from"]
    assert policy["policyTypes"] == ["Ingress"]
    assert list(peer) == ["podSelector"]  # of the same namespace
    assert selected(overlay, peer["podSelector"]["matchLabels"]) == ["octavo-scheduler"]
    assert rule["ports"] == [{"protocol": "TCP", "port": executor_config(overlay).port}]


@each_overlay
def test_clients_reach_the_schedulers_port_and_prometheus_its_metrics(overlay: str) -> None:
    names = ("octavo-scheduler", "octavo-scheduler-metrics")
    ports = [values_of(everything(overlay)["NetworkPolicy", name], "ports") for name in names]
    told = scheduler_config(overlay)
    assert ports == [[[{"protocol": "TCP", "port": port}]] for port in (told.port, told.http_port)]


# --- ports and probes


@each_overlay
@each_process
def test_containers_name_the_ports_that_their_process_listens_on(overlay: str, process: str) -> None:
    told = config(overlay, process)
    wanted = {"grpc": told.port}
    if isinstance(told, SchedulerConfig):
        assert told.http_port is not None
        wanted["metrics"] = told.http_port
    assert {port["name"]: port["containerPort"] for port in container(overlay, process)["ports"]} == wanted
    assert told.host == "0.0.0.0"


@each_overlay
@each_process
def test_services_lead_to_a_port_of_the_container(overlay: str, process: str) -> None:
    service = everything(overlay)["Service", f"octavo-{process}"]["spec"]
    named = {port["name"]: port["containerPort"] for port in container(overlay, process)["ports"]}
    assert [(port["port"], named[port["targetPort"]]) for port in service["ports"]] == [(named["grpc"], named["grpc"])]


@each_overlay
def test_the_scheduler_looks_up_the_headless_service(overlay: str) -> None:
    [(host, port)] = [split_target(target) for target in scheduler_config(overlay).executors]
    service = everything(overlay)["Service", host]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", False)
    assert [each["port"] for each in service["ports"]] == [port]
    assert selected(overlay, service["selector"]) == ["octavo-executor"]


@each_overlay
def test_the_monitor_names_a_port_that_there_is(overlay: str) -> None:
    [endpoint] = everything(overlay)["PodMonitor", "octavo-scheduler"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in container(overlay, "scheduler")["ports"]]


@each_overlay
@each_process
def test_probes_ask_for_services_that_the_process_tells_of(overlay: str, process: str) -> None:
    known = SCHEDULER_HEALTH if process == "scheduler" else EXECUTOR_HEALTH
    found = container(overlay, process)
    probes = {name: found[f"{name}Probe"]["grpc"] for name in ("startup", "liveness", "readiness")}
    asked = {name: probe.get("service", "") for name, probe in probes.items()}
    assert {probe["port"] for probe in probes.values()} == {config(overlay, process).port}
    assert set(asked.values()) <= known
    assert asked["liveness"] == "liveness"  # or executors that are away would restart the scheduler
    assert asked["readiness"] == ""
    # A scheduler is up before its executors are; an executor is when its model is loaded.
    assert asked["startup"] == ("liveness" if process == "scheduler" else "")


@each_overlay
def test_an_executor_may_take_its_time_to_load(overlay: str) -> None:
    probe = container(overlay, "executor")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == {"cpu": 600, "gpu": 1800}[overlay]


# --- the end of a pod


@each_overlay
@each_process
def test_a_pod_has_time_to_drain(overlay: str, process: str) -> None:
    before = container(overlay, process)["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = before + config(overlay, process).grace_period + 2 * LAST_WORDS_SECONDS
    assert before >= 1
    assert pod(overlay, process)["terminationGracePeriodSeconds"] > needed


@each_overlay
def test_one_scheduler_at_a_time(overlay: str) -> None:
    spec = deployment(overlay, "scheduler")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert everything(overlay)["PodDisruptionBudget", "octavo-scheduler"]["spec"]["minAvailable"] == 1


def test_a_rollout_of_executors_takes_no_gpu_that_is_not_there() -> None:
    limits = container("gpu", "executor")["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    assert deployment("gpu", "executor")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


# --- what a pod may do, and what it gets


@each_overlay
@each_process
def test_a_pod_can_do_nothing_that_it_need_not(overlay: str, process: str) -> None:
    spec = pod(overlay, process)
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(overlay, process)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False


@each_overlay
@each_process
def test_a_container_has_requests_within_its_limits(overlay: str, process: str) -> None:
    found = container(overlay, process)["resources"]
    assert set(found["requests"]) == set(found["limits"]) >= {"cpu", "memory"}
    assert found["requests"]["memory"] == found["limits"]["memory"] or process == "scheduler"
    assert float(found["requests"]["cpu"]) <= float(found["limits"]["cpu"])


def test_a_cpu_executor_has_as_many_threads_as_cpus_and_room_for_its_cache() -> None:
    told, limits = executor_config("cpu"), container("cpu", "executor")["resources"]["limits"]
    assert told.num_threads == int(limits["cpu"])
    assert told.kv_cache_memory is not None
    assert told.kv_cache_memory * 2 < bytes_of(limits["memory"])


@each_overlay
def test_mounts_are_of_volumes_that_there_are(overlay: str) -> None:
    volumes = {volume["name"]: volume for volume in pod(overlay, "executor")["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container(overlay, "executor")["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    told = executor_config(overlay)
    assert "emptyDir" in volumes[mounts[str(told.cache_dir)]["name"]]
    paths = [variable["value"] for variable in container(overlay, "executor")["env"]]
    assert all(path.startswith("/cache") for path in paths)
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume
    }
    assert claims <= OWN_CLAIMS


def test_the_gpu_overlays_model_is_in_a_volume_that_is_only_read() -> None:
    told = executor_config("gpu")
    [mount] = [
        each for each in container("gpu", "executor")["volumeMounts"] if told.model.startswith(each["mountPath"])
    ]
    [volume] = [each for each in pod("gpu", "executor")["volumes"] if each["name"] == mount["name"]]
    assert (told.device, mount["readOnly"], volume["persistentVolumeClaim"]["readOnly"]) == ("cuda", True, True)


@each_overlay
def test_configmaps_and_secrets_that_are_named_are_there(overlay: str) -> None:
    named: list[tuple[str, Any]] = []
    for document in everything(overlay).values():
        for key in ("configMapRef", "configMapKeyRef", "configMap"):
            named += [("ConfigMap", reference["name"]) for reference in values_of(document, key)]
        for key in ("secretRef", "secretKeyRef"):
            named += [("Secret", reference["name"]) for reference in values_of(document, key)]
        named += [("Secret", reference["secretName"]) for reference in values_of(document, "secret")]
    assert set(named) <= set(everything(overlay))


@each_overlay
@each_process
def test_images_are_named_as_they_are_built(overlay: str, process: str) -> None:
    name, _, tag = container(overlay, process)["image"].partition(":")
    assert name == f"octavo-{process}"
    assert tag == {"scheduler": "0.1.0", "executor": f"0.1.0-{'cuda' if overlay == 'gpu' else 'cpu'}"}[process]


# --- scaling and monitoring


@each_overlay
def test_keda_scales_the_executors_by_metrics_that_there_are(overlay: str) -> None:
    scaled = everything(overlay)["ScaledObject", "octavo-executor"]["spec"]
    assert ("Deployment", scaled["scaleTargetRef"]["name"]) in everything(overlay)
    assert "replicas" not in deployment(overlay, "executor")["spec"]
    assert scaled["minReplicaCount"] >= 1
    queries = [read_query(trigger["metadata"]["query"]) for trigger in scaled["triggers"]]
    assert [query.series for query in queries] == [{"octavo_num_requests_waiting"}, {"octavo_kv_cache_usage_perc"}]
    assert all(query.series <= set(served_series()) for query in queries)
    texts = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    assert all('{namespace="octavo"}' in text for text in texts)


@each_overlay
def test_executors_go_no_faster_than_they_drain(overlay: str) -> None:
    behavior = everything(overlay)["ScaledObject", "octavo-executor"]["spec"]["advanced"][
        "horizontalPodAutoscalerConfig"
    ]
    [policy] = behavior["behavior"]["scaleDown"]["policies"]
    assert policy["value"] == 1
    assert policy["periodSeconds"] > executor_config(overlay).grace_period


@each_overlay
def test_the_dashboard_is_a_configmap_that_grafana_looks_for(overlay: str) -> None:
    found = everything(overlay)["ConfigMap", "octavo-dashboard"]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["data"] == {"octavo.json": (DEPLOY / "grafana" / "octavo.json").read_text()}


@each_overlay
def test_alerts_ask_for_series_labels_and_values_that_there_are(overlay: str) -> None:
    [group] = everything(overlay)["PrometheusRule", "octavo"]["spec"]["groups"]
    served = served_series()
    known = {"state": {state.value for state in ExecutorState}, "reason": {reason.value for reason in EndReason}}
    known["code"] = {code.name for code in grpc.StatusCode}
    for rule in group["rules"]:
        query = read_query(rule["expr"])
        assert query.series <= set(served), rule["alert"]
        assert query.labels <= set().union(*(served[name] for name in query.series)), rule["alert"]
        assert all(value in known[label] for label, value in query.values), rule["alert"]
        assert rule["annotations"]["summary"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 7
