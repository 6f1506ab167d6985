#!/bin/sh
# Starts base-executor alone, and becomes it: signals and exit code are the program's own.
#
#   HOLOBIONT_MODEL=MODEL.gguf base-executor.sh [OPTION...]
#
# Every option has an environment variable (`base-executor --help`). It prints `ready` when gateways can connect.
set -eu
. "$(dirname "$0")/defaults.sh"
exec "$programs/base-executor" "$@"
