"""`treadle launch`: the script that starts a run on a cluster, written out for a look before it is submitted.

The templates are files of `templates/`; `@name@` stands for a value that is already quoted for the place where it stands. Every script
runs `treadle train CONFIG --auto-resume`, so that whatever starts it again goes on from the newest checkpoint.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.launch.config import ConfigError
from treadle.launch.flags import CONTEXT, configuration

if TYPE_CHECKING:
    from collections.abc import Callable

    from treadle.launch.settings import RunSettings

DERIVED_LANES = 64
"""Lanes of a stream whose configuration leaves them to be derived."""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_MEMORY = re.compile(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?")
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_TIME = re.compile(r"\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2}")
_PLACEHOLDER = re.compile(r"@([a-z_]+)@")


def render(template: str, values: Mapping[str, str]) -> str:
    """The text of a template with its placeholders filled; a line that is left empty by an empty value is dropped.

    Raises:
        KeyError: the template names a value that is not given.
    """
    source = (resources.files("treadle.launch") / "templates" / template).read_text(encoding="utf-8")
    lines: list[str] = []
    for line in source.splitlines():
        filled = _PLACEHOLDER.sub(lambda match: values[match.group(1)], line)
        if filled or not line:
            lines.append(filled)
    return "\n".join(lines) + "\n"


def _read(config: Path, nodes: int, gpus: int) -> "RunSettings":
    """The run, checked before it waits in a queue."""
    from treadle.launch.settings import RunSettings

    settings = configuration(RunSettings, config, [])
    ranks, lanes = nodes * gpus, settings.data.lanes or DERIVED_LANES
    if settings.data.sources and ranks > lanes:
        raise ConfigError(
            f"{config}: data.lanes is {lanes}, fewer than {nodes} x {gpus} = {ranks} ranks: set data.lanes to {ranks} or a multiple"
        )
    return settings


def _matching(pattern: re.Pattern[str], rule: str) -> "Callable[[click.Context, click.Parameter, str | None], str | None]":
    def check(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and not pattern.fullmatch(value):
            raise click.BadParameter(f"{value!r}: it must be {rule}", ctx, parameter)
        return value

    return check


def _one_line(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and ("\n" in text or "\r" in text):
            raise click.BadParameter(f"{text!r}: it must be one line", ctx, parameter)
    return value


def _shared(command: "Callable[..., None]") -> "Callable[..., None]":
    options = (
        click.argument("config", type=click.Path(path_type=Path)),
        click.option(
            "--gpus", metavar="N", type=click.IntRange(1, 1024), default=8, show_default=True, help="Processes per machine, one per GPU."
        ),
        click.option(
            "--max-restarts",
            metavar="N",
            type=click.IntRange(0, 10_000),
            default=3,
            show_default=True,
            help="Fresh starts after a failure.",
        ),
        click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Write here instead of to standard output."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _in_a_shell(command: "Callable[..., None]") -> "Callable[..., None]":
    """The options of a script that a shell runs: where, and after what."""
    command = click.option(
        "--setup",
        metavar="LINE",
        multiple=True,
        callback=_one_line,
        help="A shell line to run first, such as `source .venv/bin/activate`; may be given more than once.",
    )(command)
    return click.option(
        "--directory", callback=_one_line, default=None, help="Folder to run in, as the machines see it; the current one by default."
    )(command)


def _answer(text: str, out: Path | None, next_step: str) -> None:
    from treadle.launch.files import write_text

    if out is None:
        click.echo(text, nl=False)
        return
    write_text(out, text)
    click.echo(f"wrote {out}; start the run with: {next_step} {shlex.quote(str(out))}")


@click.group("launch", context_settings=CONTEXT)
def launch_command() -> None:
    """Write the script that starts a run on SLURM, on Kubernetes or over ssh.

    The script is printed; nothing is submitted. It resumes from the newest checkpoint whenever it is started again.
    """


@launch_command.command("slurm", context_settings=CONTEXT)
@_shared
@click.option("--nodes", metavar="N", type=click.IntRange(1, 2**16), default=1, show_default=True, help="Machines.")
@click.option(
    "--name",
    callback=_matching(_NAME, "lower-case letters, digits and hyphens"),
    default="treadle",
    show_default=True,
    help="The job's name.",
)
@click.option(
    "--time",
    "time_limit",
    callback=_matching(_TIME, "minutes, HH:MM:SS or DAYS-HH"),
    default="24:00:00",
    show_default=True,
    help="Time limit.",
)
@click.option("--cpus", metavar="N", type=click.IntRange(1, 1024), default=8, show_default=True, help="CPUs per GPU.")
@click.option("--partition", callback=_one_line, help="Partition.")
@click.option("--account", callback=_one_line, help="Account.")
@click.option(
    "--grace",
    metavar="S",
    type=click.IntRange(60, 65535),
    default=300,
    show_default=True,
    help="Seconds before the time limit at which the ranks are told to save.",
)
@click.option("--log", callback=_one_line, default="%x-%j.log", show_default=True, help="Where the output goes.")
@_in_a_shell
@click.option(
    "--option",
    "extra",
    metavar="TEXT",
    multiple=True,
    callback=_one_line,
    help="Another sbatch option, such as `--qos=high`; may be given more than once.",
)
def slurm_command(
    config: Path,
    gpus: int,
    max_restarts: int,
    out: Path | None,
    nodes: int,
    name: str,
    time_limit: str,
    cpus: int,
    partition: str | None,
    account: str | None,
    grace: int,
    log: str,
    directory: str | None,
    setup: Sequence[str],
    extra: Sequence[str],
) -> None:
    """A batch script for `sbatch`: one task per GPU, queued again when preempted."""
    _read(config, nodes, gpus)
    for text in extra:
        if not text.startswith("-"):
            raise click.UsageError(f"--option {text!r}: an sbatch option begins with a hyphen, such as --qos=high")
    options = [f"--partition={partition}"] * bool(partition) + [f"--account={account}"] * bool(account) + list(extra)
    values = {
        "name": name,
        "nodes": str(nodes),
        "gpus": str(gpus),
        "cpus": str(cpus),
        "time": time_limit,
        "log": log,
        "grace": str(grace),
        "options": "\n".join(f"#SBATCH {option}" for option in options),
        "directory": shlex.quote(directory or str(Path.cwd())),
        "setup": "\n".join(setup),
        "config": shlex.quote(str(config)),
        "restarts": str(max_restarts),
        "attempts": str(max_restarts + 1),
    }
    _answer(render("slurm.sh", values), out, "sbatch")


@launch_command.command("kubernetes", context_settings=CONTEXT)
@_shared
@click.option("--image", required=True, callback=_one_line, help="Container image that has treadle.")
@click.option(
    "--claim",
    required=True,
    callback=_matching(_NAME, "a claim's name"),
    help="Persistent volume claim, open to all pods, that holds the run's output.",
)
@click.option(
    "--mount",
    default="/data",
    show_default=True,
    callback=_one_line,
    help="Where the claim is mounted; the configuration's output must lie below it.",
)
@click.option("--nodes", metavar="N", type=click.IntRange(1, 2**16), default=1, show_default=True, help="Pods, one per machine.")
@click.option(
    "--name",
    callback=_matching(_NAME, "lower-case letters, digits and hyphens"),
    default="treadle",
    show_default=True,
    help="The set's name.",
)
@click.option(
    "--namespace", callback=_matching(_NAME, "a namespace's name"), default="default", show_default=True, help="The set's namespace."
)
@click.option("--cpus", metavar="N", type=click.IntRange(1, 1024), default=8, show_default=True, help="CPUs per GPU.")
@click.option(
    "--memory", callback=_matching(_MEMORY, "a quantity such as 512Gi"), default="256Gi", show_default=True, help="Memory per pod."
)
@click.option(
    "--grace",
    metavar="S",
    type=click.IntRange(30, 86400),
    default=600,
    show_default=True,
    help="Seconds to save in when the pods are told to end.",
)
@click.option("--port", type=click.IntRange(1024, 65535), default=29400, show_default=True, help="Where the pods meet, on the first.")
def kubernetes_command(
    config: Path,
    gpus: int,
    max_restarts: int,
    out: Path | None,
    image: str,
    claim: str,
    mount: str,
    nodes: int,
    name: str,
    namespace: str,
    cpus: int,
    memory: str,
    grace: int,
    port: int,
) -> None:
    """A JobSet for `kubectl apply -f`, with the configuration inside."""
    settings = _read(config, nodes, gpus)
    if not settings.output.is_relative_to(mount):
        raise ConfigError(f"{config}: output is {settings.output}: it must lie below {mount}, where the claim {claim} is mounted")
    values = {
        "name": name,
        "namespace": namespace,
        "nodes": str(nodes),
        "nodes_text": json.dumps(str(nodes)),
        "gpus": str(gpus),
        "gpus_text": json.dumps(str(gpus)),
        "cpus": str(cpus * gpus),
        "memory": memory,
        "grace": str(grace),
        "image": json.dumps(image),
        "claim": claim,
        "mount": json.dumps(mount),
        "toml": json.dumps(config.read_text(encoding="utf-8")),
        "restarts": str(max_restarts),
        # Pod 0 of the only job of the set, under the set's own subdomain.
        "rendezvous": json.dumps(f"{name}-node-0-0.{name}:{port}"),
    }
    _answer(render("kubernetes.yaml", values), out, "kubectl apply -f")


@launch_command.command("ssh", context_settings=CONTEXT)
@_shared
@click.option("--hosts", metavar="A,B,C", required=True, help="Machines, the first of which the others come to.")
@click.option("--port", type=click.IntRange(1024, 65535), default=29400, show_default=True, help="Where the machines meet, on the first.")
@click.option(
    "--name",
    callback=_matching(_NAME, "lower-case letters, digits and hyphens"),
    default="treadle",
    show_default=True,
    help="The run's name: two at once need two.",
)
@_in_a_shell
def ssh_command(
    config: Path,
    gpus: int,
    max_restarts: int,
    out: Path | None,
    hosts: str,
    port: int,
    name: str,
    directory: str | None,
    setup: Sequence[str],
) -> None:
    """A script for `bash`: one ssh connection per machine, keys at hand."""
    listed = [host.strip() for host in hosts.split(",") if host.strip()]
    for host in listed:
        if not _HOST.fullmatch(host):
            raise click.UsageError(f"--hosts has {host!r}: a machine is NAME or USER@NAME")
    if len(set(listed)) < len(listed) or not listed:
        raise click.UsageError(f"--hosts is {hosts!r}: name each machine once")
    _read(config, len(listed), gpus)
    values = {
        "hosts": " ".join(map(shlex.quote, listed)),
        "nodes": str(len(listed)),
        "gpus": str(gpus),
        "restarts": str(max_restarts),
        "directory": shlex.quote(directory or str(Path.cwd())),
        "setup": "\n".join(setup),
        "config": shlex.quote(str(config)),
        "rendezvous": f"{listed[0].rpartition('@')[2]}:{port}",
        "pid_file": f".treadle-{name}-{port}",  # in the user's own folder, where nobody else can put a file of that name first
    }
    # Quoted twice: once for the shell of the machine, once for the script that is read here.
    values["node_script"] = shlex.quote(shlex.quote(render("ssh_node.sh", values)))
    _answer(render("ssh.sh", values), out, "bash")
