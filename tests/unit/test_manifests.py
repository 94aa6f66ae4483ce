"""The manifests for Kubernetes: valid by its schemas, and in agreement with each other and with the program."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from common.config import DecodeCommand, GatewayCommand, PrefillCommand, known_variables, parse_command
from common.flag_values import KINDS, ByteSize
from common.gateway_finder import is_name
from common.wire import Role
from gateway.__main__ import FLUSH_S
from tests.unit.kustomization import FILE, Document, load, render

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.35", "1.36", "1.37")
"""Of Kubernetes: the first in which all that is used here is on by itself, and those supported in December 2026."""
WORKERS = ("prefill", "decode")
SERVICES = ("gateway", *WORKERS)
ALIVE_S = 5
"""How old the alive file of a healthy worker may be, by its probes."""

BASE = render(FOLDER / "base")
WITH_MODELS = render(FOLDER / "components" / "models", BASE)
AUTOSCALED = render(FOLDER / "overlays" / "autoscaled")


def of_kind(kind: str, documents: list[Document] = BASE) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def named(kind: str, name: str) -> Document:
    (document,) = (document for document in of_kind(kind) if document["metadata"]["name"] == name)
    return document


def pod(service: str, documents: list[Document] = BASE) -> Document:
    (found,) = (d for d in of_kind("Deployment", documents) if d["metadata"]["name"] == f"baton-{service}")
    return found["spec"]["template"]["spec"]


def container(service: str, documents: list[Document] = BASE) -> Document:
    (found,) = pod(service, documents)["containers"]
    return found


def settings() -> dict[str, str]:
    return named("ConfigMap", "baton")["data"]


def command(service: str) -> Any:
    name, *argv = container(service)["args"]
    assert name == service
    return parse_command(name, argv, settings())


def selected(labels: dict[str, str]) -> set[str]:
    """The services whose pods have these labels."""
    templates = {d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"] for d in of_kind("Deployment")}
    return {name.removeprefix("baton-") for name, own in templates.items() if labels.items() <= own.items()}


def num_bytes(quantity: str) -> int:
    parsed = KINDS[ByteSize].parse(quantity)
    assert isinstance(parsed, int)
    return parsed


def validate(document: Document, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid_and_has_no_field_that_kubernetes_does_not_know(version: str) -> None:
    for document in [*BASE, *of_kind("Deployment", WITH_MODELS)]:
        validate(document, version)


def test_validation_finds_a_misspelt_field() -> None:
    misspelt = {**named("Service", "baton-gateway"), "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError, match="specs"):
        validate(misspelt, VERSIONS[-1])


def test_every_file_belongs_to_the_kustomization_beside_it() -> None:
    for file in FOLDER.rglob(FILE):
        listed = {entry for entry in load(file)[0].get("resources", []) if entry.endswith(".yaml")}
        assert listed == {other.name for other in file.parent.glob("*.yaml")} - {FILE}
    assert {file.parent for file in FOLDER.rglob("*.yaml")} == {file.parent for file in FOLDER.rglob(FILE)}


def test_names_are_unique_and_the_base_is_of_no_namespace() -> None:
    keys = [(document["kind"], document["metadata"]["name"]) for document in AUTOSCALED]
    assert len(keys) == len(set(keys))
    assert all("namespace" not in document["metadata"] for document in BASE)


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_there_for_a_service_selects_its_pods_and_no_others(service: str) -> None:
    name = f"baton-{service}"
    (spread,) = pod(service)["topologySpreadConstraints"]
    for selector in (
        named("Deployment", name)["spec"]["selector"],
        named("PodDisruptionBudget", name)["spec"]["selector"],
        spread["labelSelector"],
    ):
        assert selected(selector["matchLabels"]) == {service}


@pytest.mark.parametrize("service", ["baton-gateway", "baton-gateway-workers"])
def test_ports_of_services_are_those_that_gateways_listen_on(service: str) -> None:
    spec = named("Service", service)["spec"]
    assert selected(spec["selector"]) == {"gateway"}
    gateway = command("gateway")
    listening = {"http": gateway.http.port, "workers": int(gateway.gateway.bind.rpartition(":")[2])}
    (port,) = spec["ports"]
    assert {port["targetPort"]: port["port"]}.items() <= listening.items()
    assert {port["name"]: port["containerPort"] for port in container("gateway")["ports"]} == listening


@pytest.mark.parametrize("service", SERVICES)
def test_arguments_and_settings_are_what_the_program_takes(service: str) -> None:
    assert isinstance(command(service), GatewayCommand | PrefillCommand | DecodeCommand)
    variables = {*settings(), *(variable["name"] for variable in container(service).get("env", []))}
    assert variables <= known_variables()


@pytest.mark.parametrize("service", SERVICES)
def test_no_variable_of_a_kubernetes_service_is_taken_for_a_setting(service: str) -> None:
    assert pod(service)["enableServiceLinks"] is False


@pytest.mark.parametrize("service", WORKERS)
def test_workers_look_gateways_up_by_a_name_that_stands_for_each_of_them_ready_or_not(service: str) -> None:
    spec = named("Service", "baton-gateway-workers")["spec"]
    (address,) = command(service).worker.gateway
    assert address == f"tcp://baton-gateway-workers:{spec['ports'][0]['port']}"
    assert is_name(address)
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("service", SERVICES)
def test_services_are_reached_from_other_pods(service: str) -> None:
    options = command(service)
    addresses = [options.gateway.bind] if service == "gateway" else [options.worker.bind]
    if service == "prefill":
        addresses.append(options.transfer.data_bind)
    assert all(address.startswith("tcp://0.0.0.0:") for address in addresses)
    assert named("Service", "baton-gateway-workers")["spec"]["ipFamilies"] == ["IPv4"]


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_is_given_longer_than_its_drain_takes(service: str) -> None:
    assert pod(service)["terminationGracePeriodSeconds"] >= command(service).worker.drain_timeout + 10


def test_a_gateway_is_given_longer_than_leaving_its_service_and_its_drain_take() -> None:
    leaving_s = container("gateway")["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed_s = leaving_s + command("gateway").gateway.drain_timeout + FLUSH_S
    assert pod("gateway")["terminationGracePeriodSeconds"] >= needed_s + 5


def test_a_gateway_stays_in_its_service_while_requests_may_wait_for_a_worker() -> None:
    probe = container("gateway")["readinessProbe"]
    assert probe["httpGet"]["path"] == "/ready"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= command("gateway").gateway.no_worker_timeout


def test_a_gateway_is_not_started_again_for_want_of_workers() -> None:
    for probe in ("startupProbe", "livenessProbe"):
        assert container("gateway")[probe]["httpGet"] == {"path": "/version", "port": "http"}


@pytest.mark.parametrize("service", WORKERS)
def test_probes_of_a_worker_look_at_the_file_that_it_touches(service: str) -> None:
    file = Path(command(service).worker.alive_file)
    look = ["sh", "-c", f"find {file} -newermt '-{ALIVE_S} seconds' | grep -q ."]
    probes = [container(service)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert [probe["exec"]["command"] for probe in probes] == [look] * 3
    assert str(file.parent) in {mount["mountPath"] for mount in container(service)["volumeMounts"]}
    assert probes[0]["initialDelaySeconds"] >= ALIVE_S, "the last container's file must be too old by then"


@pytest.mark.parametrize("service", SERVICES)
def test_pods_run_as_the_image_s_user_without_rights_and_write_to_memory_only(service: str) -> None:
    (uid,) = re.findall(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    spec = pod(service)
    context = spec["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, int(uid))
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container(service)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (volume,) = spec["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert [mount["name"] for mount in container(service)["volumeMounts"]] == [volume["name"]]


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_has_whole_cores_for_itself_and_memory_for_weights_beside_its_kv(service: str) -> None:
    resources = container(service)["resources"]
    assert resources["requests"] == resources["limits"]
    assert int(resources["limits"]["cpu"]) >= 1
    (tmp,) = pod(service)["volumes"]
    in_memory = command(service).worker.kv_cache_memory + num_bytes(tmp["emptyDir"]["sizeLimit"])
    assert 2 * in_memory <= num_bytes(resources["limits"]["memory"])


def test_kv_goes_over_the_network_between_pods() -> None:
    assert [command(service).transfer.kv_transport for service in WORKERS] == ["tcp", "tcp"]


def test_one_image_of_this_version_serves_all() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {container(service)["image"] for service in SERVICES} == {f"baton:{version}"}


def test_every_service_sees_the_models_and_none_can_change_them() -> None:
    for service in SERVICES:
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in container(service, WITH_MODELS)[
            "volumeMounts"
        ]
        claim = pod(service, WITH_MODELS)["volumes"][-1]
        assert claim["persistentVolumeClaim"] == {"claimName": "baton-models", "readOnly": True}


def test_only_http_is_open_to_others() -> None:
    inside, http = named("NetworkPolicy", "baton-services"), named("NetworkPolicy", "baton-gateway-http")
    everyone = set(SERVICES)
    assert selected(inside["spec"]["podSelector"]["matchLabels"]) == everyone
    (rule,) = inside["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer.keys() == {"podSelector"}
    assert selected(peer["podSelector"]["matchLabels"]) == everyone
    assert selected(http["spec"]["podSelector"]["matchLabels"]) == {"gateway"}
    assert http["spec"]["ingress"] == [{"ports": [{"port": "http"}]}]


def scaler_targets(documents: list[Document]) -> list[str]:
    scalers = [*of_kind("HorizontalPodAutoscaler", documents), *of_kind("ScaledObject", documents)]
    return sorted(scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers)


def test_each_deployment_has_one_autoscaler_and_no_number_of_its_own() -> None:
    deployments = of_kind("Deployment", AUTOSCALED)
    assert scaler_targets(AUTOSCALED) == sorted(deployment["metadata"]["name"] for deployment in deployments)
    assert scaler_targets(BASE) == ["baton-gateway"]
    assert all("replicas" not in deployment["spec"] for deployment in deployments)


def pool_scalers() -> Iterator[tuple[str, Document, Document]]:
    """Each pool, how it is scaled, and by what."""
    for scaler in of_kind("ScaledObject", AUTOSCALED):
        (trigger,) = scaler["spec"]["triggers"]
        yield scaler["metadata"]["name"].removeprefix("baton-"), scaler["spec"], trigger


@pytest.mark.parametrize("version", VERSIONS)
def test_what_keda_hands_on_to_an_autoscaler_is_valid(version: str) -> None:
    for pool, spec, _ in pool_scalers():
        assert spec.keys() == {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}
        (advanced,) = spec["advanced"].items()
        assert advanced[0] == "horizontalPodAutoscalerConfig"
        autoscaler = {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]},
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            **advanced[1],
        }
        kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": pool}}
        validate({**kind, "spec": autoscaler}, version)


def test_pools_scale_by_metrics_that_gateways_show_each_worker_once() -> None:
    shown = set(re.findall(r"`(baton_worker_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    namespaces = {document["metadata"]["namespace"] for document in AUTOSCALED}
    for pool, _, trigger in pool_scalers():
        query = trigger["metadata"]["query"]
        series = re.findall(r"(?:max|min) by \(worker\) \((\w+)\{namespace=\"(\w+)\", role=\"(\w+)\"\}\)", query)
        assert len(series) == query.count("baton_") > 0
        for metric, namespace, role in series:
            assert metric in shown
            assert {namespace} == namespaces
            assert Role(role) is Role(pool)


def test_triggers_have_the_fields_of_keda_s_prometheus_scaler_and_never_take_silence_for_idleness() -> None:
    for _, _, trigger in pool_scalers():
        assert trigger["type"] == "prometheus"
        metadata = trigger["metadata"]
        assert metadata.keys() == {"serverAddress", "query", "threshold", "ignoreNullValues"}
        assert all(isinstance(value, str) for value in metadata.values())
        assert float(metadata["threshold"]) > 0
        assert metadata["ignoreNullValues"] == "false"


def test_a_pool_keeps_a_worker_and_loses_one_at_a_time_when_the_last_has_drained() -> None:
    for pool, spec, _ in pool_scalers():
        assert spec["minReplicaCount"] >= 1
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        (policy,) = down["policies"]
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        grace_s = pod(pool)["terminationGracePeriodSeconds"]
        assert down["stabilizationWindowSeconds"] > policy["periodSeconds"] > grace_s


def test_the_deployment_page_names_folders_that_exist() -> None:
    named_paths = re.findall(r"deploy/kubernetes[\w/-]*", (ROOT / "docs" / "deployment.md").read_text())
    assert named_paths
    assert all((ROOT / path).is_dir() for path in named_paths)
