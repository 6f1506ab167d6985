#!/bin/sh
# Starts lora-worker alone, and becomes it: signals and exit code are the program's own.
#
#   lora-worker.sh --core N [OPTION...]
#
# Every option has an environment variable (`lora-worker --help`). It waits for the executor as long as it takes, and
# prints `ready` when it is seated.
set -eu
. "$(dirname "$0")/defaults.sh"
exec "$programs/lora-worker" "$@"
