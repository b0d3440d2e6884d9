#!/bin/sh
# Runs a command with a monotonic clock that starts near 0, as after a boot. This reveals times taken from
# another clock, and code that uses time 0 for "never". If the kernel or this user's rights do not allow a
# time namespace, the command runs with the machine's clock.
set -eu

# Use `time.monotonic`, because /proc/uptime also counts the time that the machine was suspended.
now_s=$("${PYTHON:-python3}" -c 'import time; print(int(time.monotonic()))')
if unshare --time --monotonic "-$now_s" true 2>/dev/null; then
    exec unshare --time --monotonic "-$now_s" "$@"
fi
echo "no clock that has just begun: it takes Linux 5.6, util-linux 2.36 and root; the tests use the machine's" >&2
exec "$@"
