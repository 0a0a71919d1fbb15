"""A person decides: about one tool, about a question of the program's own, and about what the policy file gates."""

from snapshotd.agent import Denied, approve, tool


@tool(approve="Publish this version?")
def publish(version):
    return "published " + version


@tool
def shell(command):
    return "ran " + command


with open("notes.txt", "w") as notes:
    notes.write("faster\n")
print(publish("1.0"))
answer = approve("Announce it?", details={"where": "the list"})
print("announced" if answer else f"not announced: {answer.reason}")
try:
    print(shell("rm -r build"))
except Denied as error:
    print(error)
