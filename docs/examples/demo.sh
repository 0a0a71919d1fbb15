#!/usr/bin/env bash
# The main job on a real project: run an agent, look at its snapshots, fork two of them, compare. Called by `make demo`.
# Every command is printed before it runs; nothing is cleaned up, so that you can look at it all afterwards.
#
#   DEMO_RUNTIME   auto (default), runc or docker
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
runtime=${DEMO_RUNTIME:-auto}
name=fix-$(date +%H%M%S)
project=.cache/demo/$name
output=.cache/demo/$name.log

step() { printf '\n== %s\n' "$*"; }
show() { printf '$ %s\n' "$(printf '%q ' "$@" | sed 's/ $//; s/\\{/{/g; s/\\}/}/g')"; }
run() { show "$@"; "$@"; }

step 'The image that sandboxes start from (built once)'
run snapshotd image build default

step 'A real project with a planted bug'
run python docs/examples/prepare.py "$project"

step 'The agent repairs it: one snapshot after each tool call'
show snapshotd run --runtime "$runtime" --workspace "$project" --name "$name" docs/examples/fix_agent.py
snapshotd run --runtime "$runtime" --workspace "$project" --name "$name" docs/examples/fix_agent.py | tee "$output"
calls=$(grep -c '^  call: ' "$output")
run python docs/examples/compare.py check "$name" "$calls"

step 'What happened'
run snapshotd log "$name"
echo
show python docs/examples/compare.py fork-point "$name" edit_file
point=$(python docs/examples/compare.py fork-point "$name" edit_file)
echo "${point:0:12} is the last snapshot before the first edit. What the agent changed since:"
run snapshotd diff --patch "${point:0:12}" "$name"

step 'From right before the edit: two repairs, side by side'
show snapshotd fork "${point:0:12}" --n 2 --json -- --repair '{index}'
forked=$(snapshotd fork "${point:0:12}" --n 2 --json -- --repair '{index}')
printf '%s\n' "$forked"
mapfile -t forks < <(python -c 'import json, sys
for item in json.load(sys.stdin)["trajectories"]:
    print(item if isinstance(item, str) else item["id"])' <<<"$forked")
for fork in "${forks[@]}"; do
  echo
  show snapshotd attach "${fork:0:12}"
  code=0
  snapshotd attach "${fork:0:12}" | tee "$output" || code=$?
  echo "exit code $code"
  run python docs/examples/compare.py check "${fork:0:12}" "$(grep -c '^  call: ' "$output")"
done
echo
run snapshotd tree

step 'Which repair is better'
run python docs/examples/compare.py table "${point:0:12}" "${forks[@]}"

step 'Go on from here: look, compare, take over, restore, go on in it'
winner=${forks[1]:0:12}
cat <<END
snapshotd show $winner
snapshotd diff ${forks[0]:0:12} $winner --patch
snapshotd diff ${point:0:12} $winner --patch | patch -p1 -d $project
snapshotd restore $winner --path /workspace --to /tmp/$name
snapshotd exec $winner -- git --version
END
