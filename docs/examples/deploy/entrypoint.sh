#!/bin/sh
# Give the container cgroups that the daemon can make sandboxes in, then become the command.
set -eu
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  exec "$@"  # version 2: the daemon does it
fi
# Version 1: Docker shows the container its own part of each hierarchy, while /proc names cgroups from the top. A cgroup namespace of the
# container's own makes the two agree.
exec unshare --cgroup -- "$@"
