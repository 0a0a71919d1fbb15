"""Thin, typed system calls: mounts, namespaces, cgroups, reflinks, dir-fd file operations. No policy."""
