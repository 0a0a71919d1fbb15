"""`snapshotd image build|import|ls|rm`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, declare_group, json_option
from snapshotd.cli.follow import note
from snapshotd.cli.text import ago, id_text, print_answer, print_ids, print_json, print_list, printable, size
from snapshotd.cli.values import Name, complete_image
from snapshotd.client.results import ImageInfo


@declare_group("image")
def command() -> None:
    """Build, import, list and remove images.

    An image is a root file system that sandboxes start from. No image registry is needed.
    """


@declare(
    "build", group=command, examples=["snapshotd image build default", "snapshotd image build ./my-recipe --name mine"]
)
@click.option("--name", type=Name(), help="Name of the image; else the recipe's.")
@json_option
@click.argument("recipe")
def build(ctx: click.Context, recipe: str, name: str | None, as_json: bool) -> None:
    """Build an image from a recipe.

    RECIPE is a folder, or one that comes with snapshotd: default (Python, pytest, git, a C compiler), node (Node.js and
    npm too), essential (the least of Debian), or minimal (this machine's own Python and shell, in seconds). An unchanged
    one is reused. With --json: the image.
    """
    _report_image(connect(ctx).build_image(recipe, name=name, progress=note), as_json)


@declare(
    "import",
    group=command,
    examples=[
        "snapshotd image import debian:12",
        "snapshotd image import ./rootfs.tar --name base",
        "snapshotd image import ./saved-by-docker.tar",
    ],
)
@click.option("--name", type=Name(), help="Name of the image; else made from the source.")
@json_option
@click.argument("source")
def import_(ctx: click.Context, source: str, name: str | None, as_json: bool) -> None:
    """Import an image.

    SOURCE is a folder, a tar of a root file system, a `docker save` or OCI archive, or the name of a Docker image. With
    --json: the image.
    """
    _report_image(connect(ctx).import_image(source, name=name, progress=note), as_json)


@declare("ls", group=command, examples=["snapshotd image ls"])
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
def ls(ctx: click.Context, quiet: bool, no_trunc: bool, as_json: bool) -> None:
    """List images.

    With --json: an array.
    """
    found = connect(ctx).images()
    if quiet and not as_json:
        print_ids((item.id for item in found), full=no_trunc)
        return
    print_list(
        found,
        ("NAME", "IMAGE", "SIZE", "FILES", "CREATED", "SOURCE"),
        lambda item: (
            item.name or "-",
            id_text(item.id, full=no_trunc),
            size(item.bytes),
            str(item.file_count),
            ago(item.created_at),
            printable(item.source),
        ),
        as_json=as_json,
        right=(2, 3),
    )


@declare("rm", group=command, examples=["snapshotd image rm old"])
@json_option
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, shell_complete=complete_image)
def rm(ctx: click.Context, images: tuple[str, ...], as_json: bool) -> None:
    """Remove images that no trajectory uses.

    With --json: {"removed":[...]}.
    """
    client = connect(ctx)
    for ref in images:
        client.remove_image(ref)
        if not as_json:
            click.echo(ref)
    if as_json:
        print_json({"removed": list(images)})


def _report_image(image: ImageInfo, as_json: bool) -> None:
    print_answer(image, image.id, as_json=as_json)
