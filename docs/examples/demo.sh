#!/usr/bin/env bash
# The main job on a real project: run an agent, look at its snapshots, fork one twice, score and compare the forks, and
# bring the better one home as a commit. Called by `make demo`.
# Every command is printed before it runs; nothing is cleaned up, so that you can look at it all afterwards.
#
#   DEMO_RUNTIME   auto (default), runc or docker
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
runtime=${DEMO_RUNTIME:-auto}
name=fix-$(date +%H%M%S)
project=.cache/demo/$name

step() { printf '\n== %s\n' "$*"; }
show() { printf '$ %s\n' "$(printf '%q ' "$@" | sed 's/ $//; s/\\{/{/g; s/\\}/}/g')"; }
run() { show "$@"; "$@"; }

step 'The image that sandboxes start from (built once)'
run snapshotd image build default

step 'A real project with a planted bug'
run python docs/examples/prepare.py "$project"
git=(git -C "$project" -c user.name=demo -c user.email=demo@localhost)
"${git[@]}" init -q && "${git[@]}" add -A && "${git[@]}" commit -qm 'As found'

step 'The agent repairs it: one snapshot after each tool call'
run snapshotd run --runtime "$runtime" --workspace "$project" --name "$name" docs/examples/fix_agent.py

step 'What happened'
run snapshotd log "$name"
echo
point=$(snapshotd log "$name" --json | python -c 'import json, sys
print(next(one["parent"] for one in json.load(sys.stdin) if one["tool"]["name"] == "edit_file"))')
echo "${point:0:12} is the last snapshot before the first edit. What the agent changed since:"
run snapshotd diff --patch "${point:0:12}" "$name"

step 'From right before the edit: two repairs, side by side'
show snapshotd fork "${point:0:12}" --n 2 --name "$name-{index}" -- --repair '{index}'
mapfile -t forks < <(snapshotd fork "${point:0:12}" --n 2 --name "$name-{index}" -- --repair '{index}')
printf '%s\n' "${forks[@]}"
for fork in "${forks[@]}"; do
  echo
  show snapshotd attach "${fork:0:12}"
  code=0
  snapshotd attach "${fork:0:12}" || code=$?
  echo "exit code $code"
done
echo
run snapshotd tree

step 'Which repair is better: its tests, and what it did'
tests=(env PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -q -p no:cacheprovider --junit-xml /tmp/r.xml)
run snapshotd score --junit /tmp/r.xml "$name-0" "$name-1" -- "${tests[@]}"
echo
run snapshotd compare "$name-0" "$name-1"

step 'The better one comes home'
run snapshotd apply "$name-1" --to "$project" --dry-run
export GIT_AUTHOR_NAME=demo GIT_AUTHOR_EMAIL=demo@localhost GIT_COMMITTER_NAME=demo GIT_COMMITTER_EMAIL=demo@localhost
run snapshotd apply "$name-1" --to "$project" --commit 'Repair the splitter'
run git --no-pager -C "$project" log --stat -1

step 'Go on from here: promote it, undo that, go on in it'
cat <<END
snapshotd promote --yes $name-1 && snapshotd undo $name
snapshotd restore $name-1 --path /workspace --to /tmp/$name
snapshotd exec $name-1 -- git --version
END
