"""Writes the base job templates of the pools `cpu` and `b200` from the defaults of the installed workers.

`python deployments/pools/write_templates.py` rewrites the JSON files beside it. What differs from Prefect's defaults is
stated here, once; a test holds the files against it, so that an upgrade of a worker shows in them.
"""

from __future__ import annotations

import copy
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect.workers.process import ProcessWorker
from prefect_docker import DockerWorker
from prefect_kubernetes import KubernetesWorker

FOLDER = Path(__file__).resolve().parent
VERSION = version("dflash-pipeline")

CACHE = "/var/lib/dflash"
USER = 10001
SAVE_S = 900
"""Longest time that a stopped training may take to save: 28 GB at 50 MB/s and the step before."""

ENVIRONMENT = {
    "cpu": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    "b200": {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
    },
}
IMAGES = {"cpu": f"dflash-cpu:{VERSION}", "b200": f"dflash-gpu:{VERSION}"}

Template = dict[str, Any]


def make_templates() -> dict[str, Template]:
    """All templates by file name."""
    made = {}
    for pool in IMAGES:
        made[f"process-{pool}.json"] = _with_environment(ProcessWorker.get_default_base_job_template(), pool)
        made[f"docker-{pool}.json"] = make_docker_template(pool)
        made[f"kubernetes-{pool}.json"] = make_kubernetes_template(pool)
    return made


def make_docker_template(pool: str) -> Template:
    """Containers without privileges; those of `b200` see the GPUs and share memory with their ranks."""
    template = _with_environment(DockerWorker.get_default_base_job_template(), pool)
    options: Template = {
        "init": True,  # ends what a flow left behind
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "shm_size": "64g" if pool == "b200" else "1g",
    }
    if pool == "b200":
        options["device_requests"] = [{"driver": "nvidia", "count": -1, "capabilities": [["gpu"]]}]
        options["ulimits"] = [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    _set_defaults(
        template,
        image=IMAGES[pool],
        image_pull_policy="IfNotPresent",
        volumes=[f"dflash-{pool}:{CACHE}"],
        auto_remove=True,
        container_create_kwargs=options,
    )
    return template


def make_kubernetes_template(pool: str) -> Template:
    """Jobs of one pod, never as root, with a claim for caches and checkpoints and the time to save one."""
    template = _with_environment(KubernetesWorker.get_default_base_job_template(), pool)
    _set_defaults(template, image=IMAGES[pool], finished_job_ttl=86_400, pod_watch_timeout_seconds=600)
    _add(template, "cache_claim", "string", f"dflash-{pool}", "PersistentVolumeClaim for caches and checkpoints.")
    _add(template, "shared_memory", "string", "64Gi" if pool == "b200" else "1Gi", "Size of /dev/shm, for the ranks.")
    _add(template, "grace_period_s", "integer", SAVE_S if pool == "b200" else 60, "Seconds to save after SIGTERM.")
    _add(template, "node_selector", "object", {}, "Labels of the nodes that may run this.")
    spec = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    spec |= {
        "terminationGracePeriodSeconds": "{{ grace_period_s }}",
        "nodeSelector": "{{ node_selector }}",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "{{ cache_claim }}"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "{{ shared_memory }}"}},
        ],
    }
    container = spec["containers"][0]
    container |= {
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "cache", "mountPath": CACHE},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - of the container
        ],
    }
    if pool == "b200":
        _add(template, "gpus", "integer", 8, "GPUs of the pod.")
        container["resources"]["limits"]["nvidia.com/gpu"] = "{{ gpus }}"
        _set_defaults(template, node_selector={"nvidia.com/gpu.product": "NVIDIA-B200"})
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return template


def _with_environment(template: Template, pool: str) -> Template:
    template = copy.deepcopy(template)
    _set_defaults(template, env=ENVIRONMENT[pool])
    if pool == "b200":
        text = " CUDA_VISIBLE_DEVICES chooses the GPUs that a run sees, such as 0,1,2,3."
        template["variables"]["properties"]["env"]["description"] += text
    return template


def _set_defaults(template: Template, **defaults: Any) -> None:
    for name, value in defaults.items():
        template["variables"]["properties"][name]["default"] = value


def _add(template: Template, name: str, kind: str, default: object, description: str) -> None:
    title = name.replace("_", " ").title()
    variable = {"type": kind, "default": default, "title": title, "description": description}
    template["variables"]["properties"][name] = variable


def as_text(template: Template) -> str:
    """The file's content."""
    return json.dumps(template, indent=2) + "\n"


if __name__ == "__main__":
    for name, template in make_templates().items():
        (FOLDER / name).write_text(as_text(template))
        sys.stderr.write(f"{name}\n")
