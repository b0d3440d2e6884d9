#!/bin/sh
# Installs what the tests of storage backends and of metrics need beside Python packages, from Debian's
# packages.
# Without the right to, it says what is missing and leaves it at that.
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
# The lists of packages may be missing on a fresh machine, and need not be fetched otherwise.
# shellcheck disable=SC2086 - these are words of their own.
apt-get install --yes --quiet --no-install-recommends $wanted >/dev/null ||
    { apt-get update --quiet >/dev/null && apt-get install --yes --quiet --no-install-recommends $wanted >/dev/null; } ||
    echo "apt-get could not install$wanted; the tests of what needs it will be skipped" >&2
