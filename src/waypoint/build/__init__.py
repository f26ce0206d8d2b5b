"""Turns a Dockerfile, a rootfs directory, a tarball or the host's own root into base layers."""
