"""`treadle launch`: what the scripts say to their cluster, and what they do, with stand-ins for srun, ssh and treadle on the PATH.

The stand-ins record how they were called; a script of the test decides how they end. The manifests are checked against Kubernetes' own
schemas.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # ships no types
import pytest
import yaml
from click.testing import CliRunner, Result

from treadle.launch.cli import main, treadle

RUN = """
output = "/data/run"
data.sources = "shards/{000..007}.tar"
[trainer]
depth = 1
hidden = 128
schedule.steps = 10
batch = {max_rows_per_device = 2, max_segments_per_device = 8, max_columns_per_row = 64}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run file.toml"  # a blank: every place that names it must quote it
    path.write_text(RUN)
    return path


def launch(*arguments: object) -> Result:
    return CliRunner().invoke(treadle, ["launch", *map(str, arguments)])


def script(*arguments: object) -> str:
    result = launch(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def stand_in(folder: Path, name: str, body: str) -> None:
    """An executable that is found before the real one."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    return folder


def start(text: str, tools: Path, **environment: str) -> "subprocess.Popen[str]":
    path = tools / "script"
    path.write_text(text)
    variables = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tools), "SLURM_JOB_ID": "42"} | environment
    return subprocess.Popen(["bash", str(path)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


class TestSlurm:
    def directives(self, text: str) -> dict[str, str]:
        """The options that sbatch reads: those before the first command, one a line."""
        found: dict[str, str] = {}
        for line in text.splitlines()[1:]:
            if line and not line.startswith("#"):
                break
            if line.startswith("#SBATCH "):
                name, _, value = line.removeprefix("#SBATCH --").partition("=")
                found[name] = value
        return found

    def test_what_it_asks_for(self, config: Path) -> None:
        text = script(
            "slurm", config, "--nodes", 4, "--gpus", 8, "--cpus", 12, "--time", "2-00", "--partition", "h200", "--account", "team",
            "--option=--qos=high", "--grace", 120, "--name", "wide-run",
        )  # fmt: skip
        assert self.directives(text) == {
            "job-name": "wide-run",
            "nodes": "4",
            "ntasks-per-node": "8",
            "gpus-per-node": "8",
            "cpus-per-task": "12",
            "time": "2-00",
            "output": "%x-%j.log",
            "open-mode": "append",
            "requeue": "",
            "signal": "B:USR1@120",
            "partition": "h200",
            "account": "team",
            "qos": "high",
        }
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0

    def test_the_command_and_where_it_runs(self, config: Path, tools: Path, tmp_path: Path) -> None:
        place = tmp_path / "work folder"
        place.mkdir()
        stand_in(tools, "srun", f'printf "%s\\n" "$PWD" "$READY" "$@" > {shlex.quote(str(tmp_path / "called"))}')
        text = script("slurm", config, "--cpus", 3, "--directory", place, "--setup", "export READY=yes")
        assert finish(start(text, tools)) == (0, "", "")
        assert (tmp_path / "called").read_text().splitlines() == [
            str(place),
            "yes",
            "--kill-on-bad-exit=1",
            "--cpus-per-task=3",
            "treadle",
            "train",
            str(config),
            "--auto-resume",
        ]

    @pytest.mark.parametrize(
        ("codes", "restarts", "code", "starts"),
        [
            ([0], 3, 0, 1),
            ([137, 1, 0], 3, 0, 3),  # two failures, then well
            ([137, 137, 137], 2, 137, 3),  # no more starts left
            ([1], 0, 1, 1),
            ([2, 0], 3, 2, 1),  # a wrong configuration does not get better
        ],
    )
    def test_failures_start_again(
        self, config: Path, tools: Path, tmp_path: Path, codes: list[int], restarts: int, code: int, starts: int
    ) -> None:
        left = tmp_path / "codes"
        left.write_text("".join(f"{number}\n" for number in codes))
        stand_in(tools, "srun", f'cd "{tmp_path}"; code=$(head -1 codes); sed -i 1d codes; echo start >> starts; exit $code')
        ended, _, err = finish(start(script("slurm", config, "--max-restarts", restarts), tools))
        assert ended == code
        assert (tmp_path / "starts").read_text().split() == ["start"] * starts
        assert ("the run failed" in err) == (code not in (0, 2))

    @pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
    def test_the_time_limit_saves_and_queues_again(
        self, config: Path, tools: Path, tmp_path: Path, number: signal.Signals, requeued: bool
    ) -> None:
        stand_in(
            tools,
            "srun",
            f'cd "{tmp_path}"; trap "echo saved > saved; exit 0" TERM; echo $$ > running.part; mv running.part running; while :; do read -t 1 <> <(:); done',
        )
        stand_in(tools, "scontrol", f'echo "$@" > "{tmp_path}/scontrol"')
        # Signalling srun kills its ranks, so the script asks SLURM to signal them.
        stand_in(tools, "scancel", f'[ "$*" = "--quiet --signal=TERM 42" ] && kill -TERM $(cat "{tmp_path}/running")')
        process = start(script("slurm", config), tools)
        while not (tmp_path / "running").exists():
            assert process.poll() is None
        process.send_signal(number)
        assert finish(process)[0] == 0
        assert (tmp_path / "saved").read_text() == "saved\n"
        assert (tmp_path / "scontrol").exists() == requeued
        if requeued:
            assert (tmp_path / "scontrol").read_text() == "requeue 42\n"

    def test_more_ranks_than_lanes_are_refused_before_they_queue(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["launch", "slurm", str(config), "--nodes", "16", "--gpus", "8"])
        assert ended.value.code == 2
        assert "data.lanes is 64, fewer than 16 x 8 = 128 ranks: set data.lanes to 128 or a multiple" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--time", "soon"], "'soon': it must be minutes, HH:MM:SS or DAYS-HH"),
            (["--name", "Big Run"], "'Big Run': it must be lower-case letters, digits and hyphens"),
            (["--partition", "a\n#SBATCH --uid=0"], "it must be one line"),
            (["--option", "qos=high"], "an sbatch option begins with a hyphen"),
            (["--nodes", "0"], "0 is not in the range 1<=x<=65536"),
        ],
    )
    def test_refusals(self, config: Path, arguments: list[str], message: str) -> None:
        result = launch("slurm", config, *arguments)
        assert result.exit_code == 2
        assert message in result.output

    def test_a_wrong_configuration_is_told_with_its_line(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config.write_text(RUN.replace("depth", "dephts"))
        with pytest.raises(SystemExit) as ended:
            main(["launch", "slurm", str(config)])
        assert ended.value.code == 2
        assert "trainer.dephts is not a key of trainer: did you mean 'depth'?" in capsys.readouterr().err


class TestKubernetes:
    def manifests(self, *arguments: object) -> list[dict[str, Any]]:
        return list(yaml.safe_load_all(script("kubernetes", *arguments)))

    def test_the_schemas_of_kubernetes_hold(self, config: Path) -> None:
        config_map, job_set = self.manifests(
            config,
            "--image",
            "registry.example/treadle:1",
            "--claim",
            "runs",
            "--nodes",
            4,
            "--gpus",
            8,
            "--name",
            "wide",
            "--namespace",
            "ml",
        )
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(config_map, version, strict=True)
        # The set's own part, by the JobSet reference (jobset.x-k8s.io/v1alpha2); the job in it is Kubernetes' own.
        assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert job_set["metadata"] == {"name": "wide", "namespace": "ml"}
        spec = job_set["spec"]
        assert spec.keys() == {"network", "successPolicy", "failurePolicy", "replicatedJobs"}
        assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "wide"}
        assert spec["failurePolicy"] == {"maxRestarts": 3} and spec["successPolicy"] == {"operator": "All"}
        [replicated] = spec["replicatedJobs"]
        assert replicated.keys() == {"name", "replicas", "template"}
        job: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "wide"}, **replicated["template"]}
        kubernetes_validate.validate(job, version, strict=True)
        assert (job["spec"]["parallelism"], job["spec"]["completions"], job["spec"]["completionMode"]) == (4, 4, "Indexed")

    def test_what_a_pod_runs(self, config: Path) -> None:
        config_map, job_set = self.manifests(
            config, "--image", "i", "--claim", "runs", "--nodes", 2, "--gpus", 4, "--name", "two", "--port", 3000
        )
        assert tomllib.loads(config_map["data"]["run.toml"]) == tomllib.loads(RUN)
        pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert container["command"] == [
            "treadle", "train", "/etc/treadle/run.toml", "--auto-resume", "--nodes", "2", "--node-rank", "$(NODE_RANK)",
            "--rendezvous", "two-node-0-0.two:3000", "--workers.processes", "4",
        ]  # fmt: skip
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
        assert container["resources"]["requests"]["cpu"] == 4 * 8
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"config": "/etc/treadle", "output": "/data", "shared-memory": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)

    def test_an_output_outside_the_claim_is_refused(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["launch", "kubernetes", str(config), "--image", "i", "--claim", "c", "--mount", "/elsewhere"])
        assert ended.value.code == 2
        assert "output is /data/run: it must lie below /elsewhere, where the claim c is mounted" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--claim", "c"], "Missing option '--image'"),
            (["--image", "i", "--claim", "A b"], "'A b': it must be a claim's name"),
            (["--image", "i", "--claim", "c", "--memory", "much"], "it must be a quantity such as 512Gi"),
        ],
    )
    def test_refusals(self, config: Path, arguments: list[str], message: str) -> None:
        result = launch("kubernetes", config, *arguments)
        assert result.exit_code == 2
        assert message in result.output


class TestSsh:
    @pytest.fixture
    def machines(self, tools: Path, tmp_path: Path) -> Path:
        """ssh that runs the command here, and a treadle that records its words and ends as the file `ends` says for its node."""
        log = tmp_path / "log"
        log.mkdir()
        stand_in(
            tools,
            "ssh",
            'while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done; host=$1; shift; exec sh -c "HOST=$host; export HOST; $*"',
        )
        stand_in(
            tools,
            "treadle",
            f'trap "echo saved >> {log}/saved; exit 0" TERM\n'
            f'printf "%s\\n" "$HOST" "$PWD" "$@" > "{log}/$HOST.part"; mv "{log}/$HOST.part" "{log}/$HOST"\n'
            f'[ -e "{log}/fails.$HOST" ] && exec fail\n'
            f'if [ -e "{log}/end.$HOST" ]; then exit "$(cat "{log}/end.$HOST")"; fi\n'
            "while :; do read -t 1 <> <(:); done",
        )
        return log

    def test_every_machine_gets_its_number(self, config: Path, tools: Path, machines: Path, tmp_path: Path) -> None:
        for host in ("a", "u@b"):
            (machines / f"end.{host}").write_text("0")
        text = script("ssh", config, "--hosts", "a,u@b", "--gpus", 2, "--name", tmp_path.name.replace("_", "-"), "--directory", tmp_path)
        assert finish(start(text, tools))[0] == 0
        for rank, host in enumerate(("a", "u@b")):
            assert (machines / host).read_text().splitlines() == [
                host, str(tmp_path), "train", str(config), "--auto-resume", "--nodes", "2", "--node-rank", str(rank), "--rendezvous", "a:29400",
                "--workers.processes", "2", "--workers.max-restarts", "3",
            ]  # fmt: skip

    @pytest.mark.parametrize("hosts", ["a,b", "b,a"])
    def test_one_failure_stops_the_others_and_is_named(self, config: Path, tools: Path, machines: Path, tmp_path: Path, hosts: str) -> None:
        stand_in(tools, "fail", f'while [ ! -e "{machines}/a" ]; do read -t 0.1 <> <(:); done; exit 7')
        (machines / "fails.b").touch()
        code, _, err = finish(start(script("ssh", config, "--hosts", hosts, "--name", tmp_path.name.replace("_", "-")), tools))
        assert code == 7, err
        assert f"treadle: b (node {hosts.split(',').index('b')}) ended with exit code 7" in err
        assert (machines / "saved").read_text() == "saved\n"  # a's

    def test_a_stop_reaches_every_machine(self, config: Path, tools: Path, machines: Path, tmp_path: Path) -> None:
        process = start(script("ssh", config, "--hosts", "a,b", "--name", tmp_path.name.replace("_", "-")), tools)
        while not ((machines / "a").exists() and (machines / "b").exists()):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 0
        assert (machines / "saved").read_text() == "saved\n" * 2

    @pytest.mark.parametrize(
        ("hosts", "message"), [("a,a", "name each machine once"), ("a;reboot", "a machine is NAME or USER@NAME"), (",", "name each")]
    )
    def test_refusals(self, config: Path, hosts: str, message: str) -> None:
        result = launch("ssh", config, "--hosts", hosts)
        assert result.exit_code == 2
        assert message in result.output


def test_a_script_is_written_to_a_file(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "job.sh"
    assert script("slurm", config, "--out", out) == f"wrote {out}; start the run with: sbatch {out}\n"
    assert out.read_text() == script("slurm", config)
    assert not re.search(r"@[a-z_]+@", out.read_text())
    assert json.dumps(RUN)  # the configuration is text that JSON, and so YAML, can hold


def test_no_file_of_a_run_lies_where_others_may_write(config: Path) -> None:
    text = script("ssh", config, "--hosts", "a,b", "--directory", "/data/run")
    assert text.count("$HOME/.treadle-treadle-29400.") == 3
    assert "/tmp" not in text.replace(str(config), "")
