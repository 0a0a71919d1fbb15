#!/bin/sh
# Runs systemd as the first process of namespaces of its own, in cgroups below this process's own, with the units of one
# folder and no others. Usage: systemd_boot.sh UNITS NAME. NAME: of its cgroups. As root; ends when it is killed.
set -eu
if [ "$#" = 2 ]; then
  while IFS=: read -r _ controllers path; do
    case $controllers in
      "") above=/sys/fs/cgroup/unified ;;
      name=*) above=/sys/fs/cgroup/${controllers#name=} ;;
      *) above=/sys/fs/cgroup/$controllers ;;
    esac
    [ -d "$above" ] || above=/sys/fs/cgroup # version 2 alone
    above=$above${path%/}
    mkdir "$above/$2"
    if [ -e "$above/cpuset.mems" ] && [ ! -s "$above/$2/cpuset.mems.effective" ]; then # version 1: empty at first
      cat "$above/cpuset.cpus" > "$above/$2/cpuset.cpus"
      cat "$above/cpuset.mems" > "$above/$2/cpuset.mems"
    fi
    echo "$above/$2/cgroup.procs" >> "$1/cgroups"
  done < /proc/self/cgroup
  while read -r file; do echo "$$" > "$file"; done < "$1/cgroups"
  exec unshare --cgroup --mount --pid --fork --kill-child --mount-proc "$0" "$1"
fi
mount --make-rprivate /
sed -n 's|^[^ ]* [^ ]* [^ ]* [^ ]* \([^ ]*\) .* - \(cgroup2\?\) [^ ]* \(.*\)$|\1 \2 \3|p' /proc/self/mountinfo > "$1/mounts"
while read -r place kind options; do # again, as the namespace of cgroups shows them
  umount "$place"
  if [ "$kind" = cgroup ]; then kept=${options#rw,}; else kept=rw; fi
  mount -t "$kind" -o "$kept" "$kind" "$place"
done < "$1/mounts"
mount -t tmpfs tmpfs /run
export container=test SYSTEMD_UNIT_PATH="$1"
exec /lib/systemd/systemd --system --unit=multi-user.target --show-status=no --log-target=console
