"""What the components of deploy/kubernetes add: GPUs, scraping, autoscaling."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from manifests import COMPONENTS, FOLDER, KUSTOMIZATION, ROOT, environment, identity, kustomized, port_of, variant

METRICS = ROOT / "crates" / "control-plane" / "gateway" / "src" / "metrics" / "table.rs"


def test_every_file_of_a_component_is_used():
    assert {path.name for path in (FOLDER / "components").iterdir()} == set(COMPONENTS)
    for component in COMPONENTS:
        folder = FOLDER / "components" / component
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert (kustomization["apiVersion"], kustomization["kind"]) == ("kustomize.config.k8s.io/v1alpha1", "Component")
        used = set(kustomization.get("resources", [])) | {entry["path"] for entry in kustomization.get("patches", [])}
        assert used == {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
    for line in re.findall(r"components/\S+", (FOLDER / "kustomization.yaml").read_text()):
        assert (FOLDER / line).is_dir()


@pytest.mark.parametrize("name", ["kustomize-gpu", "chart-all"])
def test_an_executor_has_one_gpu_and_computes_on_it(name):
    deployed = variant(name)
    executor = deployed.container("executor")
    assert executor["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert environment(executor)["HOLOBIONT_DEVICE"] == "cuda:0"
    cache = environment(executor)["CUDA_CACHE_PATH"]
    (mount,) = [mount for mount in executor["volumeMounts"] if mount["mountPath"] == cache]
    assert not mount.get("readOnly"), "the driver writes compiled kernels"
    for container in deployed.containers():
        assert container is executor or "nvidia.com/gpu" not in container["resources"]["limits"]
    deployment = deployed.one("Deployment", "holobiont-gateway")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    pod = deployment["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


@pytest.mark.parametrize("name", ["kustomize-monitoring", "chart-all"])
def test_prometheus_finds_every_deployment_and_may_reach_it(name):
    deployed = variant(name)
    found = []
    for monitor in deployed.all_of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [s for s in deployed.all_of("Service") if wanted <= s["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        (port,) = [port for port in service["spec"]["ports"] if port["name"] == endpoint["port"]]
        (deployment,) = deployed.labelled(service["spec"]["selector"])
        number = port_of(deployment, port["targetPort"])
        policy = deployed.one("NetworkPolicy", f"{deployment['metadata']['name']}-metrics")["spec"]
        assert deployed.labelled(policy["podSelector"]["matchLabels"]) == [deployment]
        (rule,) = policy["ingress"]
        assert [port["port"] for port in rule["ports"]] == [number]
        # Gateways require a key of the role metrics; pickers have no keys.
        assert ("authorization" in endpoint) == (deployment["metadata"]["name"] == "holobiont-gateway")
        found.append(deployment)
    assert found == deployed.all_of("Deployment")


@pytest.mark.parametrize("name", ["kustomize-autoscaling", "chart-all"])
def test_autoscaling_reads_metrics_that_gateways_publish(name):
    deployed = variant(name)
    (scaled,) = deployed.all_of("ScaledObject")
    spec = scaled["spec"]
    target = deployed.one(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    assert target["metadata"]["name"] == "holobiont-gateway"
    assert "replicas" not in target["spec"], "two owners of one number"
    assert 1 < spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert spec["fallback"]["replicas"] == spec["minReplicaCount"]
    published = METRICS.read_text()
    thresholds = {}
    for trigger in spec["triggers"]:
        metric, labels = re.fullmatch(r"sum\((\w+)\{(.*)\}\)", trigger["metadata"]["query"]).groups()
        assert f'Gauge, Count, "{metric}", []' in published
        labels = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        service = deployed.one("Service", labels["service"])
        assert deployed.labelled(service["spec"]["selector"]) == [target]
        assert labels["namespace"] == service["metadata"]["namespace"]
        thresholds[metric] = int(trigger["metadata"]["threshold"])
    # Fractions of max_running, as the comments say.
    (max_running,) = re.findall(r"`--max-running` \| (\d+)", (ROOT / "docs/reference/configuration.md").read_text())
    assert thresholds == {
        "holobiont_requests_waiting": int(max_running) // 4,
        "holobiont_requests_running": int(max_running) * 3 // 4,
    }


def kubectl_with_components():
    kubectl = shutil.which("kubectl")
    if not kubectl:
        return None
    told = subprocess.run([kubectl, "version", "--client", "--output=json"], capture_output=True, text=True, check=False)
    version = told.returncode == 0 and json.loads(told.stdout).get("kustomizeVersion", "v0")
    return kubectl if version and int(version.lstrip("v").split(".")[0]) >= 5 else None


def in_order(value):
    """The value with lists in one order, because kustomize puts new items of a patch first."""
    if isinstance(value, dict):
        return {key: in_order(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((in_order(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


@pytest.mark.skipif(not kubectl_with_components(), reason="there is no kubectl with kustomize 5")
@pytest.mark.parametrize("components", [(), *((c,) for c in COMPONENTS), COMPONENTS], ids="-".join)
def test_kustomize_merges_as_these_tests_do(components, tmp_path):
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    own = {"resources": ["../kubernetes"], "components": [f"../kubernetes/components/{c}" for c in components]}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(own))
    command = [kubectl_with_components(), "kustomize", tmp_path / "own"]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {identity(manifest): in_order(manifest) for manifest in yaml.safe_load_all(built)}
    assert found == {identity(manifest): in_order(manifest) for manifest in kustomized(components)}
    assert KUSTOMIZATION.get("components") is None, "the components are off by default"
