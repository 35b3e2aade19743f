"""The command `certvit`: registers the commands, and turns every failure into one clear line and an exit code."""

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from certcli import __version__
from certcli.cli import adapt, attack, certify, constrain, finetune, init, lipschitz, log
from certcli.cli.output import Sink
from certcli.errors import CertvitError, Interrupted

app = typer.Typer(
    name="certvit",
    help="Tells, with proof, how robust a vision transformer is, and makes it more robust.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C as one of our errors: Typer would turn it into its own message and exit code 1."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as stop:
            hint = "nothing half-written was left; adapt, finetune and attack go on with --resume"
            raise Interrupted("interrupted", hint) from stop

    return wrapped


COMMANDS: dict[str, Callable[..., None]] = {
    "init": init.init,
    "adapt": adapt.adapt,
    "constrain": constrain.constrain,
    "finetune": finetune.finetune,
    "lipschitz": lipschitz.lipschitz,
    "certify": certify.certify,
    "attack": attack.attack,
    "log": log.log,
}
for _name, _command in COMMANDS.items():
    app.command(_name, epilog=getattr(_command, "epilog", None))(_interruptible(_command))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"certvit {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Tells, with proof, how robust a vision transformer is, and makes it more robust.

    A pipeline is a chain of commands over safetensors files: init, adapt, constrain, finetune; then lipschitz, certify and
    attack say what the result is worth. Radii are l2 in pixel units, images in [0, 1].
    """


def run() -> None:
    """The console script. Exit codes: docs/exit-codes.md."""
    # Threads that spin while they wait cost a factor of ten as soon as another process wants the cores (measured: 109 s
    # against 8 s for ten epochs on two busy cores); this must be said before torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    Sink.concluded = False
    try:
        app()
    except CertvitError as failure:
        _report(failure.message, failure.hint, failure.code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; so do we, quietly
        sys.exit(0)
    except MemoryError:
        _report("out of memory", "try a smaller --batch-size or --limit", 1)
    except Exception as failure:
        if os.environ.get("CERTVIT_DEBUG"):
            raise
        reason = (str(failure).splitlines() or [""])[0][:300]
        _report(f"a bug: {type(failure).__name__}: {reason}", "run again with CERTVIT_DEBUG=1 for a traceback", 1)


def _report(message: str, hint: str, code: int) -> None:
    if "--json" in sys.argv and not Sink.concluded:
        sys.stdout.write(json.dumps({"error": message, "hint": hint, "code": code}) + "\n")
    sys.stderr.write(f"certvit: {message}" + (f"\n  hint: {hint}" if hint else "") + "\n")
    sys.exit(code)


if __name__ == "__main__":
    run()
