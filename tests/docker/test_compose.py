"""The Compose file: read by a strict parser, private, with health checks, without a secret in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from embedded.prefect_api import LocalPrefectApi
from embedded.prefect_settings import client_settings, server_settings

DOCKER = Path(__file__).resolve().parents[2] / "docker"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return content


def test_a_strict_parser_takes_it_and_would_refuse_a_wrong_one(compose: dict[str, Any]) -> None:
    parsed = PyCompose.from_json(json.dumps(compose))
    assert set(parsed.service_names()) == {"postgres", "s3", "server", "deploy", "cpu-worker", "gpu-worker"}
    wrong = json.loads(json.dumps(compose))
    wrong["services"]["s3"]["imagee"] = "x"
    with pytest.raises(ValueError, match="imagee"):
        PyCompose.from_json(json.dumps(wrong))


def test_only_the_ui_is_published_and_on_loopback(compose: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert published == {"server": ["127.0.0.1:4200:4200"]}
    assert compose["networks"]["backend"] == {"internal": True}
    for name in ("postgres", "s3"):
        assert compose["services"][name]["networks"] == ["backend"]


def test_each_secret_comes_from_a_file(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|AUTH|ACCESS_KEY|TOKEN", variable):
                assert variable.endswith("_FILE"), (name, variable)
                assert value.removeprefix("/run/secrets/") in service["secrets"], (name, variable)
        assert "password" not in " ".join(service.get("command", [])).lower()
    assert {secret["file"].split("/")[0] for secret in compose["secrets"].values()} == {"secrets"}
    made = (DOCKER / "make_secrets.sh").read_text()
    assert all(name in made for name in compose["secrets"])
    assert "docker/secrets/" in (DOCKER.parent / ".gitignore").read_text().splitlines()


def test_an_open_server_has_a_password_and_its_clients_know_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["server"]["environment"]["PREFECT_SERVER_API_HOST"] == "0.0.0.0"  # noqa: S104 - of the container
    assert services["server"]["environment"]["PREFECT_SERVER_API_AUTH_STRING_FILE"] == "/run/secrets/prefect_auth"
    for name in ("deploy", "cpu-worker", "gpu-worker"):
        assert services[name]["environment"]["PREFECT_API_AUTH_STRING_FILE"] == "/run/secrets/prefect_auth"


def test_every_service_that_stays_is_checked_and_waited_for(compose: dict[str, Any]) -> None:
    services = compose["services"]
    stays = {name for name, service in services.items() if service.get("restart") == "unless-stopped"}
    assert stays == services.keys() - {"deploy"}
    assert {name for name in stays if "healthcheck" not in services[name]} == set()
    waits = {name: service.get("depends_on", {}) for name, service in services.items()}
    assert waits["server"] == {"postgres": {"condition": "service_healthy"}}
    assert waits["deploy"].keys() == {"server", "s3"}
    assert waits["cpu-worker"] == waits["gpu-worker"] == {"deploy": {"condition": "service_completed_successfully"}}


def test_images_are_pinned_and_run_without_rights(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.search(r":\d+\.\d+", service["image"]), name
        assert "no-new-privileges:true" in service["security_opt"]
        assert name == "postgres" or service["cap_drop"] == ["ALL"]  # PostgreSQL's image drops root by itself
        assert not service.get("privileged", False)


def test_settings_are_those_of_the_embedded_stack(compose: dict[str, Any]) -> None:
    api, services = LocalPrefectApi(4200), compose["services"]
    own = {"PREFECT_API_URL", "PREFECT_LOCAL_STORAGE_PATH"}
    expected = {key: value for key, value in client_settings(api, Path("/x")).items() if key not in own}
    for worker in ("cpu-worker", "gpu-worker"):
        assert expected.items() <= services[worker]["environment"].items()
    own = {"PREFECT_SERVER_API_HOST", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_TIMEOUT"}
    expected = {key: value for key, value in server_settings(api, Path("/x")).items() if key not in own}
    assert expected.items() <= services["server"]["environment"].items()


def test_the_gpu_worker_has_gpus_shared_memory_and_time_to_save(compose: dict[str, Any]) -> None:
    worker = compose["services"]["gpu-worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert worker["shm_size"] == "64gb"
    assert worker["stop_grace_period"] == "15m"


def test_the_store_is_started_as_the_embedded_one() -> None:
    from embedded.seaweedfs import SeaweedConfig, SeaweedState, _arguments

    ports = dict.fromkeys(("s3", "filer", "master", "volume", "admin"), 1)
    state = SeaweedState(access_key_id="a", secret_access_key="b", ports=ports)
    embedded = {item for item in _arguments(Path("/x"), state, SeaweedConfig()) if ".port" not in item}
    text = (DOCKER / "compose.yaml").read_text()
    places = ("-dir=", "-ip=", "-ip.bind=", "-s3.config=")
    assert [item for item in embedded if not item.startswith(places) and f"- {item}\n" not in text] == []
