#!/bin/sh
# Starts gateway alone, and becomes it: signals and exit code are the program's own.
#
#   gateway.sh [OPTION...]
#
# Every option has an environment variable (`gateway --help`). It waits for the executor as long as it takes, and prints
# `ready http://ADDRESS` when it serves.
set -eu
. "$(dirname "$0")/defaults.sh"
mkdir -p "$HOLOBIONT_STATE"
exec "$programs/gateway" "$@"
