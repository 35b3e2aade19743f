"""The program `certvit`: its commands, and one line and an exit code for each failure."""

import contextlib
import errno
import faulthandler
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from importlib import import_module
from inspect import getdoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from certcli import __version__
from certcli.cli.shared import inputs, output, streams
from certcli.cli.shared.command import EVERYTHING
from certcli.system import errors, memory, processes, reading

NARROWEST = 60
"""Characters a line that panels need; narrower, `--help` is plain lines, which break no option's
name."""
WORDS = "certvit.words"
"""Key in the context of the typed words of a command."""
ONCE = {"sigma": "run them one by one: each sigma smooths another network"}
"""Options of one value that may be meant to take several -> what to do instead."""


_columns = shutil.get_terminal_size().columns


class _Context(typer.Context):
    """Leaves words room in a narrow `--help`: long options stand on lines of their own."""

    def make_formatter(self) -> Any:
        formatter = super().make_formatter()
        formatter.write_dl = partial(formatter.write_dl, col_max=16)  # type: ignore[method-assign]
        return formatter


class _Untyped:
    """Makes `--help` name no Python type beside arguments and flags."""

    context_class: Any = _Context

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if parameter.metavar is None or parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
        return parameters


class _Group(_Untyped, TyperGroup):
    pass


class _Command(_Untyped, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; refuse an option of ONCE that is typed twice."""
        ctx.meta[WORDS] = {part for word in args for part in word.split("=", 1)}
        if not ctx.resilient_parsing:
            order = self.make_parser(ctx).parse_args(args=list(args))[2]
            names = [parameter.name for parameter in order]
            for name, why in ONCE.items():
                if names.count(name) > 1:
                    raise errors.UsageError(f"--{name} is given {names.count(name)} times", why)
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: the options of the first week, or all (`--help-all`).

        Where a word of the call names a panel, as `--method smoothing` does, its options stand in
        place of outputs and examples.
        """
        command: Any = COMMANDS[self.name or ""]
        words = ctx.meta.get(WORDS, ())
        named = {panel for word, panel in command.panels.items() if word in words}
        every = self.params
        epilog = self.epilog
        if not ctx.meta.get(EVERYTHING):
            self.params = [
                _visible_parameter(parameter, command.often, named) for parameter in every
            ]
            self.epilog = None if named else epilog
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = every
            self.epilog = epilog


def _visible_parameter(parameter: Any, often: Collection[str], named: Collection[str]) -> Any:
    """Return the parameter, hidden unless it is of the first week or of a named panel."""
    if parameter.param_type_name == "argument":
        return parameter
    panel = parameter.rich_help_panel
    if panel in named or (parameter.name in often and not (named and panel == "Output")):
        return parameter
    hidden = copy(parameter)
    hidden.hidden = True
    return hidden


def _interruptible(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with Ctrl-C as a CertvitError; Typer would exit with 1."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        output.Sink.invocation.command = name
        if name not in SPLIT:
            processes.require_one(
                f"{name} runs", f"certvit {name} without torchrun; {', '.join(SPLIT)} run with it"
            )
        reading.forget()
        try:
            command(*args, **kwargs)
            for path in reading.require_unchanged():
                output.Sink(False, False).warn(
                    f"{path} was changed after it was read: the results are of the file as it was"
                )
            processes.team().finish()
        except KeyboardInterrupt as stop:
            raise errors.Interrupted(
                "interrupted",
                "nothing half-written was left; adapt, finetune, certify and attack go on with --resume",
            ) from stop

    return wrapped


WIDEST = 10_000
"""Characters a line, or lines, that COLUMNS and LINES may ask for."""
SPLIT = ("adapt", "constrain", "finetune", "lipschitz", "audit", "certify", "attack")
"""Commands that several processes share."""
NAMES = (
    "audit",
    "lipschitz",
    "certify",
    "attack",
    "predict",
    "init",
    "adapt",
    "constrain",
    "finetune",
    "merge",
    "verify",
    "log",
    "doctor",
)
"""Of the commands, in the order of `--help`."""


class Commands(Mapping[str, Callable[..., None]]):
    """The commands by name; one is imported when it is first looked at."""

    def __getitem__(self, name: str) -> Callable[..., None]:
        if name not in NAMES:
            raise KeyError(name)
        command: Callable[..., None] = getattr(import_module(f"certcli.cli.{name}.command"), name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


COMMANDS = Commands()


def _one_line_a_paragraph(function: Callable[..., None]) -> str:
    """Return the docstring with a line a paragraph: a terminal wraps it by its own width."""
    paragraphs = (getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def program(words: Sequence[str] = ()) -> typer.Typer:
    """Return the program with the commands that these words can name: one, or else all.

    Each import of a command costs 0.02 s.
    """
    app = typer.Typer(
        name="certvit",
        cls=_Group,
        rich_markup_mode="rich" if _columns >= NARROWEST else None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "terminal_width": max(_columns, 40) if _columns < NARROWEST else None,
        },
    )
    for name in words[:1] if words and words[0] in NAMES else NAMES:
        command = COMMANDS[name]
        app.command(
            name,
            cls=_Command,
            epilog=getattr(command, "epilog", None),
            help=_one_line_a_paragraph(command),
        )(_interruptible(name, command))
    app.callback(help=_one_line_a_paragraph(describe_program))(describe_program)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"certvit {__version__}")
        raise typer.Exit


def describe_program(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        metavar="",
        help="Show the version.",
    ),
) -> None:
    """Prove how robust a vision transformer is, and make it more robust.

    Begin with `certvit audit certvit/digits`, or with a network of yours: it answers in words,
    within minutes. lipschitz, certify and attack run its parts one by one. init, adapt, constrain
    and finetune make networks that can be proven. Radii are l2 in pixel units, images in [0, 1].
    """
    inputs.take_settings(context)


def run(started: float | None = None) -> None:
    """Run the command line; failures are one line and an exit code (docs/exit-codes.md).

    Args:
        started: the begin of the process, on the clock of `time.perf_counter`.
    """
    output.Sink.invocation = output.Invocation(started=started, silent=not _team_or_alone().leads)
    if sys.__stderr__ is not None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream without a file
            # a mapped file that is cut ends the process: not without a word
            faulthandler.enable(sys.__stderr__)
    with (
        _usable_surroundings(),
        streams.guarded() as out,
        streams.Interrupts(terminated=_team_or_alone().several) as interrupts,
    ):
        code = _run_program(interrupts)
        out.flush()
        if out.failure and code == 0:
            code = _report(
                f"cannot write to stdout: {out.failure}",
                "the result is lost; write it to a file",
                8,
            )
    sys.exit(code)


@contextlib.contextmanager
def _usable_surroundings() -> Iterator[None]:
    """Drop invalid widths of the terminal, and silence the warnings of libraries."""
    for name in ("COLUMNS", "LINES"):
        text = os.environ.get(name, "1")
        if not (text.isdecimal() and 0 < int(text[:9]) <= WIDEST):
            del os.environ[name]
    if not logging.root.handlers:
        logging.root.addHandler(logging.NullHandler())
    with warnings.catch_warnings():
        if not (sys.warnoptions or os.environ.get("CERTVIT_DEBUG")):
            warnings.simplefilter("ignore")
        yield


def _run_program(interrupts: streams.Interrupts) -> int:
    try:
        os.getcwd()
    except OSError:  # torch would end the process with a line of its own
        return _report(
            "the working folder is gone", "cd to one that exists", errors.UsageError.code
        )
    try:
        returned = program(sys.argv[1:])(prog_name="certvit", standalone_mode=False)
        code = returned if isinstance(returned, int) else 0
        return _report("interrupted", "", code) if code == errors.Interrupted.code else code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return _report("interrupted", "", errors.Interrupted.code)
    except processes.Ended as end:
        return _team_or_alone().fail(end.code) or end.code
    except Exception as failure:
        if os.environ.get("CERTVIT_DEBUG") and not isinstance(failure, errors.CertvitError):
            raise
        if memory.out_of_memory(failure):
            return _report("out of memory", "try a smaller --batch-size or --limit", 1)
        if isinstance(failure, errors.CertvitError):
            return _report(failure.message, failure.hint, failure.code)
        if interrupts.seen or isinstance(failure, typer.Abort):
            return _report("interrupted", "", errors.Interrupted.code)
        if hasattr(failure, "format_message"):  # Typer's own: a wrong option, a missing argument
            return _usage(failure)
        # a path that no check foresaw
        if isinstance(failure, OSError) and failure.filename is not None:
            reason = f"{errors.one_line(failure.filename)}: {failure.strerror}"
            return _report(
                reason,
                "choose another",
                errors.UsageError.code if failure.errno == errno.ENAMETOOLONG else 1,
            )
        reason = (str(failure).splitlines() or [""])[0][:300]
        if type(failure).__name__ == "DistBackendError" or (
            "gloo" in reason and _team_or_alone().several
        ):
            hint = "killed, perhaps for want of memory? torchrun's report says which; --resume continues with saved results"
            return _report("another process ended without a word", hint, 1)
        hint = "run again with CERTVIT_DEBUG=1 for a traceback"
        return _report(f"a bug: {type(failure).__name__}: {reason}", hint, 1)


def _usage(failure: Any) -> int:
    """Report a usage error and the command whose help explains it; return its exit code."""
    if type(failure).__name__ == "NoArgsIsHelpError":
        return errors.UsageError.code
    context = getattr(failure, "ctx", None)
    words = context.command_path if context is not None else "certvit"
    message = " ".join(failure.format_message().split()).rstrip(".")
    return _report(message[:1].lower() + message[1:], f"{words} --help", errors.UsageError.code)


def _team_or_alone() -> processes.Team:
    """Return the team; this process alone in an invalid environment, which commands report."""
    try:
        return processes.team()
    except errors.UsageError:
        return processes.ALONE


def _report(message: str, hint: str, code: int) -> int:
    """Print the one line, unless another process has printed its own; return the exit code."""
    ended = _team_or_alone().fail(code)
    if ended is not None:
        return ended
    if "--json" in sys.argv and not output.Sink.invocation.concluded:
        sys.stdout.write(output.as_line({"error": message, "hint": hint, "code": code}))
    lines = [
        f"certvit: {errors.plain_text(message)}",
        *([f"  hint: {errors.plain_text(hint)}"] if hint else []),
    ]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
    _team_or_alone().said()
    return code


if __name__ == "__main__":
    run()
