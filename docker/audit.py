"""Lists the components of an environment and the known vulnerabilities among them.

`python docker/audit.py --of .venv/bin/python --limit-s 15 --sbom build/sbom.json`, run in an environment of its own
that `make audit` makes: the tools bring a grammar of URLs that every process importing Prefect would compile.

Where the advisory service doesn't answer, which a release known to be vulnerable shows, or not in time, it says so and
succeeds: a network must not stop a build. A vulnerability with a fixed release ends it with 1; one without is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CANARY = "requests==2.19.0"
"""A release with published advisories: a service that knows none of them answers nothing of use."""


def main(arguments: list[str] | None = None) -> int:
    """Audit the environment of this interpreter; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-s", type=float, default=120.0, help="longest time for asking the advisory service")
    parser.add_argument("--sbom", type=Path, help="CycloneDX file to write")
    parser.add_argument("--of", type=Path, default=Path(sys.executable), help="interpreter of the environment to audit")
    args = parser.parse_args(arguments)
    if args.sbom is not None:
        write_sbom(args.sbom, args.of)
    deadline = time.monotonic() + args.limit_s
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "requirements.txt"
        canary.write_text(CANARY + "\n")
        known = ask(["--requirement", str(canary), "--no-deps", "--disable-pip"], deadline)
    if known is None or not findings(known):
        return say("audit skipped: the advisory service does not answer from here, or not in time")
    found = ask(["--path", packages_of(args.of)], deadline)
    if found is None:
        return say(f"audit skipped: the advisory service took longer than {args.limit_s:.0f} s")
    return judge(found)


def packages_of(interpreter: Path) -> str:
    """Folder of the packages of an environment."""
    ask_for = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run([str(interpreter), "-c", ask_for], capture_output=True, text=True, check=True).stdout.strip()


def write_sbom(path: Path, interpreter: Path) -> None:
    """Write what is installed as a CycloneDX document, the same for the same packages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    form = ["--output-reproducible", "--no-validate", "--of", "JSON", "-o", str(path)]
    subprocess.run(
        [program("cyclonedx-py"), "environment", *form, str(interpreter)], check=True, stderr=subprocess.DEVNULL
    )
    say(f"{len(json.loads(path.read_text())['components'])} components in {path}")


def ask(arguments: list[str], deadline: float) -> dict[str, Any] | None:
    """What `pip-audit` found, None without an answer."""
    command = [program("pip-audit"), "--format", "json", "--progress-spinner", "off", *arguments]
    try:
        limit_s = max(0.1, deadline - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return answer


def findings(answer: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Package with version, advisory, and the releases that mend it."""
    return [
        (f"{item['name']} {item['version']}", advisory["id"], advisory["fix_versions"])
        for item in answer["dependencies"]
        for advisory in item.get("vulns", [])
    ]


def judge(answer: dict[str, Any]) -> int:
    """Print what was found; 1 where something can be mended."""
    found = findings(answer)
    for package, advisory, fixes in found:
        say(f"{package}: {advisory}, " + (f"mended in {', '.join(fixes)}" if fixes else "no release mends it yet"))
    audited = sum("vulns" in item for item in answer["dependencies"])
    say(f"{audited} packages audited, {len(found)} advisories")
    return int(any(fixes for _, _, fixes in found))


def program(name: str) -> str:
    """A tool of this very environment."""
    return str(Path(sys.executable).with_name(name))


def say(line: str) -> int:
    """Print a line; 0, as exit code."""
    sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
