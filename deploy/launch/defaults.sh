# What the launch scripts share: where things are unless the environment says otherwise. Sourced, never run.
# shellcheck shell=sh

# Programs: HOLOBIONT_PROGRAMS, else the folder above (as installed), else what was built in this checkout.
launch=$(cd "$(dirname "$0")" && pwd)
for programs in "${HOLOBIONT_PROGRAMS:-$launch/..}" "$launch/../../target/release" "$launch/../../target/debug"; do
    [ -x "$programs/base-executor" ] && [ -x "$programs/lora-worker" ] && [ -x "$programs/gateway" ] && break
    programs=''
done
if [ -z "$programs" ]; then
    echo "error: base-executor, lora-worker and gateway are not found side by side; set HOLOBIONT_PROGRAMS to their folder, or build them" >&2
    exit 1
fi

# State: where `holobiont up` has it too.
home=${HOLOBIONT_HOME:-${XDG_DATA_HOME:-${HOME:-/nonexistent}/.local/share}/holobiont}
export HOLOBIONT_STATE="${HOLOBIONT_STATE:-$home/state}"
# The executor makes this directory with mode 0700, and refuses one that others may enter.
export HOLOBIONT_SOCKET="${HOLOBIONT_SOCKET:-${XDG_RUNTIME_DIR:-$HOLOBIONT_STATE/run}/holobiont/executor.sock}"
# Workers find the executor beside that.
export HOLOBIONT_WORKER_SOCKET="${HOLOBIONT_WORKER_SOCKET:-$(dirname "$HOLOBIONT_SOCKET")/workers.sock}"
# So do trainers and split clients.
export HOLOBIONT_LAYERS="${HOLOBIONT_LAYERS:-$(dirname "$HOLOBIONT_SOCKET")/layers.sock}"
# And there the gateway asks for trainers, if there are to be any.
if [ "${HOLOBIONT_MAX_TRAINERS:-}" != 0 ]; then
    export HOLOBIONT_TRAINER_SOCKET="${HOLOBIONT_TRAINER_SOCKET:-$(dirname "$HOLOBIONT_SOCKET")/trainers.sock}"
fi
