"""The manifests of deploy/kubernetes: against Kubernetes's published schemas, and against each other."""

import pathlib
import re

import kubernetes_validate
import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.37"
# What no package has a schema of.
FOREIGN = {"InferencePool", "HTTPRoute", "Kustomization"}

KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS = [
    manifest
    for name in KUSTOMIZATION["resources"]
    for manifest in yaml.safe_load_all((FOLDER / name).read_text())
]
NAMES = [f"{manifest['kind']}-{manifest['metadata']['name']}" for manifest in MANIFESTS]


def all_of(kind):
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def one(kind, name):
    found = [manifest for manifest in all_of(kind) if manifest["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}"
    return found[0]


def pods():
    return [manifest["spec"]["template"] for manifest in all_of("Deployment")]


def containers():
    return [container for pod in pods() for container in pod["spec"]["containers"]]


def environment(container):
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


def labelled(selector):
    """The deployments whose pods have these labels."""
    wanted = selector.items()
    return [d for d in all_of("Deployment") if wanted <= d["spec"]["template"]["metadata"]["labels"].items()]


def port_of(deployment, port):
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        for found in container.get("ports", []):
            if port in (found["name"], found["containerPort"]):
                return found["containerPort"]
    raise AssertionError(f"{deployment['metadata']['name']} has no port {port}")


def test_every_file_is_a_resource_and_every_resource_a_file():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])
    assert len(set(NAMES)) == len(NAMES) > 10


@pytest.mark.parametrize("manifest", MANIFESTS, ids=NAMES)
def test_a_manifest_is_as_its_published_schema_says(manifest):
    if manifest["kind"] not in FOREIGN:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_schema_finds_what_is_wrong():
    wrong = yaml.safe_load(yaml.safe_dump(one("Deployment", "holobiont-picker")))
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_everything_is_in_one_namespace():
    for manifest in MANIFESTS:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == KUSTOMIZATION["namespace"], manifest["metadata"]["name"]
    assert one("Namespace", KUSTOMIZATION["namespace"])


def test_services_budgets_and_the_pool_select_pods_that_there_are():
    for service in all_of("Service"):
        (deployment,) = labelled(service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert port_of(deployment, port["targetPort"]) == port["port"]
    for budget in all_of("PodDisruptionBudget"):
        (deployment,) = labelled(budget["spec"]["selector"]["matchLabels"])
        assert deployment["spec"]["replicas"] > 1, "a budget of one is none"
    for deployment in all_of("Deployment"):
        assert labelled(deployment["spec"]["selector"]["matchLabels"]) == [deployment]


def test_the_pool_leads_to_gateways_and_asks_the_picker():
    pool = one("InferencePool", "holobiont")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    (gateways,) = labelled(pool["spec"]["selector"]["matchLabels"])
    (target,) = pool["spec"]["targetPorts"]
    assert port_of(gateways, target["number"]) == target["number"]
    picker = one("Service", pool["spec"]["endpointPickerRef"]["name"])
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] in [p["port"] for p in picker["spec"]["ports"]]
    (rule,) = one("HTTPRoute", "holobiont")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "holobiont")
    assert backend["group"] == pool["apiVersion"].split("/")[0]


def test_the_picker_asks_the_headless_service_of_gateways():
    (picker,) = one("Deployment", "holobiont-picker")["spec"]["template"]["spec"]["containers"]
    name, port = environment(picker)["HOLOBIONT_PICKER_ENDPOINTS"].rsplit(":", 1)
    service = one("Service", name)
    assert service["spec"]["clusterIP"] == "None", "each host has its own address"
    assert int(port) in [p["port"] for p in service["spec"]["ports"]]
    assert environment(picker)["HOLOBIONT_PICKER_LISTEN"].endswith(f":{picker['ports'][0]['containerPort']}")


def test_gateway_and_executor_meet_at_one_socket_and_listen_where_the_port_is():
    gateway, executor = one("Deployment", "holobiont-gateway")["spec"]["template"]["spec"]["containers"]
    assert environment(gateway)["HOLOBIONT_SOCKET"] == environment(executor)["HOLOBIONT_SOCKET"]
    assert environment(gateway)["HOLOBIONT_LISTEN"].endswith(f":{gateway['ports'][0]['containerPort']}")
    grace = int(environment(gateway)["HOLOBIONT_GRACE_MS"]) / 1000 + gateway["lifecycle"]["preStop"]["sleep"]["seconds"]
    pod = one("Deployment", "holobiont-gateway")["spec"]["template"]["spec"]
    assert grace < pod["terminationGracePeriodSeconds"]


def test_nobody_is_root_writes_to_its_image_or_may_become_more():
    for pod in pods():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0
        assert context["seccompProfile"]["type"] == "RuntimeDefault"
    for container in containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"], "no leak takes the node along"


def test_nobody_has_a_role_or_a_token():
    kinds = {manifest["kind"] for manifest in MANIFESTS}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for account in all_of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for pod in pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert one("ServiceAccount", pod["spec"]["serviceAccountName"])


def test_the_network_is_closed_but_for_what_is_needed():
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in all_of("NetworkPolicy")}
    nobody = policies.pop("nobody")
    assert nobody["podSelector"] == {} and set(nobody["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in nobody and "egress" not in nobody
    for name, spec in policies.items():
        (deployment,) = labelled(spec["podSelector"]["matchLabels"])
        assert deployment["metadata"]["name"] == name
        for rule in spec["ingress"]:
            for port in rule["ports"]:
                assert port_of(deployment, port["port"])
        for rule in spec["ingress"] + spec["egress"]:
            assert rule.get("from") or rule.get("to"), "not anybody"
    assert len(policies) == len(all_of("Deployment"))


def test_volumes_that_are_mounted_are_there_and_probes_ask_ports_that_are_there():
    for pod in pods():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        used = {mount["name"] for c in pod["spec"]["containers"] for mount in c["volumeMounts"]}
        assert used == volumes
        for container in pod["spec"]["containers"]:
            ports = container.get("ports", [])
            known = {p["name"] for p in ports} | {p["containerPort"] for p in ports}
            for probe in [container[key] for key in container if key.endswith("Probe")]:
                (how,) = [probe[key] for key in ("httpGet", "tcpSocket", "grpc") if key in probe]
                assert how["port"] in known
    (picker,) = one("Deployment", "holobiont-picker")["spec"]["template"]["spec"]["containers"]
    assert {picker["livenessProbe"]["grpc"]["service"], picker["readinessProbe"]["grpc"]["service"]} == {"liveness", "readiness"}


def test_programs_that_are_started_are_in_the_image_and_their_settings_known():
    containerfile = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    copied = set(re.findall(r"target/release/([a-z-]+)", containerfile))
    (image,) = KUSTOMIZATION["images"]
    settings = (ROOT / "docs" / "reference" / "configuration.md").read_text() + (ROOT / "crates" / "shared" / "settings" / "src" / "variables.rs").read_text()
    for container in containers():
        assert container["image"] == image["name"]
        assert container["command"][0].rsplit("/", 1)[1] in copied
        for name in environment(container):
            flag = name.removeprefix("HOLOBIONT_").replace("_", "-").lower()
            assert f"`--{flag}`" in settings or f'"{name.removeprefix("HOLOBIONT_")}"' in settings, name
    (user,) = re.findall(r"^USER (\d+):", containerfile, re.M)
    assert {str(pod["spec"]["securityContext"]["runAsUser"]) for pod in pods()} == {user}
