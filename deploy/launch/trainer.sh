#!/bin/sh
# Starts holobiont-trainer as a service alone, and becomes it: signals and exit code are the program's own.
#
#   trainer.sh [OPTION...]
#
# Every option has an environment variable (`holobiont-trainer serve --help`). Each trainer that it is asked for looks for the
# executor by itself; it prints `ready` when it can be asked.
set -eu
. "$(dirname "$0")/defaults.sh"
# What is fetched of a model besides its linear layers is kept here, as everything of a user without a home.
[ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || export XDG_CACHE_HOME="$home/cache"
exec "$programs/holobiont-trainer" serve "$@" -- --executor "$HOLOBIONT_LAYERS"
