#!/bin/bash
# A CI job in plain shell: bring a known-good state in, test it, and hand it on if it is good.
#
#   CACHE=/srv/cache KEY=linux-$COMMIT TEST='pytest -q --junit-xml $SNAPSHOTD_JUNIT' docs/examples/ci/job.sh
#
# $WORK (./work) gets the files, $REPORT (./junit.xml) the test report. The exit code is that of the step that failed.
set -euo pipefail
: "${CACHE:?a folder or s3://bucket/prefix}" "${KEY:?the key of this job}" "${TEST:?the command that tests}"
WORK=${WORK:-work} REPORT=${REPORT:-junit.xml}

# 1 is a miss: the key has no entry, and none begins with its first word.
TRAJECTORY=$(snapshotd import --cache "$CACHE" --key "$KEY" --restore-keys "${KEY%%-*}-")

# Every byte is verified. If one differs, the job ends here, and $WORK is not there.
snapshotd restore known-good --path /workspace --to "$WORK"

# In a fork that is thrown away. The report stays.
snapshotd exec --snapshot known-good --junit "$REPORT" -- sh -c "$TEST"

# The tag moves to the last snapshot of the trajectory only if it passes there too.
snapshotd tag --if "$TEST" "$TRAJECTORY" known-good

snapshotd export known-good --cache "$CACHE" --key "$KEY"
