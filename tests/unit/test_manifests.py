"""deployments/kubernetes: valid for the real API, and saying the same as docker/compose.yaml and the settings do.

The schemas are Kubernetes' own; no cluster is asked, so that admission, scheduling and the network are not tested.
"""

import re
import shlex
import shutil
import socket
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

from flows.spec import load_job
from paths import REPOSITORY
from tasks.provisioning.arguments import flag_value
from tasks.provisioning.fleet import resolve
from tasks.provisioning.settings import PROVEN_SGLANG, MtpSettings, ServingSettings

KUBERNETES = REPOSITORY / "deployments" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
COMPOSE = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MANIFESTS = [
    manifest for name in KUSTOMIZATION["resources"] for manifest in yaml.safe_load_all((KUBERNETES / name).read_text())
]
VERSIONS = ("1.29", "1.37")


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found  # type: ignore[no-any-return]


def pod(kind: str, name: str) -> dict[str, Any]:
    return manifest(kind, name)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


SGLANG = pod("StatefulSet", "sglang")
WORKER = pod("Deployment", "regen-worker")
SERVING = ServingSettings.model_validate(yaml.safe_load((KUBERNETES / "serving.yaml").read_text())["serving"])
QWEN36 = load_job(REPOSITORY / "deployments" / "qwen36.yaml")


def words(arguments: list[str]) -> list[str]:
    """`--a=b` and `--a b` alike, and variables as compose writes them."""
    split = [word for argument in arguments for word in argument.split("=", 1)]
    return [re.sub(r"\$[({](\w+)[)}]", r"${\1}", word) for word in split]


IN_CLUSTER = words(SGLANG["containers"][0]["args"])
IN_COMPOSE = words(shlex.split(SERVICES["sglang"]["command"]))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_is_valid_for_the_strict_schemas_of_kubernetes(manifest: dict[str, Any], version: str) -> None:
    assert kubernetes_validate.validate(manifest, version, strict=True) == version
    assert "namespace" not in manifest["metadata"]


def test_the_schemas_refuse_a_misspelt_field() -> None:
    wrong = {**manifest("Service", "sglang"), "spec": {"clusterIp": "None"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on this machine")
def test_kubectl_builds_the_kustomization_and_the_result_is_valid() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=True).stdout
    documents = list(yaml.safe_load_all(built))
    assert len(documents) == len(MANIFESTS) + len(KUSTOMIZATION["configMapGenerator"])
    for document in documents:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    (config,) = [d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"]
    (worker,) = [d for d in documents if d["kind"] == "Deployment"]
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert {"configMapRef": {"name": config}} in container["envFrom"]


def test_every_file_beside_the_kustomization_is_in_it_or_is_the_job_files_group() -> None:
    names = {path.name for path in KUBERNETES.iterdir()}
    assert names == {"kustomization.yaml", "serving.yaml", *KUSTOMIZATION["resources"]}


@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "sglang"), ("Deployment", "regen-worker")])
def test_selectors_find_the_pods_they_mean(kind: str, name: str) -> None:
    spec = manifest(kind, name)["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_the_images_are_those_of_compose_and_of_the_proven_version() -> None:
    assert SGLANG["containers"][0]["image"] == SERVICES["sglang"]["image"] == f"lmsysorg/sglang:v{PROVEN_SGLANG}"
    assert WORKER["containers"][0]["image"] == SERVICES["worker"]["image"] == SERVICES["deploy"]["image"]


def test_the_servers_get_the_same_arguments_in_the_cluster_and_in_compose() -> None:
    assert IN_CLUSTER == IN_COMPOSE
    assert IN_CLUSTER[:3] == ["python", "-m", "sglang.launch_server"]
    assert flag_value(IN_CLUSTER, "--host") == "0.0.0.0"
    assert flag_value(IN_CLUSTER, "--api-key") == "${REGEN_API_KEY}"
    assert "--enable-metrics" in IN_CLUSTER
    assert ("--disable-radix-cache" in IN_CLUSTER) is not SERVING.radix_cache


def test_the_model_and_its_revision_are_the_job_files() -> None:
    assert flag_value(IN_CLUSTER, "--model-path") == QWEN36.target.model
    assert flag_value(IN_CLUSTER, "--revision") == QWEN36.target.revision


def test_mtp_is_what_the_settings_say() -> None:
    mtp = MtpSettings()
    assert SERVING.mtp == QWEN36.serving.mtp == mtp
    assert flag_value(IN_CLUSTER, "--speculative-algorithm") == "EAGLE"
    assert flag_value(IN_CLUSTER, "--speculative-num-steps") == str(mtp.steps)
    assert flag_value(IN_CLUSTER, "--speculative-eagle-topk") == str(mtp.topk)
    assert flag_value(IN_CLUSTER, "--speculative-num-draft-tokens") == str(mtp.draft_tokens)


def test_one_port_from_the_server_to_the_job_file() -> None:
    container, service = SGLANG["containers"][0], manifest("Service", "sglang")["spec"]
    (port,) = container["ports"]
    (published,) = service["ports"]
    (allowed,) = manifest("NetworkPolicy", "sglang")["spec"]["ingress"][0]["ports"]
    flag = int(flag_value(IN_CLUSTER, "--port") or 0)
    assert flag == port["containerPort"] == published["port"] == allowed["port"] == 30_000
    assert published["targetPort"] == container["startupProbe"]["httpGet"]["port"] == port["name"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert SERVING.mode == "attach" and SERVING.urls == (f"dns://sglang:{flag}",)


def test_the_name_in_the_job_file_is_a_headless_service_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    service, servers = manifest("Service", "sglang"), manifest("StatefulSet", "sglang")
    assert service["spec"]["clusterIP"] == "None" and servers["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= servers["spec"]["template"]["metadata"]["labels"].items()

    def answer(host: str, port: int, **_: object) -> list[Any]:
        assert host == service["metadata"]["name"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{last}", port)) for last in (7, 5, 6)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert resolve(SERVING.urls) == [f"http://10.0.0.{last}:30000" for last in (5, 6, 7)]


def test_the_key_comes_from_one_secret_to_both_sides() -> None:
    variable = ServingSettings().api_key_env
    assert SERVING.api_key_env == QWEN36.serving.api_key_env == variable
    (key,) = [e for e in SGLANG["containers"][0]["env"] if e["name"] == variable]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "regen", "key": variable}
    assert {"secretRef": {"name": "regen"}} in WORKER["containers"][0]["envFrom"]
    assert variable in SERVICES["worker"]["environment"]


def test_the_worker_is_told_what_compose_tells_it() -> None:
    literals = dict(literal.split("=", 1) for literal in KUSTOMIZATION["configMapGenerator"][0]["literals"])
    told = SERVICES["worker"]["environment"]
    assert literals.keys() <= told.keys()
    secrets = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", ServingSettings().api_key_env}
    text = (KUBERNETES / "kustomization.yaml").read_text()
    assert all(f"--from-literal={name}=" in text for name in secrets)
    assert told.keys() - literals.keys() - secrets == {"AWS_ENDPOINT_URL_S3"}, "its own store; named in a comment"
    mounted = {mount["mountPath"] for mount in WORKER["containers"][0]["volumeMounts"]}
    assert mounted == {"/app/out"} and any(v.endswith(":/app/out") for v in SERVICES["worker"]["volumes"])
    dockerfile = (REPOSITORY / "docker" / "Dockerfile").read_text()
    assert f"--uid {WORKER['securityContext']['runAsUser']} regen" in dockerfile


def test_a_worker_has_the_time_to_journal_and_never_runs_twice() -> None:
    assert f"{WORKER['terminationGracePeriodSeconds']}s" == SERVICES["worker"]["stop_grace_period"]
    spec = manifest("Deployment", "regen-worker")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_a_pod_has_one_gpu_and_shared_memory_of_its_own() -> None:
    assert SGLANG["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert flag_value(IN_CLUSTER, "--tp-size") is None
    (shared,) = [volume for volume in SGLANG["volumes"] if volume["name"] == "shm"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"} and SERVICES["sglang"]["shm_size"] == "16g"
    assert {"name": "shm", "mountPath": "/dev/shm"} in SGLANG["containers"][0]["volumeMounts"]


def test_only_the_worker_reaches_the_servers() -> None:
    policy = manifest("NetworkPolicy", "sglang")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= {"app.kubernetes.io/name": "sglang"}.items()
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    worker = manifest("Deployment", "regen-worker")["spec"]["template"]["metadata"]["labels"]
    assert source["podSelector"]["matchLabels"].items() <= worker.items() and policy["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize("spec", [SGLANG, WORKER], ids=["sglang", "worker"])
def test_a_pod_gets_no_more_rights_than_it_needs(spec: dict[str, Any]) -> None:
    assert not spec["automountServiceAccountToken"] and not spec["enableServiceLinks"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert WORKER["securityContext"]["runAsNonRoot"]


def test_dockerfile_and_manifests_start_the_same_worker() -> None:
    dockerfile = (REPOSITORY / "docker" / "Dockerfile").read_text()
    assert 'CMD ["prefect", "worker", "start", "--pool", "gpu", "--type", "process"]' in dockerfile
    assert not {"args", "command"} & WORKER["containers"][0].keys()
