"""The JobSet of a training job: its schema, machines and restart policy, and how it is started."""

import json
import re
import string

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.launch import cli, command_words
from memsearcher_jax.launch.pod import jobset
from tests.support import with_flags

FLAGS = ["--image", "europe-docker.pkg.dev/p/r/memsearcher:1", "--config", "qwen7b", "--out", "gs://bucket/runs/a"]
INPUTS = [
    *("--model.path", "/data/m", "--data.train", "/data/q"),
    *("--retrieval.index", "/data/i", "--retrieval.encoder", "/data/e5"),
]
# Copied from Google's tables: hosts per slice, chips per host, machine type, label.
SLICES = {
    "v4:8x16x16": (512, 4, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    "v5e:1x1": (1, 1, "ct5lp-hightpu-1t", "tpu-v5-lite-podslice"),
    "v5e:2x4": (1, 8, "ct5lp-hightpu-8t", "tpu-v5-lite-podslice"),
    "v5e:2x4-4t": (2, 4, "ct5lp-hightpu-4t", "tpu-v5-lite-podslice"),
    "v5e:16x16": (64, 4, "ct5lp-hightpu-4t", "tpu-v5-lite-podslice"),
    "v5p:2x2x2": (2, 4, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    "v6e:4x8": (8, 4, "ct6e-standard-4t", "tpu-v6e-slice"),
    "tpu7x:1x1x1": (1, 1, "tpu7x-standard-1t", "tpu7x"),
    "tpu7x:4x4x8": (32, 4, "tpu7x-standard-4t", "tpu7x"),
}


def argv(topology="v6e:4x8", *more, name="run-a"):
    ours, trainers = command_words.split_passthrough(more)
    return [*with_flags(["--topology", topology, "--name", name, *FLAGS], *ours), "--", *INPUTS, *trainers]


def rendered(*arguments):
    ours, trainers = command_words.split_passthrough(argv(*arguments))
    return yaml.load(jobset.manifest(cli.parse_flags(jobset.Jobset, ours), trainers), Loader=yaml.CSafeLoader)


def slice_job(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod(manifest):
    return slice_job(manifest)["template"]["spec"]


@pytest.fixture(scope="module")
def schema(shared):
    """The schema of a JobSet, whose CRD omits ObjectMeta; the fields in use are listed here."""
    crd = yaml.load((shared / "reference" / "jobset_crd.yaml").read_text(), Loader=yaml.CSafeLoader)
    (version,) = (version for version in crd["spec"]["versions"] if version["name"] == "v1alpha2")
    schema = version["schema"]["openAPIV3Schema"]
    annotations = {"additionalProperties": {"type": "string"}}
    schema["properties"]["metadata"] = {"properties": {"name": {"type": "string"}, "annotations": annotations}}
    schema["properties"]["apiVersion"] = {"const": f"{crd['spec']['group']}/{version['name']}"}
    schema["properties"]["kind"] = {"const": crd["spec"]["names"]["kind"]}
    return schema


def unknown_fields(value, schema):
    """The fields that the schema does not list. Kubernetes drops them without an error."""
    if isinstance(value, list):
        for item in value:
            yield from unknown_fields(item, schema["items"])
    elif isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        yield from value.keys() - known.keys()
        for name in value.keys() & known.keys():
            yield from unknown_fields(value[name], known[name])


def test_the_manifest_is_valid_for_the_jobset_schema(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for topology in SLICES:
        manifest = rendered(topology, "--slices", "2", "--data_claim", "d", "--secret", "s")
        validator.validate(manifest)
        assert list(unknown_fields(manifest, schema)) == []
    misspelt = json.loads(json.dumps(manifest).replace('"nodeSelector": ', '"nodeSelectors": '))
    assert list(unknown_fields(misspelt, schema)) == ["nodeSelectors"]


@pytest.mark.parametrize("topology", SLICES)
def test_a_slice_has_its_hosts_chips_and_labels(topology):
    hosts, chips, machine, label = SLICES[topology]
    manifest = rendered(topology, "--slices", "3")
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 3
    assert (slice_job(manifest)["parallelism"], slice_job(manifest)["completions"]) == (hosts, hosts)
    (container,) = pod(manifest)["containers"]
    assert container["resources"] == {kind: {"google.com/tpu": chips} for kind in ("requests", "limits")}
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology.split(":")[1].removesuffix("-4t"),
        "node.kubernetes.io/instance-type": machine,
    }


def test_data_is_mounted_read_only_and_api_keys_come_from_a_secret():
    manifest = pod(rendered("v6e:4x8", "--data_claim", "wiki", "--secret", "keys", "--grace_seconds", "900"))
    (volume,), (container,) = manifest["volumes"], manifest["containers"]
    (mount,) = container["volumeMounts"]
    assert volume == {"name": mount["name"], "persistentVolumeClaim": {"claimName": "wiki", "readOnly": True}}
    assert (mount["mountPath"], mount["readOnly"]) == ("/data", True)
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert manifest["terminationGracePeriodSeconds"] == 900
    assert pod(rendered())["volumes"] == pod(rendered())["containers"][0]["envFrom"] == []


def test_only_interruptions_restart_the_job():
    """Every other end of a pod, such as 137 of one without memory, fails the job at once."""
    manifest = rendered("v6e:4x8", "--max_restarts", "7")
    evicted, status = slice_job(manifest)["podFailurePolicy"]["rules"]
    assert status["onExitCodes"]["operator"] == "In" and status["onExitCodes"]["values"] == [85]
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert status["action"] == evicted["action"] == "FailJob"
    assert (slice_job(manifest)["backoffLimit"], pod(manifest)["restartPolicy"]) == (0, "Never")
    policy = manifest["spec"]["failurePolicy"]
    interrupted, other = policy["rules"]
    assert (interrupted["action"], interrupted["onJobFailureReasons"]) == ("RestartJobSet", ["PodFailurePolicy"])
    assert (other["action"], policy["maxRestarts"]) == ("FailJobSet", 7)


def expanded(text, environment):
    """Expands $$ and $(NAME) in an argument as Kubernetes does (third_party/forked/golang/expansion)."""

    def replace(match):
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@given(st.text(alphabet=[*"$()A ", *string.ascii_letters]) | st.text(st.characters(exclude_categories=("Cs",))))
def test_every_argument_survives_yaml_and_the_expansion_of_kubernetes(text):
    assert expanded("$(A) $$(A) $A $(B)", {"A": "x"}) == "x $(A) $A $(B)", "the simulation follows Kubernetes"
    flags = jobset.Jobset("v6e:2x2", image="i", name="n", config="qwen7b", out="gs://bucket/a")
    manifest = yaml.load(jobset.manifest(flags, ("--model.path", text)), Loader=yaml.CSafeLoader)
    (container,) = pod(manifest)["containers"]
    expected = ["--config", "qwen7b", "--out", "gs://bucket/a", "--start_or_resume", "--model.path", text]
    assert [expanded(word, {"A": "x"}) for word in container["args"]] == expected


def test_kubectl_gets_the_manifest_and_gives_its_status(fake_program, capsys, refused, tmp_path, monkeypatch):
    recorded = fake_program("kubectl", status=3)
    jobset.main(argv("v5p:2x2x2", "--dry_run"))
    assert yaml.safe_load(capsys.readouterr().out) == rendered("v5p:2x2x2")
    assert not recorded.exists()
    with pytest.raises(SystemExit) as stop:
        jobset.main(argv("v5p:2x2x2", "--slices", "2"))
    assert stop.value.code == 3
    words, text = json.loads(recorded.read_text())
    assert (words, yaml.safe_load(text)) == (["create", "-f", "-"], rendered("v5p:2x2x2", "--slices", "2"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "kubectl is not installed" in refused(jobset.main, argv())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--slices 0", "--slices is 0: it must be at least 1"),
        ("--name Run", "--name 'Run': use at most 47 lower-case letters"),
        (f"--name {'n' * 47} --slices 11", "use at most 46"),
        (f"--config {cli.PRESETS / 'nano.py'}", "the image has no presets besides configs/"),
        ("-- --sampling.tensor 3", "sampling.tensor 3 does not divide the 4 devices of a host"),
        ("-- --mesh.tensor 3", "mesh data=1 fsdp=-1 tensor=3 does not fit 32 devices"),
        ("-- --training.minibatch_rows 40 --mesh.tensor 2", "rows 40 does not divide over 16: choose a multiple of 16"),
        ("--secret Api_keys", "--secret 'Api_keys': Kubernetes names are lower-case letters, digits, hyphens and dots"),
        ("-- --resume", "--resume cannot follow --: put --config and --out before it"),
        ("-- --out=gs://other/a", "--out cannot follow --: put --config and --out before it"),
    ],
)
def test_invalid_flags_are_errors(flags, line, refused):
    assert line in refused(jobset.main, argv("v6e:4x8", *flags.split()))
