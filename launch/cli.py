"""The `treadle` command: what there is to type, and how failures are told.

Commands load when they are called, so that help costs no torch. Exit codes: 0 done (or stopped as asked, with everything saved), 1 the
work failed, 2 the command or its configuration is wrong; either way one line says what, where, why and what to do.
"""

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from treadle import __version__
from treadle.launch.config import ConfigError

logger = logging.getLogger(__name__)

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("treadle.launch.train", "Train a tower on shards, from a TOML file and/or flags."),
    "pack": ("treadle.launch.pack", "Read, decode and pack shards once, into shards of packed batches."),
    "inspect": ("treadle.launch.inspect", "Tell what shards hold and how they pack; draw packed rows as pictures."),
    "encode": ("treadle.launch.encode", "Write the vectors of files or shards."),
    "evaluate": ("treadle.launch.evaluate", "Tell recall at k between modalities on shards."),
    "launch": ("treadle.launch.clusters", "Write the script that starts a run on SLURM, on Kubernetes or over ssh."),
    "demo": ("treadle.launch.demo", "Write a small four-modality dataset and train on it; nothing is downloaded."),
    "doctor": ("treadle.launch.doctor", "Tell what this machine can do."),
}
"""Name to the module that holds the command, and its line of help."""

DEBUG_VARIABLE = "TREADLE_DEBUG"


class _PublicFormatter(logging.Formatter):
    """Log lines without the credentials of URLs, whoever wrote them."""

    def format(self, record: logging.LogRecord) -> str:
        from treadle.pipeline.storage import public_urls

        return public_urls(super().format(record))


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: object = getattr(import_module(COMMANDS[cmd_name][0]), f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="treadle")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens underneath.")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def treadle(verbose: bool, debug: bool) -> None:
    """Train one byte-level transformer on text, images, video and audio, straight from sharded tar streams.

    Begin with `treadle demo`, then `treadle train --help`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PublicFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"  # seen by the processes that a run starts, too


def one_line(error: BaseException) -> str:
    """A failure as one line: what it says, or its type where it says nothing a user could read."""
    if isinstance(error, BaseExceptionGroup):
        inner = error.exceptions[0]
        more = f" (and {len(error.exceptions) - 1} more)" if len(error.exceptions) > 1 else ""
        return one_line(inner) + more
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}" if names else error.strerror
    # Notes say where: the shard, the sample and the member, of what was refused.
    text = " ".join("; ".join([str(error), *getattr(error, "__notes__", ())]).split())
    plain = isinstance(error, ValueError | OSError | click.ClickException) or type(error).__module__.startswith("treadle.")
    return text if plain and text else f"{type(error).__name__}: {text}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Raises:
        SystemExit: always, with 0, 1 or 2.
    """
    listed = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in listed:  # wherever it stands
        listed.remove("--debug")
        listed.insert(0, "--debug")
    # Threads of OpenMP that spin for work take the cores from the decoders, and from whoever else is on the machine: an evaluation on two
    # busy cores took 30 times as long. Read when torch loads, so set before any command does.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    code = 0
    try:
        code = treadle.main(args=listed, prog_name="treadle", standalone_mode=False) or 0
    except click.exceptions.Exit as exit_request:
        code = exit_request.exit_code
    except click.Abort:
        code = _fail("stopped", 130, None)
    except click.UsageError as error:
        if "Usage: " in error.format_message():  # a group without a command: its help, as it stands
            click.echo(error.format_message(), err=True)
            raise SystemExit(2) from None
        where = f" (see `{error.ctx.command_path} --help`)" if error.ctx is not None and "--help" not in error.format_message() else ""
        code = _fail(f"{error.format_message()}{where}", 2, error)
    except ConfigError as error:
        code = _fail(str(error), 2, error)
    except KeyboardInterrupt:
        code = _fail("stopped", 130, None)
    except BrokenPipeError:
        # Whoever read our output has left: no more of it, and no traceback when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        code = _fail(one_line(error), 1, error)
    raise SystemExit(code)


def _fail(message: str, code: int, error: BaseException | None) -> int:
    from treadle.pipeline.storage import public_urls

    if error is not None and os.environ.get(DEBUG_VARIABLE):
        import traceback

        click.echo(public_urls("".join(traceback.format_exception(error))), err=True, nl=False)
    click.echo(public_urls(f"treadle: {' '.join(message.split())}"), err=True)
    return code
