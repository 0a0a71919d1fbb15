#!/bin/sh
# Give the container cgroups that the daemon can make sandboxes in, then become the command.
set -eu
cgroup=/sys/fs/cgroup
if [ -f $cgroup/cgroup.controllers ]; then
  # Version 2: a cgroup with processes of its own cannot hand controllers to its children, so the processes move down first.
  mkdir -p $cgroup/daemon
  while read -r pid; do
    echo "$pid" > $cgroup/daemon/cgroup.procs || true  # one that has just ended
  done < $cgroup/cgroup.procs
  for controller in $(cat $cgroup/cgroup.controllers); do
    echo "+$controller" > $cgroup/cgroup.subtree_control
  done
  exec "$@"
fi
# Version 1: Docker shows the container its own part of each hierarchy, while /proc names cgroups from the top. A cgroup namespace of the
# container's own makes the two agree.
exec unshare --cgroup -- "$@"
