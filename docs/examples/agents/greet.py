"""A program to fork in the middle: what it was told decides what comes after the first call."""

import sys

from snapshotd.agent import tool


@tool
def look():
    print("looking")
    return "nobody is here"


@tool
def write(text):
    with open("greeting", "w") as file:
        file.write(text)
    return text


print(look())
print(write(sys.argv[1]))
