"""Parses a command line, calls one function, and turns an error into one sentence."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option, Typer
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

from tailrl import __version__
from tailrl.cli import commands
from tailrl.cli.values import Noted
from tailrl.runtime.errors import ConfigurationError, StudyError, masked, printable, reason, say
from tailrl.runtime.limits import out_of_memory
from tailrl.runtime.timeouts import EngineError, limit_the_end

CANNOT_TELL = 2  # the exit code of a gate that was not answered
HELP = "Explains the mismatch in a run's logs, and checks and plans studies. `tailrl COMMAND --help` says more."
JOBS_HELP = "The jobs of the workflow, as its rules call them."


EXTRAS = {"diagnose": None, "demo": None, "probe": "probe"}
"""The extra that a command needs as a whole; None: the one that its file needs. All other commands need `study`."""
JOBS = "job"
"""The group of the commands that Snakemake's rules call."""


class _Commands(TyperGroup):
    """All commands on one screen: without a box for options. The jobs' own commands are imported when one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:1] == [JOBS]:
            from tailrl.cli import jobs

            self.commands[JOBS] = typer.main.get_command(jobs.app)
            self.commands[JOBS].name = JOBS
        return super().resolve_command(ctx, args)

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tailrl {__version__}")
        raise typer.Exit


def _options(
    _: Annotated[bool, Option("--version", is_eager=True, hidden=True, callback=_print_version)] = False,
) -> None:
    """The options of `tailrl` itself."""


app = typer.Typer(
    name="tailrl", cls=_Commands, help=HELP, callback=_options, add_completion=False, rich_markup_mode="markdown"
)
for panel, group in commands.HELP_GROUPS.items():
    for command in group:
        app.command(rich_help_panel=panel, cls=Noted)(command)
app.add_typer(Typer(callback=lambda: None), name=JOBS, help=JOBS_HELP, rich_help_panel="Study")


def run() -> None:
    """Runs this process's command; exits 1 with one sentence for an error that the user can fix, and a gate 2."""
    noted: dict[str, Any] = {}
    try:
        _run(sys.argv[1:], noted)
    except StudyError as error:
        _end(str(error), noted)
    except EngineError as error:
        print(masked("".join(traceback.format_exception(error))), file=sys.stderr, end="")
        say(str(error))
        sys.exit(os.EX_SOFTWARE)
    except Exception as error:
        if (sentence := _refusal(error, noted.get("out"))) is None:
            if noted.get("gate"):  # Python's own 1 would say that a number is beyond its limit
                traceback.print_exc()
                sys.exit(CANNOT_TELL)
            raise
        _end(sentence, noted)
    except KeyboardInterrupt:
        # It goes on without its traceback: then libraries clean up, and the process ends by the signal.
        command = noted.get("command", "tailrl")
        goes_on = "goes on from the last checkpoint" if command == "job train" else "starts anew"
        say(f"{command}: interrupted; the same command {goes_on}")
        sys.excepthook = lambda *_: None
        raise
    finally:
        limit_the_end()


def _run(words: list[str], noted: dict[str, Any]) -> None:
    """Runs a command line; raises StudyError for a wrong one. `app()` would also handle Ctrl-C and our own errors."""
    try:
        with typer.main.get_command(app).make_context("tailrl", words, obj=noted) as context:
            _invoke(context)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except TyperException as error:
        where = getattr(error, "ctx", None)
        see = f" (see {where.command_path} --help)" if where else ""
        raise ConfigurationError(f"{error.format_message().rstrip('.')}{see}") from None


def _invoke(context: Any) -> None:
    """Raises StudyError where the command needs a library of an extra that is not installed."""
    try:
        context.command.invoke(context)
    except ModuleNotFoundError as error:
        from tailrl.runtime.extras import not_installed

        name = str(context.invoked_subcommand)
        sentence = not_installed(error, name, extra=EXTRAS.get(name, "study"))
        if sentence is None:
            raise
        raise ConfigurationError(sentence) from None


def _refusal(error: Exception, out: Path | None) -> str | None:
    """The sentence where the system refuses memory, a file or its space; None for any other error.

    `out`: what the command was to write.
    """
    if isinstance(error, OSError) and error.errno is not None:  # a library's own error has no number
        # A full disk refuses what is written to an open file, and names none.
        where = error.filename or (out and f"{out}: a file could not be written")
        return f"{where}: {reason(error)}" if where else reason(error)
    return out_of_memory(error)


def _end(sentence: str, noted: dict[str, Any]) -> NoReturn:
    """Ends with 1, or a gate with 2: it cannot tell."""
    if noted.get("gate"):
        say(sentence)
        sys.exit(CANNOT_TELL)
    if os.name == "posix":
        from tailrl.runtime.launch import tell_launcher

        if tell_launcher(sentence):
            sys.exit(1)
    sys.exit(f"tailrl: {printable(sentence)}")
