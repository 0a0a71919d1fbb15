"""`snapshotd completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from snapshotd.cli.command import declare, json_option
from snapshotd.cli.text import print_answer


@declare(
    "completion",
    examples=[
        'eval "$(snapshotd completion bash)"',
        "snapshotd completion zsh > ~/.zfunc/_snapshotd",
        "snapshotd completion fish > ~/.config/fish/completions/snapshotd.fish",
    ],
)
@json_option
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script for a shell.

    It completes commands, options, and ids, names and tags of the running daemon. With --json: {"shell","script"}.
    """
    completer = get_completion_class(shell)
    assert completer is not None
    script = completer(ctx.find_root().command, {}, "snapshotd", "_SNAPSHOTD_COMPLETE").source()
    print_answer({"shell": shell, "script": script}, script, as_json=as_json)
