"""What `deploy/` holds is what Kubernetes, SkyPilot and this program's own command line take.

The schemas of Kubernetes itself are those of `kubernetes-validate`, which knows no KEDA: its two
objects are checked against the few fields of its specification that they use.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from typer.core import TyperGroup

from farcast.cli.main import app
from farcast.fleet.presets import PRESETS
from farcast.fleet.scaling import Limits
from farcast.gateway.advice_process import Advice
from farcast.gateway.tokens import SHORTEST

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SKYPILOT = DEPLOY / "skypilot" / "replicas.yaml"
VERSIONS = ("1.29", kubernetes_validate.latest_version())
USAGE_ERROR = typer.BadParameter.__mro__[1]
"""Of whatever click it is that typer uses."""

FOREIGN = "keda.sh/v1alpha1"
SECRETS = {
    "farcast-store": {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"},
    "farcast-tokens": {"relay", "advise", "replica"},
}

Object = Mapping[str, Any]


def objects() -> list[Object]:
    found = []
    for path in sorted(KUBERNETES.glob("*.yaml")):
        found += [one for one in yaml.safe_load_all(path.read_text()) if one is not None]
    return found


OBJECTS = objects()


def named(kind: str, name: str) -> Object:
    (found,) = [o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def ids(value: object) -> str:
    return f"{value['kind']}-{value['metadata']['name']}" if isinstance(value, dict) else ""


class Pod(NamedTuple):
    owner: Object
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


PODS = [Pod(o, o["spec"]["template"]["spec"]) for o in OBJECTS if "template" in o.get("spec", {})]
PARAMETRISED = pytest.mark.parametrize("pod", PODS, ids=lambda pod: ids(pod.owner))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("one", [o for o in OBJECTS if o["apiVersion"] != FOREIGN], ids=ids)
def test_kubernetes_takes_it(one: Object, version: str) -> None:
    kubernetes_validate.validate(dict(one), version, strict=True)


def test_the_validator_refuses_what_is_wrong() -> None:
    one = dict(named("Deployment", "farcast-worker"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**one, "specs": {}}, VERSIONS[0], strict=True)


# --- command lines ---------------------------------------------------------------------------


def parse(arguments: list[str]) -> None:
    """What the real command line makes of it, up to the point where it would begin to work."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    with group.make_context("farcast", list(arguments[1:]), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, arguments[1:])
        assert command is not None
        command.make_context(name, rest, parent=context)


def expanded(text: str, values: Mapping[str, str]) -> str:
    """As Kubernetes does it in arguments and a shell in scripts; a name without a value fails."""
    return re.sub(r"\$\((\w+)\)|\$(\w+)", lambda m: values[m[1] or m[2]], text)


def command_lines(text: str) -> Iterator[str]:
    """Every `farcast ...` of a script, without what a shell would do after it."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        found = re.search(r"(?:^|\s)(farcast .*?)(?:&|;|$)", re.sub(r"(^|\s)#.*", "", line))
        if found:
            yield found[1]


def environment(container: Object) -> dict[str, str]:
    values = {entry["name"]: entry.get("value", "10.0.0.1") for entry in container.get("env", ())}
    for source in container["envFrom"]:
        if "configMapRef" in source:
            values |= named("ConfigMap", source["configMapRef"]["name"])["data"]
        else:
            values |= dict.fromkeys(SECRETS[source["secretRef"]["name"]], "secret")
    return values


@PARAMETRISED
def test_every_command_line_is_one(pod: Pod) -> None:
    for container in pod.containers:
        values = environment(container)
        if container["command"] == ["farcast"]:
            parse(["farcast", *(expanded(a, values) for a in container["args"])])
            continue
        (script,) = container["args"]
        lines = list(command_lines(script))
        assert lines
        for line in lines:
            parse(shlex.split(expanded(line, values)))


def test_a_wrong_option_would_be_found() -> None:
    with pytest.raises(USAGE_ERROR, match="--stor"):
        parse(["farcast", "worker", "--stor", "x"])
    with pytest.raises(KeyError):
        expanded("$(NOWHERE)", {})


# --- what hangs together ---------------------------------------------------------------------


@PARAMETRISED
def test_a_pod_can_do_no_more_than_it_needs(pod: Pod) -> None:
    spec = pod.spec
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod.containers:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]["memory"]


@PARAMETRISED
def test_secrets_are_named_and_never_written(pod: Pod) -> None:
    for volume in pod.spec.get("volumes", ()):
        if "secret" in volume:
            keys = {item["key"] for item in volume["secret"]["items"]}
            assert keys <= SECRETS[volume["secret"]["secretName"]]
    for container in pod.containers:
        mounts = {m["mountPath"] for m in container.get("volumeMounts", ())}
        told = " ".join(container["args"])
        for file in re.findall(r"token-file[= ](\S+)", told):
            assert str(Path(file).parent) in mounts
        for entry in container.get("env", ()):
            assert not re.search("KEY|TOKEN|SECRET", entry["name"])


def test_nothing_in_the_files_looks_like_a_secret() -> None:
    for path in DEPLOY.rglob("*.yaml"):
        assert not re.search(r"kind: Secret\b", path.read_text())
        assert not re.search(r"[A-Za-z0-9+/_-]{40,}={0,2}$", path.read_text(), re.M)
    assert "openssl rand -hex 32" in (KUBERNETES / "settings.yaml").read_text()
    assert SHORTEST <= 64


@PARAMETRISED
def test_what_runs_for_long_is_probed_and_leaves_in_time(pod: Pod) -> None:
    if pod.owner["kind"] == "Job":
        return
    (container,) = pod.spec["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert probe in container
        port = container[probe].get("httpGet", {}).get("port")
        assert port is None or port in [p["name"] for p in container["ports"]]
    told = re.search(r"drain-seconds[= ](\d+)", " ".join(container["args"]))
    grace = pod.spec.get("terminationGracePeriodSeconds", 30)
    assert told is None or grace > int(told[1])
    assert (
        pod.owner["spec"]["selector"]["matchLabels"]
        == (pod.owner["spec"]["template"]["metadata"]["labels"])
    )


def test_selectors_find_a_pod_and_services_a_port() -> None:
    labels = [o["spec"]["template"]["metadata"]["labels"] for o in (pod.owner for pod in PODS)]
    for one in OBJECTS:
        spec = one.get("spec", {})
        if one["kind"] == "Service":
            (pod,) = [
                p
                for p in PODS
                if p.owner["spec"]["template"]["metadata"]["labels"] == spec["selector"]
            ]
            ports = {p["name"]: p["containerPort"] for p in pod.spec["containers"][0]["ports"]}
            for port in spec["ports"]:
                assert ports[port["targetPort"]] == port["port"]
                assert f"--port={port['port']}" in pod.spec["containers"][0]["args"]
        if one["kind"] == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"] in labels
        if one["kind"] == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"] in labels
    data = named("ConfigMap", "farcast")["data"]
    relay = named("Service", "farcast-relay")
    assert data["RELAY"] == f"http://farcast-relay:{relay['spec']['ports'][0]['port']}"
    assert data["MODEL"] in PRESETS


# --- KEDA ------------------------------------------------------------------------------------

TEXT = {"type": "string"}
METRICS_API = ("url", "valueLocation", "targetValue", "activationTargetValue", "authMode")
SCALED_OBJECT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["scaleTargetRef", "triggers"],
    "properties": {
        "scaleTargetRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"kind": {"type": "string"}, "name": {"type": "string"}},
        },
        "pollingInterval": {"type": "integer"},
        "minReplicaCount": {"type": "integer"},
        "maxReplicaCount": {"type": "integer"},
        "advanced": {"type": "object"},
        "triggers": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["type", "metadata"],
                "properties": {
                    "type": {"const": "metrics-api"},
                    "metricType": {"enum": ["AverageValue", "Value", "Utilization"]},
                    "metadata": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["url", "valueLocation", "targetValue"],
                        "properties": {name: TEXT for name in METRICS_API},
                    },
                    "authenticationRef": {"type": "object", "required": ["name"]},
                },
            },
        },
    },
}
TRIGGER_AUTHENTICATION = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "secretTargetRef": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["parameter", "name", "key"],
                "properties": {name: TEXT for name in ("parameter", "name", "key")},
            },
        }
    },
}


def test_the_autoscaler_asks_for_what_farcast_says() -> None:
    scaled = named("ScaledObject", "farcast-worker")["spec"]
    login = named("TriggerAuthentication", "farcast-advise")["spec"]
    jsonschema.validate(scaled, SCALED_OBJECT)
    jsonschema.validate(login, TRIGGER_AUTHENTICATION)
    assert {o["apiVersion"] for o in OBJECTS if o["kind"] in ("ScaledObject",)} == {FOREIGN}
    target = named(scaled["scaleTargetRef"]["kind"], scaled["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"]  # or each apply would undo the autoscaler's work
    (trigger,) = scaled["triggers"]
    told = trigger["metadata"]
    service = named("Service", "farcast-advise")
    port = service["spec"]["ports"][0]["port"]
    assert told["url"] == f"http://farcast-advise:{port}/wanted"
    assert (told["authMode"], told["targetValue"]) == ("bearer", "1")
    (secret,) = login["secretTargetRef"]
    assert secret["parameter"] == "token"
    assert secret["key"] in SECRETS[secret["name"]]
    arguments = named("Deployment", "farcast-advise")["spec"]["template"]["spec"]["containers"][0]
    assert f"--max={scaled['maxReplicaCount']}" in arguments["args"]
    assert f"--prefix={target['metadata']['name']}-" in arguments["args"]


def test_the_field_that_the_autoscaler_reads_is_in_the_answer() -> None:
    from farcast.fleet.advising import Advisor
    from farcast.store import MemoryStore

    limits = Limits(least=3)
    advice = Advice(Advisor(MemoryStore(), limits, tell=print), limits, "")
    (trigger,) = named("ScaledObject", "farcast-worker")["spec"]["triggers"]
    assert advice.answer()[trigger["metadata"]["valueLocation"]] == 3


# --- scripts ---------------------------------------------------------------------------------

STAND_IN = """#!/bin/bash
name=$1; shift
echo "$name up" >> "$BOOK"
trap 'echo "$name asked" >> "$BOOK"; sleep 0.3; echo "$name left" >> "$BOOK"; exit 0' TERM
while [ ! -e "$BOOK.$name" ]; do sleep 0.02; done
exit 7
"""


def replica_script(folder: Path) -> subprocess.Popen[bytes]:
    """The script of a replica's container over stand-ins for vLLM and farcast."""
    (pod,) = [p for p in PODS if p.owner["metadata"]["name"] == "farcast-replica"]
    (script,) = pod.spec["containers"][0]["args"]
    (folder / "stand-in").write_text(STAND_IN)
    (folder / "stand-in").chmod(0o755)
    for program, name in (("python", "engine"), ("farcast", "sidecar")):
        path = folder / program
        path.write_text(f'#!/bin/sh\nexec {folder}/stand-in {name} "$@"\n')
        path.chmod(0o755)
    values = {"PATH": f"{folder}:{os.environ['PATH']}", "BOOK": str(folder / "book")}
    values |= {"STORE": "s", "POD": "p", "POD_IP": "1.2.3.4", "RELAY": "r"}
    process = subprocess.Popen(["bash", "-c", script], env=values)
    until = time.monotonic() + 10
    while not (folder / "book").exists() or (folder / "book").read_text().count("up") < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def test_a_replica_that_is_asked_to_leave_finishes_before_its_engine_goes(tmp_path: Path) -> None:
    process = replica_script(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    said = (tmp_path / "book").read_text().splitlines()[2:]
    assert said == ["sidecar asked", "sidecar left", "engine asked", "engine left"]


@pytest.mark.parametrize("lost", ["engine", "sidecar"])
def test_engine_and_sidecar_are_replaced_together(tmp_path: Path, lost: str) -> None:
    process = replica_script(tmp_path)
    (tmp_path / f"book.{lost}").touch()
    assert process.wait(10) == 1
    other = "sidecar" if lost == "engine" else "engine"
    assert f"{other} left" in (tmp_path / "book").read_text()


@pytest.mark.parametrize("used", [True, False])
def test_a_trainer_begins_or_goes_on(tmp_path: Path, used: bool) -> None:
    (pod,) = [p for p in PODS if p.owner["kind"] == "Job"]
    (script,) = pod.spec["containers"][0]["args"]
    run = tmp_path / "run"
    run.mkdir()
    if used:
        (run / "config.json").touch()
    (tmp_path / "farcast").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "farcast").chmod(0o755)
    said = subprocess.run(
        ["sh", "-c", script.replace("/work/", f"{tmp_path}/")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "m", "STORE": "s"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ("--resume" in said) is used
    assert ("--store s" in said) is not used


# --- SkyPilot --------------------------------------------------------------------------------

ANYTHING = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
TASK = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "resources", "setup", "run"],
    "properties": {
        "name": {"type": "string"},
        "setup": {"type": "string"},
        "run": {"type": "string"},
        "envs": ANYTHING,
        "secrets": ANYTHING,
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "object", "additionalProperties": {"type": "integer"}},
                "cpus": {"type": "string"},
                "memory": {"type": "string"},
                "disk_size": {"type": "integer"},
                "use_spot": {"const": True},
                "any_of": {
                    "type": "array",
                    "minItems": 2,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"infra": {"pattern": r"^[a-z]+/[a-z0-9-]+$"}},
                    },
                },
                "job_recovery": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "strategy": {"enum": ["EAGER_NEXT_REGION", "FAILOVER"]},
                        "max_restarts_on_errors": {"type": "integer"},
                    },
                },
            },
        },
    },
}


def test_skypilot_takes_it_and_its_commands_are_ours() -> None:
    """The fields are those of SkyPilot's own schema that the example uses."""
    task = yaml.safe_load(SKYPILOT.read_text())
    jsonschema.validate(task, TASK)
    values = {**task["envs"], **dict.fromkeys(task["secrets"], "secret")}
    (line,) = command_lines(task["run"])
    parse(shlex.split(expanded(line, values)))
    assert all(value is None for value in task["secrets"].values())
    told = re.findall(r"--(?:env|secret) (\w+)", SKYPILOT.read_text())
    assert set(told) <= values.keys()


# --- the page about it -----------------------------------------------------------------------

PAGE = (DEPLOY.parent / "docs" / "fleet.md").read_text()


def test_the_page_shows_commands_that_exist_and_every_file() -> None:
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", PAGE, re.S | re.M))
    lines = list(command_lines(blocks))
    assert len(lines) >= 10
    for line in lines:
        parse(shlex.split(line))
    for path in KUBERNETES.glob("*.yaml"):
        assert f"`{path.name}`" in PAGE
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (DEPLOY.parent / "docs" / target).exists()


def test_the_page_states_the_policys_own_numbers() -> None:
    from farcast.fleet.crew import HUNG_SECONDS
    from farcast.fleet.leases import DEAD_SECONDS, SILENT_SECONDS
    from farcast.fleet.restarts import MOST
    from farcast.store import relayed

    limits = Limits()
    assert f"(1 + {limits.headroom})" in PAGE
    assert f"over {limits.tolerated_waiting:.0%}".replace("%", " %") in PAGE
    assert f"over {limits.tolerated_stale:.0%}".replace("%", " %") in PAGE
    assert (limits.calm_seconds, DEAD_SECONDS + HUNG_SECONDS, MOST) == (180, 120, 3)
    assert (SILENT_SECONDS, DEAD_SECONDS) == (10, 60)
    assert (relayed.AWAY_SECONDS, relayed.LONGEST_AWAY_SECONDS) == (5, 60)
    assert (relayed.DISTRUST_SECONDS, relayed.PATIENCE_SECONDS) == (300, 30)


def test_the_metrics_that_the_page_names_are_exported() -> None:
    from farcast.gateway.advice_process import _HELP

    named = set(re.findall(r"`farcast_(\w+)`", PAGE))
    assert named
    assert named <= _HELP.keys()
