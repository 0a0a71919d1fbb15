"""The processes of a sandbox, held together: by a cgroup, by a pid namespace, or as a tree."""
