"""The JobSet of a pod job: valid by the schema of JobSet itself, the right machines, restarted when it should be."""

import json
import re
import string
import sys

import cli
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pod import jobset

FLAGS = ["--image", "europe-docker.pkg.dev/p/r/memsearcher:1", "--config", "qwen7b", "--out", "gs://bucket/runs/a"]
# By hand, from Google's tables: hosts per slice, chips per host, machine, label.
SLICES = {
    "v4:2x2x1": (1, 4, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    "v4:2x2x4": (4, 4, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    "v4:8x16x16": (512, 4, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    "v5e:1x1": (1, 1, "ct5lp-hightpu-1t", "tpu-v5-lite-podslice"),
    "v5e:2x2": (1, 4, "ct5lp-hightpu-4t", "tpu-v5-lite-podslice"),
    "v5e:2x4": (1, 8, "ct5lp-hightpu-8t", "tpu-v5-lite-podslice"),
    "v5e:4x4": (4, 4, "ct5lp-hightpu-4t", "tpu-v5-lite-podslice"),
    "v5e:8x8": (16, 4, "ct5lp-hightpu-4t", "tpu-v5-lite-podslice"),
    "v5e:16x16": (64, 4, "ct5lp-hightpu-4t", "tpu-v5-lite-podslice"),
    "v5p:2x2x2": (2, 4, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    "v5p:4x4x4": (16, 4, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    "v6e:2x4": (1, 8, "ct6e-standard-8t", "tpu-v6e-slice"),
    "v6e:4x8": (8, 4, "ct6e-standard-4t", "tpu-v6e-slice"),
    "v6e:8x16": (32, 4, "ct6e-standard-4t", "tpu-v6e-slice"),
    "tpu7x:2x2x1": (1, 4, "tpu7x-standard-4t", "tpu7x"),
    "tpu7x:4x4x8": (32, 4, "tpu7x-standard-4t", "tpu7x"),
}


def argv(topology="v6e:4x8", *more, name="run-a"):
    return ["--topology", topology, "--name", name, *FLAGS, *more]


def rendered(*words):
    ours, trainers = cli.cut(argv(*words))
    return jobset.manifest(jobset.job(jobset.parser().parse_args(ours), trainers))


def slice_job(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod(manifest):
    return slice_job(manifest)["template"]["spec"]


def listed_keys(value, path=()):
    """The path of every key that the schema lists; keys of free maps, such as labels, are not among them."""
    if isinstance(value, dict):
        for key, one in value.items():
            if path[-1:] not in (("annotations",), ("nodeSelector",), ("requests",), ("limits",)):
                yield (*path, key)
            yield from listed_keys(one, (*path, key))
    if isinstance(value, list):
        for place, one in enumerate(value):
            yield from listed_keys(one, (*path, place))


@pytest.mark.parametrize("topology", SLICES)
@pytest.mark.parametrize("slices", [1, 2, 12])
def test_it_is_a_jobset_by_its_own_schema(topology, slices, validator):
    validator.validate(
        rendered(topology, "--slices", str(slices), "--data_claim", "d", "--secret", "s", "--", "--rl.steps", "9")
    )


def test_the_schema_notices_every_misspelt_field(validator):
    """Each key of the manifest in turn with a letter too many."""
    words = ("v6e:4x8", "--data_claim", "d", "--secret", "s")
    paths = list(listed_keys(rendered(*words)))
    assert len(paths) > 40
    for path in paths:
        manifest = rendered(*words)
        place = manifest
        for step in path[:-1]:
            place = place[step]
        place[f"{path[-1]}s"] = place.pop(path[-1])
        messages = [error.message for error in validator.iter_errors(manifest)]
        assert any(f"'{path[-1]}s' was unexpected" in message for message in messages), path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicatedJobs", 0, "replicas"), "two"),
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "hostNetwork"), "yes"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "args"), "--config"),
        (("apiVersion",), "jobset.x-k8s.io/v1"),
    ],
)
def test_the_schema_notices_wrong_values(path, value, validator):
    manifest = rendered()
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert not validator.is_valid(manifest)


@pytest.mark.parametrize("topology", SLICES)
def test_hosts_chips_and_labels(topology):
    hosts, chips, machine, label = SLICES[topology]
    manifest = rendered(topology, "--slices", "3")
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 3
    assert (slice_job(manifest)["parallelism"], slice_job(manifest)["completions"]) == (hosts, hosts)
    (container,) = pod(manifest)["containers"]
    assert container["resources"] == {kind: {"google.com/tpu": chips} for kind in ("requests", "limits")}
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology.split(":")[1],
        "node.kubernetes.io/instance-type": machine,
    }


def test_every_known_slice_consists_of_whole_hosts_and_stands_there_once():
    for name, one in jobset.known_slices().items():
        assert one.hosts * one.chips_per_host == one.chips, name
        assert len(one.topology.split("x")) == (2 if name.startswith(("v5e", "v6e")) else 3), name
    topologies = re.findall(r'"(\d[\dx]*)"', jobset.TPUS.read_text())
    assert len(jobset.known_slices()) == len(topologies)


def test_what_a_pod_needs_beside_chips():
    manifest = rendered("v6e:4x8", "--grace_seconds", "900")
    assert manifest["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert pod(manifest)["terminationGracePeriodSeconds"] == 900
    assert (pod(manifest)["hostNetwork"], pod(manifest)["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    (container,) = pod(manifest)["containers"]
    assert [one["containerPort"] for one in container["ports"]] == [8471, 8482, 8431]
    assert container["env"] == [{"name": "JAX_PLATFORMS", "value": "tpu,cpu"}]


def test_it_may_lock_memory_and_nothing_else_that_a_container_may_not():
    (container,) = pod(rendered())["containers"]
    allowed = container["securityContext"]
    assert (allowed["privileged"], allowed["allowPrivilegeEscalation"]) == (False, False)
    assert allowed["capabilities"] == {"add": ["SYS_RESOURCE"]}
    assert pod(rendered())["automountServiceAccountToken"] is False


def test_data_is_mounted_where_it_is_asked_for_and_cannot_be_written():
    manifest = rendered("v6e:4x8", "--data_claim", "wiki")
    (volume,), (mount,) = pod(manifest)["volumes"], pod(manifest)["containers"][0]["volumeMounts"]
    assert volume == {"name": mount["name"], "persistentVolumeClaim": {"claimName": "wiki", "readOnly": True}}
    assert (mount["mountPath"], mount["readOnly"]) == ("/data", True)
    assert pod(rendered())["volumes"] == pod(rendered())["containers"][0]["volumeMounts"] == []


def test_keys_come_from_a_secret_and_stand_nowhere():
    (container,) = pod(rendered("v6e:4x8", "--secret", "keys"))["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod(rendered())["containers"][0]["envFrom"] == []


def outcome(manifest, exit_code, condition, restarts):
    """What Kubernetes and JobSet do when a pod fails, by the words of their API: the rules in order, the first counts.

    A pod rule that matches fails the Job for the reason PodFailurePolicy; with a backoffLimit of 0, so does any other
    failure, for BackoffLimitExceeded. A rule of the JobSet without reasons matches any.
    """
    assert slice_job(manifest)["backoffLimit"] == 0
    assert pod(manifest)["restartPolicy"] == "Never"  # podFailurePolicy is refused with any other
    reason = "BackoffLimitExceeded"
    for rule in slice_job(manifest)["podFailurePolicy"]["rules"]:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        assert rule["action"] == "FailJob"
        if codes and codes["operator"] == "In" and exit_code in codes["values"]:
            reason = "PodFailurePolicy"
        if any(one == {"type": condition, "status": "True"} for one in conditions):
            reason = "PodFailurePolicy"
    policy = manifest["spec"]["failurePolicy"]
    rules = [rule for rule in policy["rules"] if reason in rule.get("onJobFailureReasons", [reason])]
    restart = rules[0]["action"] == "RestartJobSet" and restarts < policy["maxRestarts"]
    return "restarts" if restart else "fails"


@pytest.mark.parametrize(
    ("exit_code", "condition", "restarts", "then"),
    [
        (85, None, 0, "restarts"),
        (85, None, 6, "restarts"),
        (85, None, 7, "fails"),
        (1, None, 0, "fails"),  # an exception
        (2, None, 0, "fails"),  # a wrong flag
        (130, None, 0, "fails"),
        (137, None, 0, "fails"),  # out of memory
        (137, "DisruptionTarget", 0, "restarts"),  # evicted, and killed at the end of its grace
        (143, "DisruptionTarget", 6, "restarts"),
        (143, "DisruptionTarget", 7, "fails"),
    ],
)
def test_only_a_stop_from_outside_restarts(exit_code, condition, restarts, then):
    assert outcome(rendered("v6e:4x8", "--max_restarts", "7"), exit_code, condition, restarts) == then


def test_the_trainer_gets_its_flags_as_they_were_written():
    words = ["--model.path", "/models/$(HOME) it's", "--data.train", "a b", "ü.jsonl", "--rl.steps", "9"]
    (container,) = pod(rendered("v6e:4x8", "--", *words))["containers"]
    shown = [word.replace("$$", "$") for word in container["args"]]
    assert shown == ["--config", "qwen7b", "--out", "gs://bucket/runs/a", "--start_or_resume", *words]


def expanded(text, environment):
    """What Kubernetes makes of an argument: $$ is $, $(NAME) a value (third_party/forked/golang/expansion)."""

    def one(match):
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def test_the_expansion_itself():
    assert expanded("$(A) $$(A) $A $(B)", {"A": "x"}) == "x $(A) $A $(B)"


@given(st.text(alphabet=[*"$()A ", *string.ascii_letters]))
def test_no_argument_is_expanded(text):
    assert expanded(jobset.literal(text), {"A": "x"}) == text


@settings(deadline=None)  # YAML is read by Python, which a busy machine may take long for
@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1))
def test_the_text_is_yaml_and_json(path):
    one = jobset.find_slice("v6e:2x2")
    manifest = jobset.manifest(jobset.PodJob("n", "i", one, 1, ("--model.path", path), 1, 1))
    assert json.loads(jobset.as_json(manifest)) == manifest
    assert yaml.safe_load(jobset.as_json(manifest)) == manifest
    assert "EOF" not in jobset.as_shell(manifest).splitlines()[1:-1]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A kubectl that notes what it is told, and the only program that can be found."""
    programs, told = tmp_path / "programs", tmp_path / "told.json"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def install(status):
        source = f"import json, sys\njson.dump([sys.argv[1:], json.load(sys.stdin)], open({str(told)!r}, 'w'))\n"
        file = programs / "kubectl"
        file.write_text(f"#!{sys.executable}\n{source}sys.exit({status})\n")
        file.chmod(0o755)
        return told

    return install


def test_it_is_handed_to_kubectl(kubectl):
    told = kubectl(0)
    jobset.main(argv("v5p:2x2x2", "--slices", "2"))
    assert json.loads(told.read_text()) == [["create", "-f", "-"], rendered("v5p:2x2x2", "--slices", "2")]


def test_the_failure_of_kubectl_is_ours(kubectl):
    kubectl(3)
    with pytest.raises(SystemExit) as stop:
        jobset.main(argv())
    assert stop.value.code == 3


def test_a_dry_run_prints_what_would_run_and_runs_nothing(kubectl, capsys):
    told = kubectl(0)
    jobset.main(argv("v6e:4x8", "--dry-run"))
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("kubectl create -f - <<'EOF'", "EOF")
    assert json.loads("\n".join(lines)) == rendered("v6e:4x8")
    assert not told.exists()


def test_a_manifest_is_written_and_nothing_runs(kubectl, tmp_path, capsys):
    told, file = kubectl(0), tmp_path / "folder" / "a b.json"
    jobset.main(argv("v6e:4x8", "--manifest", str(file)))
    assert yaml.safe_load(file.read_text()) == rendered()
    assert capsys.readouterr().out == f"{file}: start it with kubectl create -f '{file}'\n"
    assert not told.exists()


def test_without_kubectl_it_says_so(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "kubectl is not installed" in refused(jobset.main, argv())


def test_an_unknown_topology_is_answered_with_the_known(refused):
    line = refused(jobset.main, argv("v6e:3x3"))
    assert line.startswith("error: --topology v6e:3x3 is none of v4:2x2x1, ")
    assert all(name in line for name in SLICES)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--slices 0", "--slices is 0: it must be at least 1"),
        ("--slices two", "argument --slices: invalid int value: 'two'"),
        ("--max_restarts -1", "--max_restarts is -1: it must be at least 0"),
        ("--grace_seconds 0", "--grace_seconds is 0"),
        ("--image=", "--image '': give the image"),
        ("--out runs/a", "--out runs/a: name a folder as gs://BUCKET/FOLDER"),
        ("--out gs://bucket", "--out gs://bucket: name a folder"),
        ("--data_claim gs://b", "--data_claim 'gs://b': give the name of a PersistentVolumeClaim"),
        ("--secret a_b", "--secret 'a_b': give the name of a Secret"),
        ("--name Run", "--name 'Run': use lower-case letters"),
        (f"--name {'n' * 48}", "shorten it by 1 characters"),
        ("--config qwen8b", "no preset 'qwen8b'"),
        ("--rl.steps 3", "unrecognized arguments: --rl.steps 3"),
        ("-- --rl.step 3", "no setting '--rl.step': did you mean --rl.steps?"),
        ("-- --rl.steps x", "'x' is no whole number"),
        ("-- --resume", "--resume cannot stand after --: every start goes on with what it finds"),
        ("-- --start_or_resume", "--start_or_resume cannot stand after --"),
        ("-- --out=gs://other/a", "--out cannot stand after --: it stands before the --"),
        ("-- --checkpoint d", "--checkpoint cannot stand after --: name the weights by --model.path"),
        ("-- --help", "--help cannot stand after --"),
        ("--dry-run --manifest f", "not allowed with argument"),
    ],
)
def test_what_it_refuses(flags, line, refused):
    assert line in refused(jobset.main, argv("v6e:4x8", *flags.split()))


def test_the_longest_name_is_taken():
    """63 letters, which a label may have: name, -train-, slice, hyphen, host, and six of Kubernetes' own."""
    jobset.check_name("n" * 47, slices=1, hosts=8)
    with pytest.raises(ValueError, match="shorten it by 2"):
        jobset.check_name("n" * 47, slices=11, hosts=11)
