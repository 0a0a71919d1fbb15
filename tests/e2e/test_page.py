"""The page, in a browser, over a real daemon: what a person sees, and what they can do."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page_rig import Person
from tests.e2e.support import Snap
from tests.keeper_rig import eventually

pytestmark = [pytest.mark.runc, pytest.mark.timeout(600)]
AGENT = r"""
import os, sys, time
from snapshotd.agent import message, tool

@tool
def edit_file(path, text):
    open(path, "w").write(text)

@tool
def run_tests(suite):
    scope = {}
    exec(open("tax.py").read(), scope)
    assert scope["total"](100) == 116, "total(100) is %r" % scope["total"](100)
    return "\033[32m1 passed\033[0m"

@tool
def read_file(path):
    return open(path).read()

@tool(approve="may I deploy it?")
def deploy(target):
    return "deployed to " + target

message("user", "The rate is 16 percent from now on.")
edit_file("tax.py", "def total(price):\n    return price * 116 / 100\n")
run_tests("tests/test_tax.py")
message("assistant", "It passes. I make it shorter. <script>window.hacked = 1</script> \u202egnp.exe")
read_file("tax.py")
rate = os.environ.get("RATE", "1.61")
edit_file("tax.py", "def total(price):\n    return round(price * %s, 2)\n" % rate)
try:
    run_tests("tests/test_tax.py")
except AssertionError as failed:
    message("assistant", "It fails now: %s" % failed)
if "deploy" in sys.argv:
    deploy("production")
while "wait" in sys.argv and not os.path.exists("go"):
    time.sleep(0.05)
"""
NOTIFICATION = """
window.Notification = class {
  static permission = "default";
  static async requestPermission() { return (this.permission = "granted"); }
  constructor(title, { body }) { (window.told ??= []).push(`${title} ${body}`); }
};
"""
"""A browser without a screen shows none, so the test looks at what the page asks it to show."""


SCROLLED_SIDEWAYS = """[...document.querySelectorAll('.panes *')]
    .filter(one => one.scrollWidth > one.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(one).overflowX))
    .filter(one => !one.matches('.lines, .scroll, .tabs')).map(one => one.className)"""
"""Parts that are wider than their place, but for lines, tables and tabs, which may be."""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return path


@pytest.fixture
def name(own_snap: Snap, request: pytest.FixtureRequest) -> Iterator[str]:
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:24].strip("-")
    yield name
    for one in sorted(own_snap.json("ls"), key=lambda one: one["forked_from"] is None):
        own_snap("rm", "--force", one["id"])


def test_the_call_that_broke_a_test_is_found_and_forked_before(
    own_snap: Snap, person: Person, name: str, agent: Path
) -> None:
    """The steps of docs/ui.md."""
    own_snap("run", "--name", name, agent)
    person.opens(name)
    failed = person.page.locator(".row.bad").first
    assert "run_tests" in failed.inner_text()
    person.takes_picture("calls")
    failed.click()
    person.sees("total(100) is 161.0", ".inspector")
    person.page.locator(".timing .bad .tool").wait_for()
    person.presses("k")  # the call before
    person.sees("return round(price * 1.61, 2)", ".lines")
    person.takes_picture("patch")
    person.presses("k f")
    dialog = person.page.locator("dialog")
    dialog.get_by_label("Environment").fill("RATE=1.16")
    dialog.get_by_label("Name", exact=True).fill(f"{name}-again")
    dialog.get_by_label("Say this").fill("Mind the digits.")
    person.takes_picture("fork")
    person.clicks("Fork", "dialog")
    person.sees(f"forked: {name}-again")
    person.opens(f"{name}-again")
    person.sees("run_tests", ".calls")
    person.page.locator(".trajectory", has_text=f"{name}-again").locator(".dot.finished").wait_for()
    assert person.page.locator(".row.bad").count() == 0, "it passes now"
    person.presses("c")
    person.clicks("Compare", "dialog")
    person.sees("They part", ".comparison")
    sides = person.page.locator(".sides").inner_text()
    assert "1 failed" in sides
    person.takes_picture("compare")
    (forked,) = [one["id"] for one in own_snap.json("ls") if one["forked_from"]]
    assert "1.16" in own_snap("cat", f"{forked}:/workspace/tax.py").stdout


@pytest.mark.long  # in every tab: test_page_hostile.py
def test_what_an_agent_wrote_is_text(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    own_snap("exec", "--snapshot", name, "--", "true")
    person.opens(name)
    person.sees("<script>window.hacked = 1</script> <202E>gnp.exe", ".calls")
    person.chooses(3)
    person.presses("5")
    person.sees("<script>window.hacked = 1</script>", ".conversation")
    assert person.page.evaluate("window.hacked") is None
    person.chooses(2)
    person.presses("2")
    passed = person.sees("1 passed", ".lines")
    assert "fg2" in passed.get_attribute("class")


def test_a_call_is_seen_when_it_is_committed_and_decided_on_the_page(
    own_snap: Snap, person: Person, name: str, agent: Path
) -> None:
    own_snap("run", "--detach", "--name", name, agent, "deploy", "wait")
    person.opens(name)
    person.sees("1 waits for you", ".top").click()
    person.sees("may I deploy it?", ".inbox")
    person.sees("production", ".given")
    person.sees("def total(price):", ".inbox")
    person.takes_picture("approval")
    (asked,) = own_snap.json("approvals")
    person.clicks("Approve…")
    person.sees(asked["digest"], ".confirm")
    person.clicks("Approve", ".confirm")
    person.sees("deploy runs")
    assert "cannot be decided again" in own_snap("approve", asked["id"], code=6).stderr
    person.opens(name)
    person.sees("deploy", ".calls")
    seen = person.page.locator(".row").count()
    own_snap("exec", name, "--", "touch", "/workspace/go")
    person.page.wait_for_function(f"document.querySelectorAll('.row').length > {seen}")
    person.page.locator(".trajectory.on .dot.finished").wait_for()
    assert own_snap.json("approvals", "--all")[0]["status"] == "approved"


@pytest.mark.long  # a page hears of what happens: the test before
def test_seven_tabs_stay_live(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    """A browser has six connections to a server, for all tabs together."""
    pages = [person.page, *(person.page.context.new_page() for _ in range(6))]
    for page in pages[1:]:
        page.goto(person.page.url)
        page.locator("nav").wait_for()
    own_snap("run", "--detach", "--name", name, agent, "wait")
    for page in pages:
        page.locator(".trajectory", has_text=name).click()
        page.locator(".row.bad").wait_for()
    own_snap("exec", name, "--", "touch", "/workspace/go")
    for page in pages:
        page.locator(".row", has_text="touch /workspace/go").wait_for()
        page.locator(".trajectory.on .dot.finished").wait_for()


@pytest.mark.long  # it is done and undone in test_page_person.py
def test_a_rewind_is_shown_before_it_is_done_and_can_be_undone(
    own_snap: Snap, person: Person, name: str, agent: Path
) -> None:
    own_snap("run", "--name", name, agent)
    person.opens(name)
    undo = person.page.locator(".inspector").get_by_role("button", name="Undo")
    person.page.locator(".inspector").get_by_role("button", name="Tree").wait_for()
    assert undo.count() == 0, "nothing was done that can be undone"
    person.chooses(2)
    person.presses("r")
    person.sees("~ /workspace/tax.py", "dialog")
    person.clicks("Rewind", "dialog")
    person.sees("is back at call 2")
    assert "116 / 100" in own_snap("cat", f"{name}:/workspace/tax.py").stdout
    person.presses("Escape")
    undo.wait_for()
    person.presses("u")
    person.clicks("Undo", "dialog")
    person.sees("is as it was before")
    assert "1.61" in own_snap("cat", f"{name}:/workspace/tax.py").stdout
    own_snap("exec", name, "--", "true")
    undo.wait_for(state="detached")


@pytest.mark.long  # a text that is cut: test_a_family_is_one_file_that_opens_without_a_server
def test_a_file_that_is_too_large_hides_no_other(own_snap: Snap, person: Person, name: str, tmp_path: Path) -> None:
    own_snap.create("--name", name)
    own_snap("exec", name, "--", "sh", "-c", "echo early > a; truncate -s 600M sparse; echo late > z")
    person.opens(name)
    person.chooses(1)
    for text in ("+early", "sparse", "600 MiB, too large to show", "+late"):
        person.sees(text, ".lines")
    file = tmp_path / "page.html"
    own_snap("export", name, "--format", "html", "-o", file)
    assert "too large to show" in file.read_text()
    assert '"path":"sparse","bytes":629145600' in file.read_text()


@pytest.mark.long  # without a browser: test_promote.py
def test_a_fork_is_promoted(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    before = own_snap.json("log", name)[3]["id"]
    own_snap("fork", before, "--name", f"{name}-fork", "--resume", "--variant", "v:env.RATE=1.16")
    own_snap("wait", f"{name}-fork-v")
    person.opens(f"{name}-fork-v")
    person.presses("m")
    person.sees("has taken 3 steps since the fork", "dialog")
    person.clicks("Promote", "dialog")
    person.sees("promote --yes", ".notice")
    person.problems.clear()  # the browser has logged the refusal
    person.page.get_by_label("Leave them behind").check()
    person.clicks("Promote", "dialog")
    person.sees(f"{name} has what {name}-fork-v did")
    person.sees("promote", ".calls")
    assert "1.16" in own_snap("cat", f"{name}:/workspace/tax.py").stdout
    eventually(lambda: own_snap.json("show", name)["state"] == "stored", "stored, so that the fork can be removed")


@pytest.mark.long  # another environment and message: the first test
def test_a_fork_has_another_message_result_and_arguments(
    own_snap: Snap, person: Person, name: str, agent: Path
) -> None:
    own_snap("run", "--name", name, agent)
    person.opens(name)
    person.chooses(3)
    person.presses("f")
    fields = {"Name": f"{name}-told", "Say this": "Read it twice.", "Result of this call": '"nothing"'}
    for label, text in {**fields, "Arguments": "deploy", "Environment": "RATE=1.16\nOTHER=2"}.items():
        person.page.locator("dialog").get_by_label(label, exact=label == "Name").fill(text)
    person.page.get_by_label("In place of the last message").check()
    person.clicks("Fork", "dialog")
    person.sees(f"forked: {name}-told")
    person.sees("1 waits for you", ".top")  # it has reached the call that its other arguments ask for
    said = own_snap.json("show", f"{name}-told", "--conversation")
    texts = str(said)
    assert "Read it twice." in texts
    assert "I make it shorter" not in texts


@pytest.mark.long
def test_a_fork_that_is_none_says_why(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    person.opens(name)
    person.chooses(3)
    person.presses("f")
    person.page.locator("dialog").get_by_label("Result of this call").fill("nothing")
    person.clicks("Fork", "dialog")
    person.sees("the result is no JSON", ".notice")
    person.page.locator("dialog").get_by_label("Result of this call").fill("")
    person.page.locator("dialog").get_by_label("Environment").fill("RATE")
    person.clicks("Fork", "dialog")
    person.sees("is no NAME=VALUE", ".notice")


@pytest.mark.long  # a download: test_page_hostile.py; the preview: test_apply.py
def test_files_are_restored_and_an_apply_is_previewed(
    own_snap: Snap, person: Person, name: str, agent: Path, tmp_path: Path
) -> None:
    own_snap("run", "--name", name, agent)
    one = own_snap.json("log", name)[4]["id"]
    person.opens(name)
    person.chooses(4)
    person.presses("d")
    person.sees(f"snapshotd restore {one[:12]}", "dialog")
    with person.page.expect_download() as download:
        person.page.get_by_role("link", name="Download").click()
    with tarfile.open(download.value.path()) as tree:
        held = {member.name.removeprefix("./") for member in tree}
        assert {"workspace/tax.py", "etc/passwd"} <= held
    person.clicks("Close", "dialog")
    person.presses("4")
    with person.page.expect_download() as download:
        person.page.get_by_role("link", name="Folder as tar").click()
    with tarfile.open(download.value.path()) as tree:
        assert [member.name for member in tree] == ["workspace", "workspace/tax.py"]
    person.presses("p")
    person.sees("return round(price * 1.61, 2)", "dialog .lines")
    command = person.page.locator("dialog .command code").inner_text()
    (folder := tmp_path / "folder").mkdir()
    shown = own_snap(*command.replace("--to .", f"--to {folder}").split()[1:])
    assert "A tax.py" in shown.stdout


@pytest.mark.long  # the form is drawn in test_every_view_fits; experiments: test_experiment.py
def test_an_experiment_is_begun_from_a_form_and_followed(
    own_snap: Snap, person: Person, name: str, agent: Path
) -> None:
    own_snap("run", "--name", name, agent)
    person.opens(name)
    person.chooses(3)
    person.presses("e")
    page = person.page
    page.get_by_label("Name", exact=True).fill(f"{name}-rates")
    page.get_by_label("Environment of variant 1").fill("RATE=1.16")
    page.get_by_label("Environment of variant 2").fill("RATE=1.7")
    page.get_by_label("Command, run in").fill("grep -q 1.16 tax.py")
    person.clicks("Begin")
    page.locator(".grid .passed").wait_for(timeout=60_000)
    person.sees("all branches have ended", "main")
    (info,) = own_snap.json("experiment", "ls")
    assert info["best"] == "as-it-is.0"
    person.clicks("Compare the best of each variant")
    person.sees("They part", ".comparison")


@pytest.mark.long  # its text: test_a_family_is_one_file_that_opens_without_a_server
def test_a_family_is_a_tree_whose_branches_are_compared(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    log = own_snap.json("log", name)
    for at, label in ((4, "late"), (2, "early")):
        own_snap("fork", log[at]["id"], "--name", f"{name}-x", "--resume", "--variant", f"{label}:env.RATE=1.16")
        own_snap("wait", f"{name}-x-{label}")
    person.opens(name)
    person.presses("v")
    person.sees("3 trajectories, 2 forks", ".tree")
    person.page.locator(".branch:not(.heads)").nth(2).wait_for()
    person.takes_picture("tree")
    assert person.page.locator(".branch path").count() == 2, "each fork leaves its parent's lane"
    person.presses("j Space j Space c")
    sides = person.page.locator(".sides")
    sides.wait_for()
    assert f"{name}-x-late" in sides.inner_text()
    assert f"{name}-x-early" in sides.inner_text()


@pytest.mark.long  # a folder of many files in test_page_hostile.py
def test_a_long_list_holds_only_what_is_seen(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    own_snap("exec", name, "--", "seq", "20000")
    person.opens(name)
    person.sees("seq 20000", ".row")
    person.presses("G 2")
    person.sees("20", ".lines")
    devtools = person.page.context.new_cdp_session(person.page)

    def nodes() -> int:
        devtools.send("HeapProfiler.collectGarbage")
        return int(devtools.send("Memory.getDOMCounters")["nodes"])

    before = nodes()
    for line in range(400, 20_000, 400):
        person.page.locator(".lines").evaluate("(box, top) => { box.scrollTop = top }", line * 18)
        person.sees(str(line + 5), ".lines")
    assert nodes() < before + 1000


@pytest.mark.long  # the long set alone has what a reader of screens is told
def test_a_list_says_where_each_of_its_rows_is(own_snap: Snap, person: Person, name: str) -> None:
    own_snap.create("--name", name)
    for _ in range(2):
        own_snap("exec", name, "--", "true")
    person.opens(name)
    calls = person.page.get_by_role("listbox", name="Calls").get_by_role("option")
    calls.nth(2).wait_for()
    assert [(one.get_attribute("aria-posinset"), one.get_attribute("aria-setsize")) for one in calls.all()] == [
        ("1", "3"),
        ("2", "3"),
        ("3", "3"),
    ]
    (listed,) = person.page.get_by_role("list", name="Trajectories").get_by_role("listitem").all()
    assert (listed.get_attribute("aria-posinset"), listed.get_attribute("aria-setsize")) == ("1", "1")
    own_snap("exec", name, "--", "true")
    person.page.locator(".row[aria-posinset='4'][aria-setsize='4']").wait_for()
    assert {one.get_attribute("aria-setsize") for one in calls.all()} == {"4"}


def test_a_terminal_on_a_throw_away_fork(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    person.opens(name)
    person.chooses(4)
    person.presses("x")
    rows = person.page.locator(".xterm-rows")
    rows.get_by_text(re.compile("[#$]")).first.wait_for()
    person.page.keyboard.type(
        "tty; stty size; echo gone > gone.txt; printf '\\033[38;2;250;100;0m%s\\033[0m' or''ange\n"
    )
    rows.get_by_text("/dev/pts/0").first.wait_for()
    orange = rows.get_by_text("orange", exact=True).last
    orange.wait_for()
    assert orange.evaluate("one => getComputedStyle(one).color") == "rgb(250, 100, 0)"
    person.page.keyboard.type("exit 3\n")
    person.sees("the shell has ended (3)", ".tty")
    assert own_snap("cat", f"{name}:/workspace/gone.txt", code=None).returncode, "nothing of it is kept"


@pytest.mark.long  # hostile ones: test_page_hostile.py
def test_files_are_shown_as_they_were(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    person.opens(name)
    person.chooses(1)
    person.presses("4")
    person.clicks("tax.py", ".files")
    person.sees("return price * 116 / 100", ".lines")
    with person.page.expect_download() as download:
        person.clicks("Download", ".crumbs")
    assert "116 / 100" in Path(download.value.path()).read_text()


@pytest.mark.long  # a detail of the page, in the long set alone
def test_forks_of_one_call_are_drawn_as_few_lanes(own_snap: Snap, person: Person, name: str) -> None:
    _, snapshot = own_snap.create("--name", name)
    own_snap("fork", snapshot, "-n", "8")
    own_snap("exec", name, "--", "true")
    person.opens(name)
    person.page.locator(".tag.fork").nth(2).wait_for()
    assert 0 < person.page.locator(".row path").count() <= 5


@pytest.mark.long  # whole ones: the next test
def test_half_a_letter_is_searched_for(person: Person) -> None:
    person.presses("/")
    box = person.page.locator("#find")
    box.evaluate("box => { box.value = '\\ud83dx'; box.dispatchEvent(new Event('input', { bubbles: true })) }")
    person.page.wait_for_url("**/#/find/*/*")
    person.sees("0 hits")


def test_text_is_found_and_leads_to_its_call(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--name", name, agent)
    person.opens(name)
    person.presses("/")
    person.page.get_by_label("Find", exact=True).fill("hacked")
    marked = person.page.locator(".hit mark").first
    marked.wait_for()
    assert marked.inner_text() == "hacked"
    person.takes_picture("find")
    person.page.get_by_label("Find", exact=True).press("Enter")
    person.sees("<script>window.hacked = 1</script>", ".conversation")
    person.page.go_back()
    person.sees("hacked", ".hit")
    person.page.reload()
    person.sees("hacked", ".hit")
    assert person.page.get_by_label("Find", exact=True).input_value() == "hacked"
    person.page.get_by_label("Find", exact=True).fill("nowhereatall")
    person.sees("0 hits", ".found")


@pytest.mark.long  # the view of the machine: test_page_fleet.py
def test_the_machine_shows_disk_pauses_and_sandboxes(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    own_snap("run", "--detach", "--name", name, agent, "wait")
    person.page.evaluate("location.hash = '#/machine'")
    row = person.page.locator(".machine tr", has_text=name).first
    row.get_by_text(re.compile(r"^\d+\.\d\d of 2$")).wait_for()  # processors, at the second look
    assert re.search(r"MiB of 2\.0 GiB", row.inner_text())
    person.page.locator(".pauses .longest").first.wait_for()
    person.sees("captured, not stored yet", ".machine")
    person.takes_picture("machine")


@pytest.mark.long  # the page tells of it in test_a_call_is_seen_when_it_is_committed_and_decided_on_the_page
def test_the_browser_tells_of_an_approval(own_snap: Snap, person: Person, name: str, agent: Path) -> None:
    page = person.page
    page.context.grant_permissions(["notifications"])
    page.add_init_script(NOTIFICATION)
    page.reload()
    page.evaluate("location.hash = '#/approvals'")
    person.clicks("Notify me in this browser")
    own_snap("run", "--detach", "--name", name, agent, "deploy")
    page.wait_for_function("() => window.told")
    assert page.evaluate("told") == ["snapshotd: a call waits for you deploy"]
    page.wait_for_function("() => document.title.startsWith('(1) ')")
    (asked,) = [one for one in own_snap.json("approvals") if one["status"] == "pending"]
    own_snap("deny", asked["id"])
    page.wait_for_function("() => !document.title.startsWith('(')")


def test_a_family_is_one_file_that_opens_without_a_server(
    own_snap: Snap, chromium: Any, name: str, agent: Path, tmp_path: Path
) -> None:
    own_snap("run", "--name", name, agent)
    own_snap("fork", own_snap.json("log", name)[4]["id"], "--name", f"{name}-fork")
    own_snap(
        "exec", name, "--", "sh", "-c", "yes snapshot | head -c 100000; echo '</script><script>hacked = 1</script>' >&2"
    )
    file = tmp_path / "page.html"
    own_snap("export", name, "--format", "html", "--with-forks", "-o", file)
    assert "1 text cut at 64 KiB" in own_snap("export", name, "--format", "html", "-o", file).stderr
    own_snap("export", name, "--format", "html", "--with-forks", "-o", file)
    context = chromium.new_context(offline=True)
    try:
        person = Person(context.new_page())
        person.page.goto(file.as_uri())
        person.opens(name)
        person.sees("1 text cut at 64 KiB", ".away")
        person.chooses(4)
        person.sees("return round(price * 1.61, 2)", ".lines")
        person.presses("5")
        person.sees("I make it shorter. <script>window.hacked = 1</script> <202E>gnp.exe", ".conversation")
        person.presses("G 2")
        person.sees("</script><script>hacked = 1</script>", ".lines")
        person.presses("6")
        person.sees("No irreversible call", ".inspector")
        person.presses("v")
        person.sees("2 trajectories, 1 fork", ".tree")
        assert person.page.evaluate("typeof hacked") == "undefined"
        assert person.page.get_by_role("button", name="Fork from here").count() == 0
        assert person.problems == []
    finally:
        context.close()


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("dark", 360),
        *(pytest.param(*one, marks=pytest.mark.long) for one in [("light", 1400), ("dark", 1400), ("light", 360)]),
    ],
)
def test_every_view_fits(
    own_snap: Snap, person: Person, name: str, agent: Path, scheme: str, width: int, tmp_path: Path
) -> None:
    own_snap("run", "--name", name, agent)
    page = person.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 720})
    first = own_snap.json("log", name)[5]["id"]
    places = (
        "",
        f"t/{name}",
        f"t/{name}/{first}",
        f"compare/{name}/{first}",
        "tree",
        "find/*/tax",
        f"experiments/new/{first}",
    )
    for place in (*places, "approvals", "experiments", "machine"):
        page.evaluate(f"location.hash = '#/{place}'")
        page.wait_for_function("document.querySelector('.panes')")
        page.locator("[role=status]", has_text="…").wait_for(state="detached")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(SCROLLED_SIDEWAYS) == [], place
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", background)[0]) < 128) == (scheme == "dark")
