"""The command line: what it prints, how it fails, and that help is quick and costs no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from treadle.launch import cli
from treadle.launch.cli import COMMANDS, main, one_line, treadle
from treadle.model.storage_file import write_tensors

SHAPE = ("--batch.max_rows_per_device", "1", "--batch.max_segments_per_device", "4", "--batch.max_columns_per_row", "64")


RUN = (
    *("--output", "run", "--data.packed", "packed", "--trainer.depth", "1", "--trainer.hidden", "128", "--steps", "3"),
    *(
        "--trainer.batch.max_rows_per_device",
        "1",
        "--trainer.batch.max_segments_per_device",
        "4",
        "--trainer.batch.max_columns_per_row",
        "64",
    ),
)
"""Of a training run that is never reached."""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `treadle ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out.out, out.err


def test_help_names_every_command_and_loads_no_torch() -> None:
    script = (
        "import sys\nfrom treadle.launch.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'numpy', 'av', 'PIL', 'rich', 'tensorboard'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(treadle, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize("arguments", [[], ["launch"]])
def test_a_group_alone_shows_its_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: treadle") and err.count("\n") > 5


def test_a_run_without_one_batch_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar" * 200)
    shape = [argument.replace("--", "--trainer.") if argument.startswith("--") else argument for argument in SHAPE]
    small = ["--trainer.depth", "1", "--trainer.hidden", "128", "--steps", "2", "--trainer.schedule.learning_rate", "0.001"]
    where = ["--data.sources", str(tmp_path / "a.tar"), "--output", str(tmp_path / "run")]
    code, _, err = run(capsys, "train", *where, *small, *shape)
    assert code == 1
    assert "treadle: no batch came from the data, so nothing was trained (" in err and "not_a_tar" in err
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "treadle.launch", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("treadle, version ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (
            ["train", "--trainer.contrastive.bais", "1"],
            "--trainer.contrastive.bais is not a flag of treadle train: did you mean '--trainer.contrastive.bias'?",
        ),
        (["train", "--trainer.depht", "1"], "did you mean '--trainer.depth'?"),
        (["train"], "output is missing: give a path"),
        (["train", "none.toml"], "none.toml: cannot read the configuration: No such file or directory"),
        (["train", "--output", "x", "--trainer.depth", "two"], "trainer.depth is 'two': it must be an integer"),
        (["train", "--output", "x", "--trainer.optimizer.beta1", "2"], "it must lie between 0 and 1"),
        (["train", "--trainer.contrastive.pair_loss", "rnaked"], "must be one of derived, balanced, ranked, sigmoid"),
        (["train", "--resume", "none"], "none: no such file or folder: name a .safetensors checkpoint or the output folder of a run"),
        (["train", *RUN, "--trainer.resume", "nothing"], "nothing: no such file or folder"),
        (["train", *RUN, "--trainer.device", "cuda:99"], "trainer.device is 'cuda:99': this process sees"),
        (["pack", "--out", "p"], "there is nothing to pack"),
        (["pack", "s.tar", "--out", "p", "--data.threads", "5000", *SHAPE], "threads is 5000: it must lie between 1 and 4096"),
        (["pack", "s.tar", "--out", "p", "--data.lanes", "65537", *SHAPE], "lanes is 65537: it must lie between 0 and 65536"),
        (["pack", "s.tar", "--out", "", *SHAPE], "--out is '': name a folder"),
        (["pack", "s.tar", "--out", "s3://", *SHAPE], "--out is 's3://': name a folder or an object-store URL"),
        (["inspect"], "there is nothing to inspect"),
        (["encode", "c.safetensors", "a.png", "--out", "v.txt"], "must end in .npy or .safetensors"),
        (["encode", "c.safetensors", "--out", "v.npy"], "nothing to encode"),
        (["encode", "c.safetensors", "a.png", "--out", "v.npy", "--device", "cuda:99"], "--device is 'cuda:99': this process sees"),
        (["evaluate", "c.safetensors", "s.tar", "--device", "cuda:99"], "--device is 'cuda:99': this process sees"),
        (["demo", "--pictures", "0"], "DatasetPlan.pictures is 0: it must lie between 1"),
        (["demo", "--steps", "0"], "0 is not in the range"),
        (["doctor", "--nothing"], "No such option"),
    ],
)
def test_wrong_usage_is_exit_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("treadle: ") and err.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "none", "s.tar"], "none: no such file or folder: name a .safetensors checkpoint or the output folder of a run"),
        (["evaluate", ".", "s.tar"], ".: holds no checkpoint"),
        (["encode", "none", "a.png", "--out", "v.npy"], "none: no such file or folder"),
        (["inspect", "none-*.tar"], "none-*.tar"),
        (["inspect", "."], "folder"),
    ],
)
def test_failures_are_exit_1_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("treadle: ") and err.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("named", ["step-00000002.safetensors", "elsewhere"])
def test_an_older_checkpoint_does_not_go_on_among_newer_ones(
    named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A restart would take the newer ones for this run's own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (2, 5):
        write_tensors(folder / f"step-{step:08d}.safetensors", {}, {"step": str(step)})
    (folder / "LATEST").write_text("step-00000005.safetensors\n")
    old = folder / named
    if named == "elsewhere":
        old = (folder / "step-00000002.safetensors").rename(tmp_path / "moved.safetensors")
    (tmp_path / "c.toml").touch()
    code, _, err = run(capsys, "train", "c.toml", *RUN, "--resume", str(old))
    assert code == 2 and err.count("\n") == 1
    assert "is at step 2, and the output folder run holds step 5: go on from that with `treadle train --resume run`" in err
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoints"]


def test_hyphens_and_underscores_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--held_out.best_by", "--held-out.best-by"):
        code, _, err = run(capsys, "train", flag, "luck")
        assert code == 2
        assert "output is missing" in err or "held_out.best_by is 'luck'" in err


def test_debug_shows_the_traceback_wherever_it_stands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")
    for arguments in (["--debug", "train", "--resume", "none"], ["train", "--resume", "none", "--debug"]):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert "Traceback" in err and err.rstrip().splitlines()[-1].startswith("treadle: none: no such file")
        monkeypatch.setenv(cli.DEBUG_VARIABLE, "")


class TestOneLine:
    def test_what_a_user_can_read_stays(self) -> None:
        assert one_line(ValueError("a\n  b")) == "a b"

    def test_a_bug_says_its_type(self) -> None:
        assert one_line(KeyError("x")) == "KeyError: 'x'"

    def test_system_errors_say_file_and_reason(self) -> None:
        assert one_line(FileNotFoundError(2, "No such file or directory", "a.tar")) == "a.tar: No such file or directory"
        assert one_line(OSError(28, "No space left on device")) == "No space left on device"

    def test_groups_say_their_first(self) -> None:
        assert one_line(ExceptionGroup("several", [ValueError("one"), ValueError("two")])) == "one (and 1 more)"


def test_doctor_looks_at_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--json", "--folder", str(tmp_path))
    found = {entry["what"]: entry for entry in json.loads(out)}
    assert code == 0
    assert {"python", "torch", "gpu", "video decoders", "audio decoders", "image decoders", "memory", "disk"} <= set(found)
    assert found["disk"]["standing"] == "ok"
    assert "h264" in found["video decoders"]["detail"]


def test_doctor_as_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--folder", str(tmp_path))
    assert code == 0
    assert "What this machine can do" in out and "python" in out


def test_doctor_on_a_missing_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--json", "--folder", str(tmp_path / "none"))
    assert code == 1
    assert next(entry for entry in json.loads(out) if entry["what"] == "disk")["standing"] == "failed"


def test_the_template_and_the_resolved_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "train", "--template")
    assert code == 0 and "[trainer.batch.image]" in out and "# patch_side = 0" in out
    config = tmp_path / "run.toml"
    config.write_text(
        'output = "out"\n[trainer]\ndepth = 1\nhidden = 128\n[trainer.batch]\nmax_rows_per_device = 1\nmax_segments_per_device = 8\n'
        'max_columns_per_row = 32\n[trainer.schedule]\nsteps = 40\n[data]\nsources = "a.tar"\n',
        encoding="utf-8",
    )
    code, out, _ = run(capsys, "train", str(config), "--show", "--steps", "50", "--trainer.seed", "3")
    assert code == 0
    assert "warmup_steps = 5\n" in out and "seed = 3\n" in out and "max_bags_per_device = 8\n" in out
