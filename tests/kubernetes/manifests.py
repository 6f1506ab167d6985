"""The objects that a cluster would get: from deploy/kubernetes with its components, and from the Helm chart."""

import copy
import dataclasses
import functools
import pathlib

import helm_python
import yaml

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "holobiont"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
COMPONENTS = ("gpu", "monitoring", "autoscaling")
# Values that switch on what COMPONENTS add.
ALL_VALUES = {"gpu": {"enabled": True}, "serviceMonitor": {"enabled": True}, "autoscaling": {"enabled": True}}

# How a strategic merge identifies the items of a list; it replaces every other list.
MERGE_KEYS = {"containers": "name", "initContainers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def merge(base, patch):
    """The strategic merge of a patch, as kustomize does it for the fields that the components change."""
    merged = dict(base)
    for field, value in patch.items():
        if value is None:
            merged.pop(field, None)
        elif isinstance(value, dict):
            merged[field] = merge(merged.get(field, {}), value)
        elif field in MERGE_KEYS:
            key = MERGE_KEYS[field]
            items = {item[key]: item for item in merged.get(field, [])}
            for item in value:
                items[item[key]] = merge(items.get(item[key], {}), item)
            merged[field] = list(items.values())
        else:
            merged[field] = value
    return merged


def read(path):
    return list(yaml.safe_load_all(path.read_text()))


def identity(manifest):
    return manifest["kind"], manifest["metadata"]["name"]


def containers_of(pod):
    """Sidecars and containers of a pod."""
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


@functools.cache
def kustomized(components):
    manifests = [manifest for name in KUSTOMIZATION["resources"] for manifest in read(FOLDER / name)]
    for component in components:
        folder = FOLDER / "components" / component
        (kustomization,) = read(folder / "kustomization.yaml")
        manifests += [m for name in kustomization.get("resources", []) for m in read(folder / name)]
        for patch in [m for entry in kustomization.get("patches", []) for m in read(folder / entry["path"])]:
            (at,) = [i for i, manifest in enumerate(manifests) if identity(manifest) == identity(patch)]
            manifests[at] = merge(manifests[at], patch)
    manifests = copy.deepcopy(manifests)
    (image,) = KUSTOMIZATION["images"]
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            for container in containers_of(manifest["spec"]["template"]):
                assert container["image"] == image["name"]
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return manifests


def render(values, release="holobiont", namespace="holobiont"):
    """Texts of the chart's templates by file name."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values, name=release, namespace=namespace)
    return {pathlib.Path(path).name: text for path, text in rendered.items()}


def charted(values, **release):
    texts = [text for name, text in render(values, **release).items() if name.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to deploy, with its objects."""

    name: str
    manifests: list

    def all_of(self, kind):
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind, name):
        found = [manifest for manifest in self.all_of(kind) if manifest["metadata"]["name"] == name]
        assert len(found) == 1, f"{kind} {name} in {self.name}"
        return found[0]

    def pods(self):
        return [manifest["spec"]["template"] for manifest in self.all_of("Deployment")]

    def containers(self):
        return [container for pod in self.pods() for container in containers_of(pod)]

    def container(self, name):
        (found,) = [container for container in self.containers() if container["name"] == name]
        return found

    def labelled(self, selector):
        """The deployments whose pods have these labels."""
        wanted = selector.items()
        deployments = self.all_of("Deployment")
        return [d for d in deployments if wanted <= d["spec"]["template"]["metadata"]["labels"].items()]


VARIANTS = [
    Variant("kustomize", kustomized(())),
    *(Variant(f"kustomize-{component}", kustomized((component,))) for component in COMPONENTS),
    Variant("kustomize-all", kustomized(COMPONENTS)),
    Variant("chart", charted({})),
    Variant("chart-all", charted(ALL_VALUES)),
    Variant("chart-minimal", charted({"picker": {"enabled": False}, "route": {"enabled": False}})),
]


def variant(name):
    (found,) = [variant for variant in VARIANTS if variant.name == name]
    return found


def environment(container):
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


def port_of(deployment, port):
    for container in containers_of(deployment["spec"]["template"]):
        for found in container.get("ports", []):
            if port in (found["name"], found["containerPort"]):
                return found["containerPort"]
    raise AssertionError(f"{deployment['metadata']['name']} has no port {port}")
