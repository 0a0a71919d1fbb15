"""Images in the catalog's database."""

from __future__ import annotations

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.inserts import add_image
from snapshotd.catalog.lookup import CANDIDATES, check_unique, id_range, image_number, no_such, searchable
from snapshotd.errors import Conflict
from snapshotd.types import Image, ImageID, TreeID, short


class ImageTable:
    """The images that sandboxes begin on."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def add(self, image: Image) -> None:
        """Record an image. An older image of the same name loses its name to the new one (and is listed by id only,
        name "")."""
        with self._db.transaction():
            add_image(self._db, image)

    def list(self) -> list[Image]:
        """All images, newest first."""
        return [rows.decode_image(row) for row in self._db.read(rows.IMAGE_SELECT + " ORDER BY i.pk DESC")]

    def find(self, ref: str) -> Image:
        """The image of this name, or unique id prefix (>= 4 characters). NotFound, Ambiguous."""
        if not ref or not searchable(ref):
            raise no_such("image", ref)
        called = self._db.read_one(
            rows.IMAGE_SELECT + " WHERE i.id = ?1 OR i.name = ?1 ORDER BY i.id = ?1 DESC LIMIT 1", (ref,)
        )
        if called is not None:
            return rows.decode_image(called)
        found = self._db.read(
            rows.IMAGE_SELECT + " WHERE i.id >= ? AND i.id < ? LIMIT ?", (*id_range(ref), CANDIDATES + 1)
        )
        if not found:
            raise no_such("image", ref)
        check_unique(ref, [row[0] for row in found])
        return rows.decode_image(found[0])

    def remove(self, image_id: ImageID) -> None:
        """Forget an image. Conflict (naming one user) while a trajectory uses it; NotFound."""
        with self._db.transaction():
            number = image_number(self._db, image_id)
            user = self._db.read_one(
                "SELECT id FROM trajectories WHERE image = ?1 UNION ALL"
                " SELECT t.id FROM stacks k JOIN snapshots s ON s.stack = k.pk JOIN trajectories t ON t.pk = s.trajectory"
                " WHERE k.image = ?1 LIMIT 1",
                (number,),
            )
            if user is not None:
                raise Conflict(
                    f"image {short(image_id)} cannot be removed because trajectory {short(user[0])} uses it: remove that first"
                )
            self._db.write("DELETE FROM images WHERE pk = ?", (number,))

    def set_tree(self, image_id: ImageID, tree: TreeID) -> None:
        """Record that an image's files are in the repository. Not an error when it is gone."""
        with self._db.transaction():
            self._db.write("UPDATE images SET tree = ? WHERE id = ?", (tree, image_id))
