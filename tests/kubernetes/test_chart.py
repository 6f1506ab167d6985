"""The Helm chart, rendered by Helm's own library: against deploy/kubernetes, and value by value."""

import copy
import json

import helm_python
import pytest
import yaml

from manifests import CHART, COMPONENTS, Variant, charted, environment, identity, kustomized, render, variant
from test_manifests import validate

HELM_LABELS = ("app.kubernetes.io/", "helm.sh/")
# Objects of the kustomization alone, which owns its namespace.
OWN_NAMESPACE = {("Namespace", "holobiont"), ("NetworkPolicy", "default-deny")}


def without_helm_labels(value):
    if isinstance(value, dict):
        items = {key: without_helm_labels(item) for key, item in value.items() if not key.startswith(HELM_LABELS)}
        return {key: item for key, item in items.items() if not (key == "labels" and item == {})}
    if isinstance(value, list):
        return [without_helm_labels(item) for item in value]
    return value


def comparable(manifests):
    found = {}
    for manifest in copy.deepcopy(manifests):
        if identity(manifest) in OWN_NAMESPACE:
            continue
        manifest = without_helm_labels(manifest)
        if manifest["kind"] != "Service":
            # Only labels of services and of pods are selected by anything.
            manifest["metadata"].pop("labels", None)
        spec = manifest.get("spec", {})
        for field in ("egress", "triggers"):
            if field in spec:
                spec[field].sort(key=json.dumps)
        found[identity(manifest)] = manifest
    return found


@pytest.mark.parametrize(
    ("chart", "components"), [("chart", ()), ("chart-all", COMPONENTS)], ids=["defaults", "everything"]
)
def test_the_chart_says_what_the_kustomization_says(chart, components):
    ours = comparable(variant(chart).manifests)
    theirs = comparable(kustomized(components))
    assert ours.keys() == theirs.keys()
    for name, manifest in theirs.items():
        assert ours[name] == manifest, name


def test_helm_finds_nothing_to_complain_about():
    report = helm_python.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


def test_chart_and_image_have_one_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"]


def test_two_releases_share_a_namespace_without_sharing_an_object_or_a_pod():
    one, other = charted({}, release="a"), charted({}, release="b")
    assert not {identity(m) for m in one} & {identity(m) for m in other}
    both = Variant("both", one + other)
    for deployment in both.all_of("Deployment"):
        assert both.labelled(deployment["spec"]["selector"]["matchLabels"]) == [deployment]
    assert environment(Variant("one", one).container("picker"))["HOLOBIONT_PICKER_ENDPOINTS"] == "a-holobiont-gateways:8080"


def test_values_reach_the_objects():
    values = {
        "image": {"repository": "r.example/h", "tag": "9", "pullPolicy": "Always", "pullSecrets": [{"name": "login"}]},
        "replicas": 5,
        "model": {"file": "big.gguf", "servedName": "big", "volume": {"hostPath": {"path": "/srv/models"}}},
        "adapters": {"claim": "ours"},
        "keys": {"secret": "our-keys"},
        "shared": {"registry": "postgres://h@db.example/h", "store": "s3://bucket/a", "region": "eu", "secret": "pw"},
        "executor": {"env": {"HOLOBIONT_MAX_RUNNING": "128"}, "resources": {"limits": {"memory": "64Gi"}}},
        "gpu": {"enabled": True, "resource": "nvidia.com/mig-1g.10gb", "runtimeClassName": "nvidia"},
        "nodeSelector": {"pool": "gpu"},
        "picker": {"replicas": 3, "keySecret": "our-picker"},
        "route": {"gateway": {"name": "edge", "namespace": "edge-system"}, "hostnames": ["llm.example.org"]},
        "networkPolicy": {"sharedServices": [{"cidr": "192.0.2.0/24", "ports": [9000]}], "clientNamespaces": ["apps"]},
    }
    deployed = Variant("values", charted(values))
    for manifest in deployed.manifests:
        validate(manifest)
    gateway, executor = deployed.container("gateway"), deployed.container("executor")
    assert {c["image"] for c in deployed.containers()} == {"r.example/h:9"}
    assert {c["imagePullPolicy"] for c in deployed.containers()} == {"Always"}
    assert environment(gateway)["HOLOBIONT_MODEL"] == "/var/lib/holobiont/models/big.gguf"
    assert environment(gateway)["HOLOBIONT_SERVED_MODEL_NAME"] == "big"
    assert environment(executor)["HOLOBIONT_MAX_RUNNING"] == "128"
    assert executor["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/mig-1g.10gb": 1}
    deployment = deployed.one("Deployment", "holobiont-gateway")
    assert deployment["spec"]["replicas"] == 5
    pod = deployment["spec"]["template"]["spec"]
    assert pod["runtimeClassName"] == "nvidia" and pod["imagePullSecrets"] == [{"name": "login"}]
    assert pod["nodeSelector"] == {"pool": "gpu", "nvidia.com/gpu.present": "true"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["models"] == {"name": "models", "hostPath": {"path": "/srv/models"}}
    assert volumes["adapters"]["persistentVolumeClaim"]["claimName"] == "ours"
    assert volumes["keys"]["secret"]["secretName"] == "our-keys"
    config = deployed.one("ConfigMap", gateway["envFrom"][0]["configMapRef"]["name"])
    expected = {"HOLOBIONT_REGISTRY": "postgres://h@db.example/h", "HOLOBIONT_STORE": "s3://bucket/a", "AWS_REGION": "eu"}
    assert config["data"] == expected
    assert gateway["envFrom"][1]["secretRef"]["name"] == "pw"
    assert deployed.one("HTTPRoute", "holobiont")["spec"]["hostnames"] == ["llm.example.org"]
    policy = deployed.one("NetworkPolicy", "holobiont-gateway")["spec"]
    text = json.dumps(policy)
    assert "edge-system" in text and "apps" in text and "192.0.2.0/24" in text and "10.0.0.0/8" not in text


def test_pods_restart_when_shared_settings_change():
    def annotations(registry):
        (gateway,) = [m for m in charted({"shared": {"registry": registry}}) if identity(m) == ("Deployment", "holobiont-gateway")]
        return gateway["spec"]["template"]["metadata"]["annotations"]

    assert annotations("postgres://h@a.example/h") != annotations("postgres://h@b.example/h")


@pytest.mark.parametrize(
    ("values", "gone"),
    [
        ({"networkPolicy": {"enabled": False}}, {"NetworkPolicy"}),
        ({"podDisruptionBudget": {"enabled": False}}, {"PodDisruptionBudget"}),
        ({"route": {"enabled": False}}, {"InferencePool", "HTTPRoute"}),
    ],
    ids=str,
)
def test_a_part_that_is_off_is_absent_and_the_rest_is_there(values, gone):
    everything = {manifest["kind"] for manifest in variant("chart").manifests}
    assert {manifest["kind"] for manifest in charted(values)} == everything - gone


def test_without_clients_a_policy_allows_none():
    minimal = variant("chart-minimal")
    (policy,) = minimal.all_of("NetworkPolicy")
    assert "ingress" not in policy["spec"] and "Ingress" in policy["spec"]["policyTypes"]


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 3},
        {"replicas": "3"},
        {"gpu": {"enabled": "yes"}},
        {"gpu": {"resource": "gpu"}},
        {"shared": {"registry": "db.example"}},
        {"executor": {"env": {"HOLOBIONT_MAX_RUNNING": 128}}},
        {"autoscaling": {"minReplicas": 0}},
        {"networkPolicy": {"sharedServices": [{"cidr": "10.0.0.0/8"}]}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values):
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmValuesError):
        chart.validate_schema(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"picker": {"enabled": False}}, "route.enabled needs picker.enabled"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 3}}, "minReplicas exceeds"),
    ],
    ids=str,
)
def test_values_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


def test_every_value_is_described_by_the_schema():
    def fields(value, schema, path=""):
        for name, item in value.items():
            assert name in schema["properties"], f"{path}{name}"
            if isinstance(item, dict) and "properties" in schema["properties"][name]:
                fields(item, schema["properties"][name], f"{path}{name}.")

    fields(yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text()))


def test_notes_name_the_secrets_and_claims_that_pods_wait_for():
    for deployed, values in [("chart", {}), ("chart-all", {"serviceMonitor": {"enabled": True}})]:
        notes = render(values)["NOTES.txt"]
        for pod in variant(deployed).pods():
            for volume in pod["spec"]["volumes"]:
                if "secret" in volume:
                    assert volume["secret"]["secretName"] in notes
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in notes
    assert "holobiont-metrics-key" in notes
