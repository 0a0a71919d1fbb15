"""`/stats` and `/metrics`: what is counted, and that Prometheus can read it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from snapshotd.daemon.http.metrics import METRICS_TYPE, write_metrics
from snapshotd.engine.pauses import BOUNDS_NS, MINUTES, Pauses
from tests.unit.daemon.asking import Connection, ask, eventually, lines
from tests.unit.daemon.process import Daemon
from tests.unit.daemon.sample_figures import STATS

BUSY = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; exec sleep 1000"


def test_live_sandboxes_have_their_load_and_memory(daemon: Daemon) -> None:
    client = daemon.client
    client.create(name="busy")
    client.exec_in_background("busy", ["/bin/sh", "-c", BUSY])
    eventually(lambda: client.stats().sandboxes[0].cpu_ms >= 50)
    (one,) = client.stats().sandboxes
    assert (one.name, one.runtime, one.process_count >= 2, one.used_memory_bytes > 100_000) == (
        "busy",
        "none",
        True,
        True,
    )
    client.stop("busy")
    assert client.stats().sandboxes == ()


def test_steps_are_counted_with_their_pauses_disk_and_requests(daemon: Daemon) -> None:
    assert ask(daemon, "POST", "/sandboxes", {"name": "box"})[0] == 201
    for number in range(3):
        write = {"argv": ["/bin/sh", "-c", f"head -c 10000 /dev/zero > file{number}"]}
        lines(daemon, "POST", "/trajectories/box/exec", write)
    assert ask(daemon, "POST", "/flush")[0] == 204
    stats = ask(daemon, "GET", "/stats?trajectories=1")[1]
    pauses = stats["pauses"]
    assert sum(pauses["counts"]) == sum(sum(minute["counts"]) for minute in pauses["minutes"]) == 3
    assert len(pauses["counts"]) == len(pauses["bounds_ms"]) + 1
    assert pauses["sum_ms"] > 0
    assert stats["usage"] == ask(daemon, "GET", "/usage")[1], "one source"
    counts = {(one["operation"], one["status"]): one["count"] for one in stats["requests"]}
    assert counts["POST /trajectories/{ref}/exec", "200"] == 3
    assert ask(daemon, "GET", "/nothing")[0] == 404
    counts = {(one["operation"], one["status"]): one["count"] for one in ask(daemon, "GET", "/stats")[1]["requests"]}
    assert counts["other", "404"] == 1
    eventually(lambda: ask(daemon, "GET", "/stats")[1]["disk"][0]["layer_bytes"] > 10_000)
    assert ask(daemon, "GET", "/stats?trajectories=0")[1]["disk"] == []
    assert ask(daemon, "GET", "/stats?trajectories=x")[0] == 400


def test_prometheus_reads_every_figure(daemon: Daemon) -> None:
    assert ask(daemon, "POST", "/sandboxes", {"name": "box"})[0] == 201
    lines(daemon, "POST", "/trajectories/box/exec", {"argv": ["/bin/true"]})
    connection = Connection(daemon)
    connection.request("GET", "/v1/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert (answer.status, answer.headers["Content-Type"]) == (200, METRICS_TYPE)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (cpu,) = families["snapshotd_sandbox_cpu_seconds"].samples
    assert (cpu.name, cpu.labels["name"]) == ("snapshotd_sandbox_cpu_seconds_total", "box")
    buckets = [one for one in families["snapshotd_pause_seconds"].samples if one.name.endswith("_bucket")]
    assert [one.labels["le"] for one in buckets][-1] == "+Inf"
    assert [one.value for one in buckets] == sorted(one.value for one in buckets)
    assert len(buckets) == len(BOUNDS_NS) + 1
    assert {one.labels["state"] for one in families["snapshotd_snapshots"].samples} >= {"captured", "stored"}
    assert text == daemon.client.metrics() or "snapshotd_requests_total" in daemon.client.metrics()


def test_labels_are_escaped_and_each_family_has_help_and_type() -> None:
    hostile = 'a"b\\c\nd'
    text = write_metrics(STATS, hostile)
    families = list(text_string_to_metric_families(text))
    lag = next(family for family in families if family.name == "snapshotd_node_unpublished_snapshots")
    assert [(one.labels, one.value) for one in lag.samples] == [({"node": "north"}, 7), ({"node": "west"}, 0)]
    assert families[0].samples[0].labels == {"version": hostile}
    assert [family.name for family in families if not family.documentation or family.type == "unknown"] == []
    assert text.endswith("\n")


def test_pauses_of_an_hour_are_kept_and_no_more() -> None:
    now = [0]
    pauses = Pauses(lambda: now[0])
    for minute in range(3 * MINUTES):
        now[0] = minute * 60_000_000_000
        for pause_ns in (0, 400_000, 3_000_000, 9_000_000_000):
            pauses.add(pause_ns)
    hour = pauses.last_hour()
    assert [began // 60_000_000_000 for began, _ in hour] == list(range(2 * MINUTES, 3 * MINUTES))
    assert (hour[0][1].counts[0], hour[0][1].counts[-1], hour[0][1].longest_ns) == (1, 1, 9_000_000_000)
    assert sum(pauses.total().counts) == 9 * MINUTES
    now[0] += 2 * MINUTES * 60_000_000_000
    assert pauses.last_hour() == []
