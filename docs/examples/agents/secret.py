"""The agent sees its secret; what is recorded of it does not."""

import os

from snapshotd.agent import message, tool


@tool
def login(token):
    return "logged in with " + token


message("user", "the token is " + os.environ["SHOP_TOKEN"])
print(len(login(os.environ["SHOP_TOKEN"])))
