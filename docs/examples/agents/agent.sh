#!/bin/sh
# The same from a shell: one command for each request.
set -e
snapshotd-agent message user 'write a list'
snapshotd-agent run write -- sh -c 'printf "b\na\n" > list'
call=$(snapshotd-agent begin sort --arguments '{"path": "list"}')
sort list -o list
snapshotd-agent end "$call" --text sorted >/dev/null
snapshotd-agent state set sorted true
snapshotd-agent checkpoint 'all done' >/dev/null
cat list
