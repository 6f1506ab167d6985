"""Every way to deploy: against published schemas, and its objects against each other."""

import copy
import re

import jsonschema
import kubernetes_validate
import pytest

from foreign import SCHEMAS
from manifests import FOLDER, KUSTOMIZATION, ROOT, VARIANTS, containers_of, environment, identity, port_of, variant

VERSION = "1.37"
EVERY = pytest.mark.parametrize("deployed", VARIANTS, ids=[variant.name for variant in VARIANTS])
OBJECTS = [(variant.name, manifest) for variant in VARIANTS for manifest in variant.manifests]


def validate(manifest):
    if manifest["kind"] in SCHEMAS:
        jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_every_file_is_a_resource_and_every_resource_a_file():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])


@EVERY
def test_no_two_objects_have_one_name(deployed):
    names = [identity(manifest) for manifest in deployed.manifests]
    assert len(set(names)) == len(names) >= 5


@pytest.mark.parametrize("manifest", [m for _, m in OBJECTS], ids=[f"{v}-{'-'.join(identity(m))}" for v, m in OBJECTS])
def test_a_manifest_is_as_its_published_schema_says(manifest):
    validate(manifest)


@pytest.mark.parametrize("kind", ["Deployment", *SCHEMAS])
def test_a_schema_finds_what_is_wrong(kind):
    wrong = copy.deepcopy(variant("kustomize-all").all_of(kind)[0])
    validate(wrong)
    wrong["spec"]["selectr"] = {}
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        validate(wrong)


@EVERY
def test_everything_is_in_one_namespace(deployed):
    for manifest in deployed.manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == KUSTOMIZATION["namespace"], identity(manifest)
    if deployed.name.startswith("kustomize"):
        assert deployed.one("Namespace", KUSTOMIZATION["namespace"])


@EVERY
def test_services_budgets_and_the_pool_select_pods_that_there_are(deployed):
    for service in deployed.all_of("Service"):
        (deployment,) = deployed.labelled(service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert port_of(deployment, port["targetPort"]) == port["port"]
    for deployment in deployed.all_of("Deployment"):
        assert deployed.labelled(deployment["spec"]["selector"]["matchLabels"]) == [deployment]


@EVERY
def test_every_deployment_has_a_disruption_budget(deployed):
    protected = []
    for budget in deployed.all_of("PodDisruptionBudget"):
        (deployment,) = deployed.labelled(budget["spec"]["selector"]["matchLabels"])
        assert budget["spec"]["maxUnavailable"] == 1
        replicas = [s["spec"]["minReplicaCount"] for s in deployed.all_of("ScaledObject")]
        assert deployment["spec"].get("replicas", *replicas) > 1, "an eviction would leave no pod"
        protected.append(deployment)
    assert protected == deployed.all_of("Deployment")


def test_the_pool_leads_to_gateways_and_asks_the_picker():
    for deployed in VARIANTS:
        for pool in deployed.all_of("InferencePool"):
            (gateways,) = deployed.labelled(pool["spec"]["selector"]["matchLabels"])
            (target,) = pool["spec"]["targetPorts"]
            assert port_of(gateways, target["number"]) == target["number"]
            picker = deployed.one("Service", pool["spec"]["endpointPickerRef"]["name"])
            assert pool["spec"]["endpointPickerRef"]["port"]["number"] in [p["port"] for p in picker["spec"]["ports"]]
            (rule,) = deployed.one("HTTPRoute", "holobiont")["spec"]["rules"]
            (backend,) = rule["backendRefs"]
            assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
            assert backend["group"] == pool["apiVersion"].split("/")[0]
    assert variant("kustomize").one("InferencePool", "holobiont") and variant("chart").one("InferencePool", "holobiont")


def test_the_picker_asks_the_headless_service_of_gateways():
    for deployed in [variant("kustomize"), variant("chart")]:
        picker = deployed.container("picker")
        name, port = environment(picker)["HOLOBIONT_PICKER_ENDPOINTS"].rsplit(":", 1)
        service = deployed.one("Service", name)
        assert service["spec"]["clusterIP"] == "None", "each host has its own address"
        assert int(port) in [p["port"] for p in service["spec"]["ports"]]
        assert environment(picker)["HOLOBIONT_PICKER_LISTEN"].endswith(f":{picker['ports'][0]['containerPort']}")


@EVERY
def test_gateway_and_executor_meet_at_one_socket_and_listen_where_the_port_is(deployed):
    gateway, executor = deployed.container("gateway"), deployed.container("executor")
    assert environment(gateway)["HOLOBIONT_SOCKET"] == environment(executor)["HOLOBIONT_SOCKET"]
    assert environment(gateway)["HOLOBIONT_MODEL"] == environment(executor)["HOLOBIONT_MODEL"]
    assert environment(gateway)["HOLOBIONT_LISTEN"].endswith(f":{gateway['ports'][0]['containerPort']}")


@EVERY
def test_the_executor_stops_after_the_gateway_has_drained(deployed):
    pod = deployed.one("Deployment", "holobiont-gateway")["spec"]["template"]["spec"]
    gateway, executor = deployed.container("gateway"), deployed.container("executor")
    # Kubernetes stops all containers at once, but sidecars after the others.
    assert executor in pod["initContainers"] and executor["restartPolicy"] == "Always"
    assert gateway in pod["containers"]
    graces = [int(environment(container)["HOLOBIONT_GRACE_MS"]) / 1000 for container in (gateway, executor)]
    assert gateway["lifecycle"]["preStop"]["sleep"]["seconds"] + sum(graces) < pod["terminationGracePeriodSeconds"]


@EVERY
def test_nobody_is_root_writes_to_its_image_or_may_become_more(deployed):
    for pod in deployed.pods():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0
        assert context["seccompProfile"]["type"] == "RuntimeDefault"
    for container in deployed.containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"], "a leak must not exhaust the node's memory"


@EVERY
def test_nobody_has_a_role_or_a_token(deployed):
    kinds = {manifest["kind"] for manifest in deployed.manifests}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for account in deployed.all_of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for pod in deployed.pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert deployed.one("ServiceAccount", pod["spec"]["serviceAccountName"])


@EVERY
def test_kubernetes_adds_no_variable_that_a_program_refuses(deployed):
    # The service holobiont-picker would give every pod variables that begin with HOLOBIONT_PICKER_.
    for pod in deployed.pods():
        assert pod["spec"]["enableServiceLinks"] is False


@EVERY
def test_the_network_is_closed_but_for_what_is_needed(deployed):
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in deployed.all_of("NetworkPolicy")}
    if deployed.name.startswith("kustomize"):
        default = policies.pop("default-deny")
        assert default == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    closed = set()
    for name, spec in policies.items():
        (deployment,) = deployed.labelled(spec["podSelector"]["matchLabels"])
        assert deployment["metadata"]["name"] == name.removesuffix("-metrics")
        if set(spec["policyTypes"]) == {"Ingress", "Egress"}:
            closed.add(deployment["metadata"]["name"])
        for rule in spec.get("ingress", []):
            for port in rule["ports"]:
                assert port_of(deployment, port["port"])
        for rule in spec.get("ingress", []) + spec.get("egress", []):
            assert rule.get("from") or rule.get("to"), "a rule without peers allows all"
    assert closed == {deployment["metadata"]["name"] for deployment in deployed.all_of("Deployment")}


@EVERY
def test_volumes_that_are_mounted_are_there_and_probes_ask_ports_that_are_there(deployed):
    for pod in deployed.pods():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        used = {mount["name"] for c in containers_of(pod) for mount in c["volumeMounts"]}
        assert used == volumes
        for container in containers_of(pod):
            ports = container.get("ports", [])
            known = {p["name"] for p in ports} | {p["containerPort"] for p in ports}
            for probe in [container[key] for key in container if key.endswith("Probe")]:
                (how,) = [probe[key] for key in ("httpGet", "tcpSocket", "grpc") if key in probe]
                assert how["port"] in known
    for container in deployed.containers():
        if container["name"] == "picker":
            probes = [container["livenessProbe"], container["readinessProbe"]]
            assert [probe["grpc"]["service"] for probe in probes] == ["liveness", "readiness"]


@EVERY
def test_programs_that_are_started_are_in_the_image_and_their_settings_known(deployed):
    containerfile = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    copied = set(re.findall(r"target/release/([a-z-]+)", containerfile))
    variables = (ROOT / "crates" / "shared" / "settings" / "src" / "variables.rs").read_text()
    settings = (ROOT / "docs" / "reference" / "configuration.md").read_text() + variables
    for container in deployed.containers():
        assert container["command"][0].rsplit("/", 1)[1] in copied
        for name in environment(container):
            if name.startswith("HOLOBIONT_"):
                own = name.removeprefix("HOLOBIONT_")
                assert f"`--{own.replace('_', '-').lower()}`" in settings or f'"{own}"' in settings, name
    (user,) = re.findall(r"^USER (\d+):", containerfile, re.M)
    assert {str(pod["spec"]["securityContext"]["runAsUser"]) for pod in deployed.pods()} == {user}


def test_the_image_has_the_version_of_the_programs():
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)
    (image,) = KUSTOMIZATION["images"]
    assert image["newTag"] == version
    for deployed in VARIANTS:
        assert {container["image"] for container in deployed.containers()} == {f"{image['newName']}:{version}"}
