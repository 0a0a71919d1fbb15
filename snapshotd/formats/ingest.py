"""Bring foreign content into a directory of the layer store: a host folder or a tar. Nothing in either is trusted.

ingest_folder.py   copy a folder (a workspace, an unpacked root file system)
ingest_tar.py      apply a root file system tar, or one layer of an image
ingest_nodes.py    the rules both share: attributes, owners, errors, the report
tar_reader.py      the bounded reader of tar streams
"""

from snapshotd.formats.ingest_folder import ingest_folder
from snapshotd.formats.ingest_nodes import IngestReport
from snapshotd.formats.ingest_tar import TarLimits, ingest_tar

__all__ = ["IngestReport", "TarLimits", "ingest_folder", "ingest_tar"]
