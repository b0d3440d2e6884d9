#!/bin/sh
# Installs the Debian packages that the tests of storage backends and of metrics need.
# Without root or apt-get, prints the missing packages and exits with status 0.
set -eu

wanted=""
ldconfig -p | grep -q libibverbs.so.1 || wanted="$wanted libibverbs1"
command -v promtool >/dev/null 2>&1 || wanted="$wanted prometheus"
[ -n "$wanted" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed, so the tests of what needs it will be skipped:$wanted" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# Run apt-get update only if the install fails, because a fresh machine may lack package lists.
# shellcheck disable=SC2086 - $wanted is a list of words.
apt-get install --yes --quiet --no-install-recommends $wanted >/dev/null ||
    { apt-get update --quiet >/dev/null && apt-get install --yes --quiet --no-install-recommends $wanted >/dev/null; } ||
    echo "apt-get could not install$wanted; the tests of what needs it will be skipped" >&2
