"""Job templates of the pools: what the installed workers make, accepted by them and by what they talk to."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_asyncio.client as kubernetes
import pytest
import yaml
from docker.models.containers import _create_container_args
from jsonschema import Draft202012Validator
from prefect.utilities.templating import apply_values
from prefect.workers.base import BaseJobConfiguration
from prefect_docker.worker import DockerWorkerJobConfiguration
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from dflash.train.run import TrainRun
from embedded.apply_deployments import KINDS
from embedded.stack_set_up import POOLS
from tests.scripts import load_script

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"


def load(kind: str, pool: str) -> dict[str, Any]:
    template: dict[str, Any] = json.loads((DEPLOYMENTS / "pools" / f"{kind}-{pool}.json").read_text())
    return template


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return load_script(DEPLOYMENTS / "pools" / "write_templates.py")


def test_the_files_are_what_the_workers_defaults_give(writer: ModuleType) -> None:
    made = writer.make_templates()
    assert made.keys() == {f"{kind}-{pool}.json" for kind in KINDS for pool in POOLS}
    for name, template in made.items():
        assert (DEPLOYMENTS / "pools" / name).read_text() == writer.as_text(template), (
            f"{name} differs: run `python deployments/pools/write_templates.py` and look at the difference"
        )


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", KINDS)
def test_defaults_obey_the_schema_of_their_variables(kind: str, pool: str) -> None:
    template = load(kind, pool)
    schema = template["variables"]
    Draft202012Validator.check_schema(schema)
    properties = schema["properties"]
    defaults = {name: item["default"] for name, item in properties.items() if item.get("default") is not None}
    assert list(Draft202012Validator(schema).iter_errors(defaults)) == []
    text = json.dumps(template["job_configuration"])
    assert [name for name in properties if f"{{{{ {name} }}}}" not in text] == []


def configuration(kind: type[BaseJobConfiguration], template: dict[str, Any]) -> Any:
    """The job that a run without job variables gets, as the worker makes it, less what it would ask the server."""
    defaults = kind._get_base_config_defaults(template["variables"]["properties"])
    return kind(**apply_values(template["job_configuration"], defaults))


@pytest.mark.parametrize("pool", POOLS)
def test_docker_takes_the_container_options(pool: str) -> None:
    made = configuration(DockerWorkerJobConfiguration, load("docker", pool))
    assert made.image.startswith("dflash-gpu:" if pool == "b200" else "dflash-cpu:")
    assert made.container_create_kwargs is not None
    arguments = _create_container_args(
        {"image": made.image, "version": "1.44", "volumes": made.volumes, **made.container_create_kwargs}
    )
    host = arguments["host_config"]
    assert host["ShmSize"] == (64 if pool == "b200" else 1) * 1024**3
    assert (host["CapDrop"], host["Init"], host["SecurityOpt"]) == (["ALL"], True, ["no-new-privileges:true"])
    assert host["Binds"] == [f"dflash-{pool}:/var/lib/dflash"]
    requests = host.get("DeviceRequests", [])
    assert [(item["Driver"], item["Count"], item["Capabilities"]) for item in requests] == (
        [("nvidia", -1, [["gpu"]])] if pool == "b200" else []
    )


def unknown_fields(value: Any, kind: str, where: str) -> list[str]:
    """Fields of a manifest that the Kubernetes API doesn't know, by its published models."""
    if kind.startswith("list["):
        return [bad for item in value for bad in unknown_fields(item, kind[5:-1], f"{where}[]")]
    model = getattr(kubernetes, kind, None)
    if model is None or not isinstance(value, dict):
        return []
    names = {json_name: python_name for python_name, json_name in model.attribute_map.items()}
    found = []
    for key, item in value.items():
        if key not in names:
            found.append(f"{where}.{key}")
        else:
            found += unknown_fields(item, model.openapi_types[names[key]], f"{where}.{key}")
    return found


@pytest.mark.parametrize("pool", POOLS)
def test_kubernetes_knows_each_field_of_the_job(pool: str) -> None:
    made = configuration(KubernetesWorkerJobConfiguration, load("kubernetes", pool))
    manifest = made.job_manifest
    wrong = json.loads(json.dumps(manifest))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    # Prefect's own template has these two in the wrong place, where Kubernetes passes them over.
    misplaced = {"job.spec.template.spec.parallelism", "job.spec.template.spec.completions"}
    assert set(unknown_fields(manifest, "V1Job", "job")) == misplaced
    assert set(unknown_fields(wrong, "V1Job", "job")) - misplaced == {"job.spec.template.spec.terminationGracePeriod"}
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"cache": "/var/lib/dflash", "shared-memory": "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
    if pool == "b200":
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-B200"}
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert pod["terminationGracePeriodSeconds"] == 900
        assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_a_stopped_training_has_time_to_save(writer: ModuleType) -> None:
    assert TrainRun.model_fields["stop_grace_s"].default <= writer.SAVE_S


def test_every_deployment_goes_to_one_of_the_pools() -> None:
    content = yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())
    assert {item["work_pool"]["name"] for item in content["deployments"]} == set(POOLS)
