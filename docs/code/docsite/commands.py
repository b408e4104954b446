"""reference/cli.md: the commands of `tailrl`, from the typer application itself."""

from typing import Any

import typer

from docsite.markdown import plain, table
from tailrl.cli import jobs as workflow_jobs
from tailrl.cli.command_line import HELP, JOBS, JOBS_HELP, app


def commands_page() -> str:
    """The page: each command for people with its parameters, then those of the workflow by name."""
    group: Any = typer.main.get_command(app)
    parts = [f"# Command line\n\n{plain(HELP)}\n"]
    by_panel: dict[str, list[Any]] = {}
    for name, command in group.commands.items():
        if name != JOBS:
            by_panel.setdefault(command.rich_help_panel, []).append(command)
    for panel, commands in by_panel.items():
        parts.append(f"## {panel}\n")
        parts += map(_command, commands)
    parts.append(f"## Jobs\n\n{plain(JOBS_HELP)}\n")
    workflow: Any = typer.main.get_command(workflow_jobs.app)
    jobs = workflow.commands.items()
    parts.append(table(("command", "what it does"), ((f"`tailrl job {n}`", _line(c.help)) for n, c in jobs)))
    return "\n".join(parts)


def _line(text: str | None) -> str:
    return plain(" ".join((text or "").split()))


def _command(command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    words = ["tailrl", command.name, *(one.metavar for one in arguments)]
    options = [one for one in command.params if one not in arguments and not one.hidden]
    words += [f"{one.opts[0]} {_value(one)}".strip() for one in options if one.required]
    words += ["[OPTIONS]"] if any(not one.required for one in options) else []
    shown = f"### {command.name}\n\n{_line(command.help)}\n\n```sh\n{' '.join(words)}\n```\n"
    rows = [(f"`{_name(one)}`", _default(one), plain(one.help or "")) for one in (*arguments, *options)]
    return f"{shown}\n{table(('parameter', 'default', 'meaning'), rows)}" if rows else shown


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    return f"{', '.join(parameter.opts)} {_value(parameter)}".strip()


def _value(option: Any) -> str:
    """What follows an option: its metavar, else the name of its type; nothing for a flag."""
    if option.is_flag:
        return ""
    kinds = {"Path": "PATH", "int": "N", "float": "X"}
    named = getattr(option.type_descriptor.annotation, "__name__", "")
    return option.metavar or kinds.get(named, "TEXT")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    return "" if parameter.default is None else f"`{parameter.default}`"
