"""`python3 -m snapshotd.integrations.otel [TRAJECTORY...]`: export what trajectories have done, or without one what all do from
now on. Where to and how is said by OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import SnapshotdError
from snapshotd.integrations.otel.exporting import export, follow


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m snapshotd.integrations.otel",
        description="Export the spans of trajectories, once; without one, of all that happens from now on.",
        epilog="OTEL_EXPORTER_OTLP_ENDPOINT says where they go.",
    )
    parser.add_argument("refs", nargs="*", metavar="TRAJECTORY")
    refs: list[str] = parser.parse_args(arguments).refs
    client, exporter = AsyncSnapshotd(), OTLPSpanExporter()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(export(client, exporter, *refs) if refs else follow(client, exporter))
    except SnapshotdError as exc:
        sys.stderr.write(f"snapshotd: {exc.message}\n")
        return exc.exit_code
    finally:
        exporter.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
