#!/usr/bin/env bash
# Starts all processes, without systemd and without `holobiont up`, and stays with them.
#
#   HOLOBIONT_MODEL=MODEL.gguf [HOLOBIONT_WORKERS_CORES=2-3] [HOLOBIONT_MAX_TRAINERS=0] all.sh [OPTION OF GATEWAY...]
#
# A worker is started for each core of HOLOBIONT_WORKERS_CORES, such as 3, 2,3 or 2-3; by default there is none.
# HOLOBIONT_MAX_TRAINERS=0 leaves out the trainer.
# Prints `ready http://ADDRESS` when they serve. SIGTERM and SIGINT stop the gateway first, so that its requests end
# while the executor and its workers still compute, then the trainer. Nothing is restarted: if gateway or executor end
# unasked, the rest is stopped too; without a worker or the trainer the rest goes on.
# Exit code: 0 if all ended in order, else that of the first that did not.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# cores LIST: one a line.
cores() {
    local part
    for part in ${1//,/ }; do
        [[ $part =~ ^[0-9]+(-[0-9]+)?$ ]] || { echo "error: HOLOBIONT_WORKERS_CORES is $1; write cores such as 3, 2,3 or 2-3" >&2 && return 1; }
        seq "${part%-*}" "${part#*-}"
    done
}
worker_cores=$(cores "${HOLOBIONT_WORKERS_CORES:-}") || exit 2

# The processes stop in order when their standard input ends: also if this script is killed and can tell them nothing.
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
mkfifo "$pipes/lifeline" "$pipes/greeting"
exec {lifeline}<>"$pipes/lifeline" {greeting}<>"$pipes/greeting"

# In sessions of their own: a terminal's Ctrl-C is for this script, which knows the order.
setsid "$here/base-executor.sh" --exit-with-stdin <"$pipes/lifeline" >/dev/null {lifeline}>&- {greeting}>&- &
executor=$!
trainer=''
declare -A helpers=() workers=()
if [[ ${HOLOBIONT_MAX_TRAINERS:-} != 0 ]]; then
    setsid "$here/trainer.sh" --exit-with-stdin <"$pipes/lifeline" >/dev/null {lifeline}>&- {greeting}>&- &
    trainer=$! helpers[$!]=holobiont-trainer
fi
for core in $worker_cores; do
    setsid "$here/lora-worker.sh" --core "$core" --exit-with-stdin <"$pipes/lifeline" >/dev/null {lifeline}>&- {greeting}>&- &
    workers[$!]=$core helpers[$!]="the lora-worker on core $core"
done
setsid "$here/gateway.sh" --exit-with-stdin "$@" <"$pipes/lifeline" >"$pipes/greeting" {lifeline}>&- {greeting}>&- &
gateway=$!

# end PID...: asks each to stop, in this order, and waits for it. Fails with the first exit code that is not 0.
end() {
    local pid code=0
    for pid in "$@"; do
        kill -TERM "$pid" 2>/dev/null
        wait "$pid" || code=$((code ? code : $?))
    done
    return "$code"
}

stop() {
    trap '' TERM INT
    end "$gateway" ${trainer:+"$trainer"} "$executor" "${!workers[@]}"
    exit
}
trap stop TERM INT

# The first line is the address; a process that ends before it is a reason to stop waiting.
until read -r -t 0.2 line <&"$greeting"; do
    kill -0 "$executor" 2>/dev/null && kill -0 "$gateway" 2>/dev/null || break
done
[[ -z ${line:-} ]] || echo "$line"

while
    wait -n -p ended "$executor" "$gateway" "${!helpers[@]}"
    code=$?
    [[ -n ${helpers[$ended]:-} ]]
do
    echo "warning: ${helpers[$ended]} ended unasked with exit code $code; the rest goes on without it" >&2
    [[ $ended != "$trainer" ]] || trainer=''
    unset "helpers[$ended]" "workers[$ended]"
done
trap '' TERM INT
if [[ $ended == "$executor" ]]; then name=base-executor other=$gateway; else name=gateway other=$executor; fi
echo "error: $name ended unasked with exit code $code; its last lines above say why" >&2
end "$other" "${!helpers[@]}"
exit $((code ? code : 1))
